// The portable forward with its choices open, for tests and tuning.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/config.h"
#include "ops/forward/problem.h"

namespace flash_kda::cuda::portable {

struct Options {
  int64_t record_budget = kRecordBudget;  // bytes; fewer make more windows
  int row_parts = 0;                      // 2 or 4 blocks to a head; 0: chosen
};

int64_t workspace_bytes_with(const Options& options, int64_t tokens_total, int64_t heads,
                             int64_t sequences);

// Runs a problem that kForward accepts. Results are bitwise the same for all options.
Status run_with(const Options& options, const ForwardProblem& problem, void* workspace,
                int64_t workspace_bytes);

}  // namespace flash_kda::cuda::portable
