// What the Hopper forward kernel gets from the host.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_kda::cuda::sm90 {

struct Params {
  // [B, T, H, 128] bf16 seen as (64 channels, T, 2 channel halves, H, B).
  CUtensorMap q, k, v, g, out;
  void* out_rows;  // out again, for the rows of a last, partial chunk; strides in elements
  int64_t out_batch_stride, out_token_stride;
  const void* beta;  // strides in elements
  int64_t beta_batch_stride, beta_token_stride, beta_head_stride;
  const void* A_log;          // [H] or null
  const void* dt_bias;        // [H, 128] or null
  const void* initial_state;  // [N, H, 128, 128] or null
  void* final_state;          // likewise
  const void* cu_seqlens;     // [N + 1] or null
  int32_t tokens, heads, sequences;
  float scale, lower_bound;
  // bf16 instead of fp32, int64 instead of int32
  bool beta_bf16, A_log_bf16, dt_bias_bf16, initial_bf16, final_bf16, cu_seqlens_int64;
  bool sort;  // take long sequences first
};

}  // namespace flash_kda::cuda::sm90
