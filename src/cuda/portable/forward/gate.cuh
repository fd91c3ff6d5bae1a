// Step "gate": w = log2(e) * lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), the log2 decay of a
// token and channel, and the sums G of w inside a block of 16 tokens.
//
// sigmoid is 1 / (1 + 2^t) by the hardware's ex2 and rcp: tanh alone would be one operation less,
// but its absolute error swamps slow decays, where sigmoid is near 0.
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"

namespace flash_kda::cuda::portable {

inline constexpr float kLog2e = 1.4426950408889634F;

// Of one head: t = slope * g + slope * dt_bias.
struct Gate {
  float slope = 0.0F;          // -log2(e) exp(A_log)
  float inverse_bound = 0.0F;  // 1 / (lower_bound * log2(e)), finite and below 0
};

__device__ __forceinline__ float gate_value(const Gate& gate, float g, float sloped_bias) {
  const float e = ptx::exp2_approx(fmaf(g, gate.slope, sloped_bias));
  return ptx::rcp_approx(fmaf(e, gate.inverse_bound, gate.inverse_bound));
}

// Two tokens of one channel, bf16 to fp16.
__device__ __forceinline__ uint32_t gate_pair(const Gate& gate, uint32_t g, float sloped_bias) {
  return ptx::pack_f16(gate_value(gate, ptx::low_bf16(g), sloped_bias),
                       gate_value(gate, ptx::high_bf16(g), sloped_bias));
}

// The lower triangle of ones as operand A, which turns w into its inclusive sums.
__device__ __forceinline__ void triangle_of_ones(int g, int c, uint32_t (&a)[4]) {
  constexpr uint32_t kOne = 0x3c00;  // fp16
  const uint32_t diagonal = (2 * c <= g ? kOne : 0) | (2 * c + 1 <= g ? kOne << 16 : 0);
  a[0] = diagonal;
  a[1] = kOne | kOne << 16;
  a[2] = 0;
  a[3] = diagonal;
}

// A lane's share of a 16x16 tile (tokens, channels) in fp32: token 8 r + g, channel
// 8 h + 2c + i at [2 h + r][i].
using Tile = float[4][2];

// 2^G and 2^-G of a tile from w, whose words are tokens 8 r + 2c, + 1 of channel 8 h + g at
// [2 h + r]. Both stay inside 2^+-115.5, since a token decays by 2^-7.22 at most.
__device__ __forceinline__ void decay_powers(const uint32_t (&triangle)[4], const uint32_t (&w)[4],
                                             Tile& power, Tile& inverse) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum[4];
    ptx::mma_f16_zero(sum, triangle, w[2 * h], w[2 * h + 1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        power[2 * h + r][i] = ptx::exp2_approx(sum[2 * r + i]);
        inverse[2 * h + r][i] = ptx::exp2_approx(-sum[2 * r + i]);
      }
    }
  }
}

}  // namespace flash_kda::cuda::portable
