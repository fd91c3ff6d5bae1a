// The Hopper forward kernel, queued on a stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/sm90/forward/params.h"
#include "flash_kda/status.h"

namespace flash_kda::cuda::sm90 {

// At most one CTA per SM and at most one per sequence and head; heads and sequences above 0.
Status launch_forward(const Params& params, uint32_t ctas, cudaStream_t stream);

// The kernel, by which to ask whether a device can run this build.
const void* forward_entry();

}  // namespace flash_kda::cuda::sm90
