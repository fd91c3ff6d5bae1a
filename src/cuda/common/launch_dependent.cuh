// A launch that may begin before the kernel in front of it has ended (ptx/dependent.cuh): compute
// capability 9.0 and newer. A launch of this kind also keeps the host for less time than a plain
// one.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/check.h"

namespace flash_kda::cuda {

inline constexpr int kCapabilityOfDependent = 90;

// `what` names the kernel in errors.
template <typename Params>
Status launch_dependent(const char* what, void (*kernel)(Params), unsigned blocks, int threads,
                        int shared_bytes, const Params& params, cudaStream_t stream) {
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
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  if (error != cudaSuccess) (void)cudaGetLastError();  // it is reported here, not by a later call
  return to_status(error, what);
}

}  // namespace flash_kda::cuda
