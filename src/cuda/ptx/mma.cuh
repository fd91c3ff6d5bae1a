// Warp-level matrix products by CuTe's atoms, accumulators fp32. Fragments, with g = lane / 4 and
// c = lane % 4: A m16k16: rows g, g + 8 (registers 0, 1) of columns 2c, 2c + 1, then the same of
// columns + 8. B k16n8: rows 2c, 2c + 1 of column g, then rows + 8. D m16n8: row g, columns 2c,
// 2c + 1, then row g + 8.
#pragma once

#include <cstdint>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // the host's versions of the atoms are empty
#include <cute/arch/mma_sm80.hpp>
#pragma GCC diagnostic pop

namespace flash_kda::cuda::ptx {

// d += a b, bf16.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1,
                                            d[0], d[1], d[2], d[3]);
}

// d += a b, fp16.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1,
                                          d[0], d[1], d[2], d[3]);
}

// d = a b, fp16.
__device__ __forceinline__ void mma_f16_zero(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1,
                                          0.0F, 0.0F, 0.0F, 0.0F);
}

// d += a b, tf32 m16n8k8, with a given as a D fragment: what the instruction takes for columns c
// and c + 4 are columns 2c and 2c + 1, so b0, b1 are rows 2c, 2c + 1 of column g.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(
      d[0], d[1], d[2], d[3], __float_as_uint(a[0]), __float_as_uint(a[2]), __float_as_uint(a[1]),
      __float_as_uint(a[3]), __float_as_uint(b0), __float_as_uint(b1), d[0], d[1], d[2], d[3]);
}

}  // namespace flash_kda::cuda::ptx
