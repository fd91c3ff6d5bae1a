// What the split forward costs, in microseconds of a Hopper device, and the division that costs
// least. The constants are measured on an H200 (docs/hopper-split.md); the rest counts blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm90_split/forward/config.h"

namespace flash_kda::cuda::sm90_split {

// What there is to do: sequences of equal length are assumed, since lengths are not known here.
struct Work {
  int64_t chunks = 0;  // of a sequence
  int64_t pairs = 0;   // sequences times heads
  int64_t heads = 0;
  int64_t most_maps = 0;  // that the workspace holds
  int64_t multiprocessors = 0;
};

struct Division {
  int64_t segment_chunks = 0;
  int groups = 1;  // warpgroups of a block of the recurrence
  double microseconds = 0.0;
};

// Microseconds per chunk of a block: one warpgroup alone on a multiprocessor, two of them, two
// without output; of a step of the merge; and of a kernel besides.
inline constexpr double kAloneCost = 0.46;
inline constexpr double kPairCost = 0.75;
inline constexpr double kMapCost = 0.55;
inline constexpr double kMergeCost = 0.9;
inline constexpr double kKernelCost = 4.0;
// Preparation of a chunk of one head by the whole device: its bytes at the memory's rate.
inline constexpr double kPrepareCost = 0.0138;

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Division uncut(const Work& work) {
  Division division;
  division.segment_chunks = int64_t{1} << 30;  // longer than any part
  const int64_t halves = 2 * work.pairs;
  division.groups = halves <= work.multiprocessors ? 1 : 2;
  const double chunk = division.groups == 1 ? kAloneCost : kPairCost;
  const int64_t rounds = division.groups == 1 ? 1 : ceil_divide(work.pairs, work.multiprocessors);
  division.microseconds =
      kKernelCost + static_cast<double>(rounds) * static_cast<double>(work.chunks) * chunk;
  return division;
}

inline Division cut(const Work& work, int64_t segments) {
  Division division;
  division.segment_chunks = ceil_divide(work.chunks, segments);
  division.groups = 2;
  segments = ceil_divide(work.chunks, division.segment_chunks);
  const auto chunks = static_cast<double>(division.segment_chunks);
  const int64_t sms = work.multiprocessors;
  const auto map_rounds = static_cast<double>(ceil_divide(2 * work.pairs * (segments - 1), sms));
  const auto merge_rounds = static_cast<double>(ceil_divide(8 * work.pairs, sms));
  const auto rounds = static_cast<double>(ceil_divide(work.pairs * segments, sms));
  division.microseconds = 3 * kKernelCost + chunks * (map_rounds * kMapCost + rounds * kPairCost) +
                          merge_rounds * static_cast<double>(segments - 1) * kMergeCost;
  return division;
}

inline Division choose_division(const Work& work) {
  Division best = uncut(work);
  const int64_t sequences = work.pairs / std::max<int64_t>(work.heads, 1);
  const int64_t most = std::min(work.chunks / kLeastSegment,
                                work.most_maps / std::max<int64_t>(work.heads, 1) - 2 * sequences);
  // More segments than fill the device twice are of no use.
  const int64_t useful =
      std::min(most, ceil_divide(2 * work.multiprocessors, std::max<int64_t>(work.pairs, 1)));
  for (int64_t segments = 2; segments <= useful; ++segments) {
    const Division division = cut(work, segments);
    if (division.microseconds < best.microseconds) best = division;
  }
  return best;
}

// All of a call, for comparison with other implementations.
inline double total_microseconds(const Work& work) {
  return kKernelCost + static_cast<double>(work.chunks * work.pairs) * kPrepareCost +
         choose_division(work).microseconds;
}

}  // namespace flash_kda::cuda::sm90_split
