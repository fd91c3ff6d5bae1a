// Stands in for kernel.cu in a build without the architecture 90a.
#include "cuda/sm90/forward/kernel.h"

namespace flash_kda::cuda::sm90 {

const void* forward_entry() { return nullptr; }

Status launch_forward(const Params&, uint32_t, cudaStream_t) {
  return Status::unsupported("not in this build, which lacks the architecture 90a");
}

}  // namespace flash_kda::cuda::sm90
