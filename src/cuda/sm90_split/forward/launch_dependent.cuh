// A launch that may begin before the kernel in front of it has ended (ptx/bulk_linear.cuh).
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/check.h"

namespace flash_kda::cuda::sm90_split {

template <typename Params>
Status launch_dependent(void (*kernel)(Params), unsigned blocks, int threads, int shared_bytes,
                        const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return to_status(cudaLaunchKernelEx(&config, kernel, params),
                   "launch of a cuda.sm90_split kernel");
}

}  // namespace flash_kda::cuda::sm90_split
