// Transposes an 8x8 matrix of 16-bit elements held by a warp: lane i has row i / 4, columns
// 2 (i % 4) and the next, before and after.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

__device__ __forceinline__ uint32_t transpose_matrix(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

}  // namespace flash_kda::cuda::ptx
