// Single numbers and whole states of one of the two float types.
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "ops/forward/problem.h"

namespace flash_kda::cuda {

__device__ __forceinline__ float load_number(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  return ptx::low_bf16(static_cast<const uint16_t*>(data)[index]);
}

// Two neighbours; index is even.
__device__ __forceinline__ float2 load_pair(const Dense& dense, int64_t index) {
  if (dense.dtype == DType::kFloat32) {
    return *reinterpret_cast<const float2*>(static_cast<const float*>(dense.data) + index);
  }
  const uint32_t word =
      *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(dense.data) + index);
  return make_float2(ptx::low_bf16(word), ptx::high_bf16(word));
}

__device__ __forceinline__ void store_pair(const Dense& dense, int64_t index, float x, float y) {
  if (dense.dtype == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(dense.data) + index) = make_float2(x, y);
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(dense.data) + index) = ptx::pack_bf16(x, y);
  }
}

}  // namespace flash_kda::cuda
