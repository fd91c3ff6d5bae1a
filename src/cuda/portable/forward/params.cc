#include "cuda/portable/forward/params.h"

#include <algorithm>
#include <limits>
#include <string>

namespace flash_kda::cuda::portable {

TilePlan make_plan(const ForwardProblem& p, int64_t* bounds, int32_t* first_slots,
                   int32_t* slot_sequences) {
  TilePlan plan;
  plan.sequences = static_cast<int32_t>(p.sequences);
  plan.tokens = p.tokens;
  if (p.cu_seqlens) {
    plan.bounds = bounds;
    plan.first_slots = first_slots;
    plan.slot_sequences = slot_sequences;
  } else {
    plan.slots_per_sequence = static_cast<int32_t>(slots_of(p.tokens));
  }
  return plan;
}

Status check_counts(int64_t slots, int64_t blocks) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  if (slots <= kMost && blocks <= kMost) return {};
  return Status::unsupported("expected at most " + std::to_string(kMost) + " chunks of " +
                             std::to_string(kChunk) + " tokens and as many blocks, got " +
                             std::to_string(slots) + " and " + std::to_string(blocks));
}

PrepareParams prepare_params(const ForwardProblem& p, const TilePlan& plan) {
  // A bound of 0 would make 0 * infinity; this one decays nothing either.
  constexpr double kLeastBound = -1e-30;
  PrepareParams params;
  params.q = p.q;
  params.k = p.k;
  params.g = p.g;
  params.beta = p.beta;
  params.A_log = p.A_log;
  params.dt_bias = p.dt_bias;
  params.inverse_bound =
      static_cast<float>(1.0 / std::min(p.lower_bound * 1.4426950408889634, kLeastBound));
  params.heads = static_cast<int32_t>(p.heads);
  params.plan = plan;
  return params;
}

void fill_params(const ForwardProblem& p, const TilePlan& plan, ChainParams* params) {
  params->v = p.v;
  params->out = p.out;
  params->initial_state = p.initial_state;
  params->final_state = p.final_state;
  params->scale = p.scale;
  params->heads = static_cast<int32_t>(p.heads);
  params->plan = plan;
}

}  // namespace flash_kda::cuda::portable
