#include "ops/forward/impls.h"

namespace flash_kda {

std::span<const ForwardImpl* const> forward_impls() {
  static const ForwardImpl* const list[] = {
#ifdef FLASH_KDA_WITH_CUDA
      &cuda::recurrent::kForward,
      &cuda::sm90::kForward,
      &cuda::sm90_split::kForward,
      &cuda::portable::kForward,
#endif
      &cpu::kForward,
      &reference::kForward,
  };
  return list;
}

}  // namespace flash_kda
