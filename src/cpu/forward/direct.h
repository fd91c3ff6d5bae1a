// Short sequences, token by token, straight from the equations: no chunk, no transposed state. A
// few rows of the state at a time go through all the tokens.
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
      decay[c] = exp2_in_range(log2_decay(to_float(g[c]), gate.bias[c], gate.rate, gate.bound));
    }
    for (int c = 0; c < kHeadDim; ++c) x->k[t][c] *= k_factor;
    for (int c = 0; c < kHeadDim; ++c) x->q[t][c] *= q_factor;
  }
}

// Four V rows of the state, from row v on, through one token. Together they share what they load of
// the token and hide the latency of each other's sums.
inline constexpr int kTogether = 4;

inline void step_rows(int t, int v, float (*s)[kHeadDim], DirectTokens* x) {
  const float* decay = x->decay[t];
  const float* k = x->k[t];
  const float* q = x->q[t];
  float s0 = 0.0F, s1 = 0.0F, s2 = 0.0F, s3 = 0.0F;  // S k^
#pragma omp simd reduction(+ : s0, s1, s2, s3)
  for (int c = 0; c < kHeadDim; ++c) {
    s[0][c] *= decay[c];
    s[1][c] *= decay[c];
    s[2][c] *= decay[c];
    s[3][c] *= decay[c];
    s0 += s[0][c] * k[c];
    s1 += s[1][c] * k[c];
    s2 += s[2][c] * k[c];
    s3 += s[3][c] * k[c];
  }
  const float* value = &x->v[t][v];
  const float beta = x->beta[t];
  const float r0 = beta * (value[0] - s0);
  const float r1 = beta * (value[1] - s1);
  const float r2 = beta * (value[2] - s2);
  const float r3 = beta * (value[3] - s3);
  float o0 = 0.0F, o1 = 0.0F, o2 = 0.0F, o3 = 0.0F;
#pragma omp simd reduction(+ : o0, o1, o2, o3)
  for (int c = 0; c < kHeadDim; ++c) {
    s[0][c] += r0 * k[c];
    s[1][c] += r1 * k[c];
    s[2][c] += r2 * k[c];
    s[3][c] += r3 * k[c];
    o0 += s[0][c] * q[c];
    o1 += s[1][c] * q[c];
    o2 += s[2][c] * q[c];
    o3 += s[3][c] * q[c];
  }
  float* o = &x->o[t][v];
  o[0] = o0;
  o[1] = o1;
  o[2] = o2;
  o[3] = o3;
}

// A whole sequence of at most kDirectTokens tokens, state in and out.
inline void run_direct(const Head& head) {
  const int tokens = static_cast<int>(head.tokens);
  DirectTokens x;
  load_tokens(head, tokens, &x);
  for (int v = 0; v < kHeadDim; v += kTogether) {
    alignas(64) float rows[kTogether][kHeadDim] = {};
    const int64_t offset = int64_t{kHeadDim} * v;
    if (head.initial_state != nullptr) {
      load_values(head.initial_state, head.initial_dtype, offset, rows[0], kTogether * kHeadDim);
    }
    for (int t = 0; t < tokens; ++t) step_rows(t, v, rows, &x);
    if (head.final_state != nullptr) {
      store_values(head.final_state, head.final_dtype, offset, rows[0], kTogether * kHeadDim);
    }
  }
  for (int t = 0; t < tokens; ++t) {
    store_values(head.out.row(t), DType::kBFloat16, 0, x.o[t], kHeadDim);
  }
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
