// What warpgroup matrix products of sm_90a (wgmma_f16.cuh) need around them: A in registers, B in
// shared memory with rows of 128 swizzled bytes, D fp32 in registers. Warp w of the warpgroup holds
// rows 16 w ... 16 w + 15 of A and D, as mma.cuh has them for one warp; D's registers 4 i ... 4 i +
// 3 are columns 8 i ... .
//
// The instructions run asynchronously: registers of A and D belong to them between the issue and
// the wait, which hold() tells the compiler.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

// Before the first product that reads registers written since the last one.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps uses of these registers on their side of this point.
template <int kCount>
__device__ __forceinline__ void hold(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// A matrix of 128-byte rows in the 128-byte swizzle. leading: bytes between blocks of 64 columns
// where the columns are contiguous (transposed use); stride: bytes between groups of 8 rows. Adding
// bytes / 16 to it moves it on in shared memory.
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, uint32_t leading,
                                                 uint32_t stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(stride >> 4) << 32 |
         static_cast<uint64_t>(leading >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

}  // namespace flash_kda::cuda::ptx
