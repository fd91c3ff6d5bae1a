// A launch that may begin before the kernel in front of it has ended (ptx/bulk_linear.cuh).
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/check.h"

namespace flash_kda::cuda::sm90_split {

// Once per device: the most shared memory of a block. All that a multiprocessor has serves as such,
// since blocks of kernels that want different shares of it can't be on one together.
template <typename Params>
Status allow_shared(void (*kernel)(Params), int bytes) {
  FLASH_KDA_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  return {};
}

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
