// Gates: the decay of every key channel and the strength beta of every token's update.
//
//   w = lower_bound * log2(e) * sigmoid(exp(A_log) * (g + dt_bias))
//   beta = sigmoid(beta logit)
//
// w is the log2 of one token's decay. Decays are products over several tokens, so w is summed
// up. Sums stay inside a block of 16 tokens, where they are at most 116 in magnitude: 2^-sum is
// then a normal float too.
#pragma once

#include <cmath>

#include "cpu/forward/head.h"
#include "cpu/forward/tiles.h"
#include "cpu/forward/vectors.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

// Of one head.
struct GateParameters {
  float bias[kHeadDim];  // dt_bias
  float rate;            // exp(A_log)
  float bound;           // lower_bound in log2 units
};

inline void load_gate(const Head& head, GateParameters* gate) {
  gate->rate = head.gate_rate;
  gate->bound = head.lower_bound * kLog2E;
  if (head.dt_bias != nullptr) {
    load_values(head.dt_bias, head.dt_bias_dtype, 0, gate->bias, kHeadDim);
  } else {
    for (float& bias : gate->bias) bias = 0.0F;
  }
}

// w of one token in one channel.
inline float log2_decay(float g, float bias, float rate, float bound) {
  return bound / (1.0F + exp_clamped(-rate * (g + bias)));
}

// Tokens first ... first + rows - 1 of the head; those past `rows` decay nothing.
[[gnu::noinline]] inline void gate_block(const Head& head, const GateParameters& gate,
                                         int64_t first, int rows, BlockDecay* block) {
  alignas(64) float sum[kHeadDim] = {};
  for (int i = 0; i < kBlock; ++i) {
    if (i < rows) {
      const uint16_t* g = head.g.row(first + i);
#pragma omp simd
      for (int c = 0; c < kHeadDim; ++c) {
        sum[c] += log2_decay(to_float(g[c]), gate.bias[c], gate.rate, gate.bound);
      }
    }
#pragma omp simd
    for (int c = 0; c < kHeadDim; ++c) {
      const float decay = exp2_in_range(sum[c]);
      block->log2[i][c] = sum[c];
      block->decay[i][c] = decay;
      block->inverse[i][c] = 1.0F / decay;
    }
  }
}

inline float beta_of(const Head& head, int64_t token) {
  float logit;
  load_values(head.beta, head.beta_dtype, token * head.beta_stride, &logit, 1);
  return 1.0F / (1.0F + ::expf(-logit));
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
