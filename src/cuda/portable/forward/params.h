// What the kernels of the portable forward take, by value.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/plan.cuh"
#include "ops/forward/problem.h"

namespace flash_kda::cuda::portable {

struct PlanParams {
  Dense cu_seqlens;
  TilePlan plan;
};

struct PrepareParams {
  Rows q, k, g;
  Logits beta;
  Dense A_log, dt_bias;
  float inverse_bound = 0.0F;  // 1 / (lower_bound * log2(e)), finite and below 0
  int32_t heads = 0;
  TilePlan plan;
  Window window;
  unsigned char* records = nullptr;  // [window.slots, heads] of kRecordBytes
};

// State of the sequence that the end of a window cuts, as the registers have it: the scaled rows
// and their units (row_scale.cuh).
struct Carry {
  float* state = nullptr;  // [H, V, K]
  float* unit = nullptr;   // [H, V]
};

struct RecurrenceParams {
  Rows v, out;
  Dense initial_state, final_state;
  float scale = 0.0F;
  int32_t heads = 0;
  int32_t row_parts = 1;       // blocks that share the V rows of a head: 1, 2, 4 or 8
  int32_t tiles_per_warp = 1;  // tiles of 16 rows: 1 or 2
  TilePlan plan;
  Window window;
  const unsigned char* records = nullptr;
  Carry carry_in, carry_out;  // not the same memory: a window can begin and end inside sequences
};

}  // namespace flash_kda::cuda::portable
