// A forward problem that validate.cc has found legal: what implementations see.
#pragma once

#include <cstdint>

#include "flash_kda/forward.h"

namespace flash_kda {

// Rows of 128 bfloat16 for (batch, token, head): data + b * batch_stride + t * token_stride +
// h * 128, in elements.
struct Rows {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
};

// One number for (batch, token, head).
struct Logits {
  const void* data = nullptr;
  DType dtype = DType::kBFloat16;  // or kFloat32
  int64_t batch_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// Dense memory of one of two dtypes; data is null when the argument was not given.
struct Dense {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  explicit operator bool() const { return data != nullptr; }
};

struct ForwardProblem {
  int64_t batch = 0;
  int64_t tokens = 0;     // T, per batch entry
  int64_t heads = 0;      // H
  int64_t sequences = 0;  // N
  Rows q, k, v, g, out;
  Logits beta;
  Dense A_log;          // [H] bf16 or fp32, or null for zeros
  Dense dt_bias;        // [H, 128] bf16 or fp32, or null for zeros
  Dense initial_state;  // [N, H, V, K] bf16 or fp32, or null for zeros
  Dense final_state;    // likewise, or null when not wanted
  Dense cu_seqlens;     // [N + 1] int32 or int64, or null: sequence n is batch entry n
  float scale = 0.0F;
  float lower_bound = 0.0F;
  Device device;
  void* stream = nullptr;

  int64_t tokens_total() const { return batch * tokens; }
};

}  // namespace flash_kda
