// The ordered list of forward implementations. Adding one: write it, declare it here, and put it
// into the list in impls.cc.
#pragma once

#include <cstdint>
#include <span>

#include "ops/forward/problem.h"

namespace flash_kda {

struct ForwardImpl {
  const char* name;  // "cuda.sm90"
  // Ok, or the reason why it can't run this problem on this device (kUnsupported).
  Status (*accepts)(const ForwardProblem&);
  // Bytes of workspace, for any problem of these totals, which are not negative; never falls when
  // one grows.
  int64_t (*workspace_bytes)(int64_t tokens_total, int64_t heads, int64_t sequences);
  // Runs an accepted problem. The workspace has at least workspace_bytes.
  Status (*run)(const ForwardProblem&, void* workspace, int64_t workspace_bytes);
  // Ok, or that a later entry is expected to run this accepted problem faster (kUnsupported); null
  // for always ok. Not asked of an implementation that is forced.
  Status (*prefers)(const ForwardProblem&) = nullptr;
};

// Best first.
std::span<const ForwardImpl* const> forward_impls();

namespace reference {
extern const ForwardImpl kForward;
}
namespace cpu {
extern const ForwardImpl kForward;
}
#ifdef FLASH_KDA_WITH_CUDA
namespace cuda::recurrent {
extern const ForwardImpl kForward;
}
namespace cuda::portable {
extern const ForwardImpl kForward;
}
namespace cuda::sm90 {
extern const ForwardImpl kForward;
}
namespace cuda::sm90_split {
extern const ForwardImpl kForward;
}
#endif

}  // namespace flash_kda
