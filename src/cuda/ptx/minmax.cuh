// Packed maxima.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

// Of two bf16 each; what is no number gives way.
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

}  // namespace flash_kda::cuda::ptx
