// What the kernels that run side by side ask of shared memory.
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

}  // namespace flash_kda::cuda::sm90_split
