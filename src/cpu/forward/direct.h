// Short sequences, token by token, straight from the equations: no chunk, no transposed state. Each
// row of the state goes through all the tokens while it lies in registers or the first cache.
#pragma once

#include "cpu/forward/gate.h"
#include "cpu/forward/prepare.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

struct alignas(64) DirectTokens {
  float decay[kDirectTokens][kHeadDim];
  float k[kDirectTokens][kHeadDim];  // k^
  float q[kDirectTokens][kHeadDim];  // scale q^
  float v[kDirectTokens][kHeadDim];
  float o[kDirectTokens][kHeadDim];
  float beta[kDirectTokens];
};

inline void load_tokens(const Head& head, int tokens, DirectTokens* x) {
  GateParameters gate;
  load_gate(head, &gate);
  for (int t = 0; t < tokens; ++t) {
    x->beta[t] = beta_of(head, t);
    load_row(head.k.row(t), x->k[t], kHeadDim);
    load_row(head.q.row(t), x->q[t], kHeadDim);
    load_row(head.v.row(t), x->v[t], kHeadDim);
    const float k_factor = inverse_norm(x->k[t]);
    const float q_factor = inverse_norm(x->q[t]) * head.scale;
    const uint16_t* __restrict g = head.g.row(t);
    float* __restrict decay = x->decay[t];
    for (int c = 0; c < kHeadDim; ++c) {
      decay[c] = exp2_bounded(log2_decay(to_float(g[c]), gate.bias[c], gate.rate, gate.bound));
    }
    for (int c = 0; c < kHeadDim; ++c) x->k[t][c] *= k_factor;
    for (int c = 0; c < kHeadDim; ++c) x->q[t][c] *= q_factor;
  }
}

// One row of the state through all the tokens: o[., v].
inline void step_row(int tokens, int v, float* __restrict s, DirectTokens* x) {
  for (int t = 0; t < tokens; ++t) {
    const float* __restrict decay = x->decay[t];
    const float* __restrict k = x->k[t];
    const float* __restrict q = x->q[t];
    float recalled = 0.0F;
#pragma omp simd reduction(+ : recalled)
    for (int c = 0; c < kHeadDim; ++c) {
      s[c] *= decay[c];
      recalled += s[c] * k[c];
    }
    const float correction = x->beta[t] * (x->v[t][v] - recalled);
    float read = 0.0F;
#pragma omp simd reduction(+ : read)
    for (int c = 0; c < kHeadDim; ++c) {
      s[c] += correction * k[c];
      read += s[c] * q[c];
    }
    x->o[t][v] = read;
  }
}

// A whole sequence of at most kDirectTokens tokens, state in and out.
inline void run_direct(const Head& head) {
  const int tokens = static_cast<int>(head.tokens);
  DirectTokens x;
  load_tokens(head, tokens, &x);
  for (int v = 0; v < kHeadDim; ++v) {
    alignas(64) float row[kHeadDim] = {};
    const int64_t offset = int64_t{kHeadDim} * v;
    if (head.initial_state != nullptr) {
      load_values(head.initial_state, head.initial_dtype, offset, row, kHeadDim);
    }
    step_row(tokens, v, row, &x);
    if (head.final_state != nullptr) {
      store_values(head.final_state, head.final_dtype, offset, row, kHeadDim);
    }
  }
  for (int t = 0; t < tokens; ++t) {
    store_values(head.out.row(t), DType::kBFloat16, 0, x.o[t], kHeadDim);
  }
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
