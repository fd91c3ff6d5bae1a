// One head of one sequence: the unit that runs serially along its tokens.
#pragma once

#include <cstdint>

#include "flash_kda/types.h"

namespace flash_kda::cpu {

// bfloat16 rows of 128 numbers, one per token; the stride is in elements.
struct TokenRows {
  uint16_t* data;
  int64_t stride;

  uint16_t* row(int64_t token) const { return data + token * stride; }
};

struct Head {
  TokenRows q, k, v, g, out;  // token 0 is the sequence's first
  const void* beta;           // logits
  DType beta_dtype;           // bf16 or fp32
  int64_t beta_stride;
  int64_t tokens;
  const void* dt_bias;  // [K] bf16 or fp32, or null for zeros
  DType dt_bias_dtype;
  const void* initial_state;  // [V, K] bf16 or fp32, or null for zeros
  DType initial_dtype;
  void* final_state;  // likewise, or null when not wanted; may be initial_state
  DType final_dtype;
  float gate_rate;  // exp(A_log)
  float lower_bound;
  float scale;
};

}  // namespace flash_kda::cpu
