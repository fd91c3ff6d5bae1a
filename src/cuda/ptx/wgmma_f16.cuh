// Warpgroup matrix products of sm_90a with fp16 operands: A in registers, B in shared memory, D
// fp32 in registers; fragments, matrices and waits as in wgmma.cuh.
#pragma once

#include <cstdint>

#include "cuda/ptx/wgmma.cuh"

namespace flash_kda::cuda::ptx {

#define FLASH_KDA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLASH_KDA_D16(d, i) \
  FLASH_KDA_D4(d, i), FLASH_KDA_D4(d, i + 4), FLASH_KDA_D4(d, i + 8), FLASH_KDA_D4(d, i + 12)

// d [64 x 32] = a [64 x 16] b [16 x 32] (+ d if accumulate); b is stored as 32 rows of 16.
__device__ __forceinline__ void wgmma_f16_n32(float* d, const uint32_t* a, uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
      "}"
      : FLASH_KDA_D16(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d [64 x 64] = a [64 x 16] b [16 x 64] (+ d if accumulate); b is stored as 64 rows of 16.
__device__ __forceinline__ void wgmma_f16_n64(float* d, const uint32_t* a, uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
      "}"
      : FLASH_KDA_D16(d, 0), FLASH_KDA_D16(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

// d [64 x 128] += a [64 x 16] b [16 x 128]; b is stored as 16 rows of 128 (transposed use).
__device__ __forceinline__ void wgmma_f16_n128_transposed(float (&d)[64], const uint32_t* a,
                                                          uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
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
