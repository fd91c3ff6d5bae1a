// What the kernels of the portable forward take, by value.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/plan.cuh"
#include "flash_kda/status.h"
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

// State of the sequence that the end of a window cuts, as the registers have it: the scaled rows,
// their units and what is known of their extent (row_scale.cuh).
struct Carry {
  float* state = nullptr;    // [H, V, K]
  float* unit = nullptr;     // [H, V]
  uint32_t* bits = nullptr;  // [H, V, 4], RowExtent's state_bits of the four lanes of a row
};

// Of a kernel that walks along sequences.
struct ChainParams {
  Rows v, out;
  Dense initial_state, final_state;
  float scale = 0.0F;
  int32_t heads = 0;
  TilePlan plan;
  Window window;
};

struct RecurrenceParams : ChainParams {
  const unsigned char* records = nullptr;
  Carry carry_in, carry_out;  // not the same memory: a window can begin and end inside sequences
};

// The plan of a problem. The tables, in the workspace, are for cu_seqlens; launch_plan fills them.
TilePlan make_plan(const ForwardProblem& problem, int64_t* bounds, int32_t* first_slots,
                   int32_t* slot_sequences);

// kUnsupported for more slots, or blocks of a launch, than the kernels can number.
Status check_counts(int64_t slots, int64_t blocks);

// All but where the records go and which window.
PrepareParams prepare_params(const ForwardProblem& problem, const TilePlan& plan);

// All but which window.
void fill_params(const ForwardProblem& problem, const TilePlan& plan, ChainParams* params);

}  // namespace flash_kda::cuda::portable
