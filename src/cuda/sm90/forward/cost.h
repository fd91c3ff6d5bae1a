// What the fused forward costs on an H200, in microseconds, for comparison with cuda.sm90_split
// (sm90_split/forward/cost.h). docs/hopper.md has the measurements behind the constants.
#pragma once

#include <cstdint>

#include "cuda/sm90/forward/config.h"

namespace flash_kda::cuda::sm90 {

inline constexpr double kKernelCost = 7.3;
inline constexpr double kChunkCost = 1.97;  // of one sequence and head
inline constexpr double kItemCost = 5.1;    // a sequence and head: its states, start and end

// Where the estimates are as close as this the fused kernel is preferred, which needs no workspace.
inline constexpr double kPreferred = 1.05;

// `items` sequences times heads of `tokens` tokens each: lengths are not known to the host.
inline double total_microseconds(int64_t items, int64_t tokens, int64_t multiprocessors) {
  const int64_t rounds = (items + multiprocessors - 1) / multiprocessors;
  const int64_t chunks = (tokens + kChunk - 1) / kChunk;
  return kKernelCost +
         static_cast<double>(rounds) * (static_cast<double>(chunks) * kChunkCost + kItemCost);
}

}  // namespace flash_kda::cuda::sm90
