// Warpgroup matrix products of sm_90a: A bf16 in registers, B bf16 in shared memory with rows of
// 128 swizzled bytes, D fp32 in registers. Warp w of the warpgroup holds rows 16 w ... 16 w + 15
// of A and D, as mma.cuh has them for one warp; D's registers 4 i ... 4 i + 3 are columns 8 i ... .
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

#define FLASH_KDA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLASH_KDA_D16(d, i) \
  FLASH_KDA_D4(d, i), FLASH_KDA_D4(d, i + 4), FLASH_KDA_D4(d, i + 8), FLASH_KDA_D4(d, i + 12)

// d [64 x 32] = kSign a [64 x 16] b [16 x 32] (+ d if accumulate); b is stored as 32 rows of 16.
template <int kSign>
__device__ __forceinline__ void wgmma_n32(float* d, const uint32_t* a, uint64_t b,
                                          bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, %22, 1, 0;\n"
      "}"
      : FLASH_KDA_D16(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
        "n"(kSign));
}

// d [64 x 64] += a [64 x 16] b [16 x 64]; b is stored as 64 rows of 16.
__device__ __forceinline__ void wgmma_n64(float* d, const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : FLASH_KDA_D16(d, 0), FLASH_KDA_D16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d [64 x 128] += a [64 x 16] b [16 x 128]; b is stored as 16 rows of 128 (transposed use).
__device__ __forceinline__ void wgmma_n128_transposed(float* d, const uint32_t* a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : FLASH_KDA_D16(d, 0), FLASH_KDA_D16(d, 16), FLASH_KDA_D16(d, 32), FLASH_KDA_D16(d, 48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef FLASH_KDA_D16
#undef FLASH_KDA_D4

}  // namespace flash_kda::cuda::ptx
