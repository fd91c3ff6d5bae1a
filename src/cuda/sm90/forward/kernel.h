// The Hopper forward kernel, queued on a stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm90/forward/params.h"
#include "flash_kda/status.h"
#include "ops/forward/problem.h"

namespace flash_kda::cuda::sm90 {

// Whether the kernel's parameters can express a problem; the reason why not.
Status check_params(const ForwardProblem& problem);

// All but sort, which is left false.
Status fill_params(const ForwardProblem& problem, Params* params);

// At most one CTA per SM and at most one per sequence and head; heads and sequences above 0.
Status launch_forward(const Params& params, uint32_t ctas, cudaStream_t stream);

// The kernel beside the one that makes its records, which has been queued before: a CTA per head,
// fewer than there are SMs.
Status launch_helped(const HelpedParams& params, cudaStream_t stream);

// The kernel, by which to ask whether a device can run this build.
const void* forward_entry();

}  // namespace flash_kda::cuda::sm90
