// The split forward with its choices open, for tests and tuning.
#pragma once

#include <cstdint>

#include "cuda/sm90_split/forward/config.h"
#include "ops/forward/problem.h"

namespace flash_kda::cuda::sm90_split {

struct Options {
  int64_t record_budget = kRecordBudget;  // bytes; fewer make more windows
  int64_t segment_chunks = 0;             // of a segment, up to 2^30; 0: chosen
  int groups = 0;                         // warpgroups of a block, 1 or 2; 0: chosen
  bool beside = false;  // preparation beside the recurrence, where that can be; else as chosen
};

int64_t workspace_bytes_with(const Options& options, int64_t tokens_total, int64_t heads,
                             int64_t sequences);

// Runs a problem that kForward accepts.
Status run_with(const Options& options, const ForwardProblem& problem, void* workspace,
                int64_t workspace_bytes);

}  // namespace flash_kda::cuda::sm90_split
