// CUDA errors as Status values that name the call.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "flash_kda/status.h"

namespace flash_kda::cuda {

inline Status to_status(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return {};
  return Status::runtime(std::string(call) + ": " + cudaGetErrorString(error) + " (" +
                         cudaGetErrorName(error) + ")");
}

// After a launch: whether it was accepted.
inline Status launch_status(const char* kernel) { return to_status(cudaGetLastError(), kernel); }

}  // namespace flash_kda::cuda

// Hands the failure of a CUDA runtime call on to the caller.
#define FLASH_KDA_RETURN_IF_CUDA_ERROR(call) \
  FLASH_KDA_RETURN_IF_ERROR(::flash_kda::cuda::to_status((call), #call))
