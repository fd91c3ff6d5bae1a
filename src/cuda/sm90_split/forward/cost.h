// What the split forward costs, in microseconds of a Hopper device, and the division that costs
// least. The constants are fitted to an H200 (docs/hopper-split.md); the rest counts blocks and
// bytes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm90_split/forward/config.h"

namespace flash_kda::cuda::sm90_split {

// What there is to do.
struct Work {
  int64_t chunks = 0;  // of a sequence, on average
  int64_t pairs = 0;   // sequences times heads
  int64_t heads = 0;
  int64_t most_maps = 0;  // that the workspace holds
  int64_t multiprocessors = 0;
  bool even = true;  // all sequences have the same length
};

inline constexpr int64_t kWhole = int64_t{1} << 30;  // chunks of a segment: no sequence is cut

struct Division {
  int64_t segment_chunks = 0;
  int groups = 1;         // warpgroups of a block of the recurrence
  int64_t preparing = 0;  // multiprocessors that prepare beside the recurrence; 0: all, before it
  double microseconds = 0.0;
};

// Of a chunk, to a block: with output by one warpgroup, by two; without output by two.
inline constexpr double kChunkCost[3] = {0.0, 0.70, 1.12};
inline constexpr double kMapChunkCost = 0.80;
// Of a chunk of one head, to the device: its bytes at 4 TB/s.
inline constexpr double kChunkBytesCost = 0.0114;
inline constexpr double kPrepareChunkCost = 0.0138;
// Preparation beside the recurrence: a chunk of one head, to a multiprocessor; of a chain by one
// warpgroup meanwhile; until the first records are there, and the start and end of both kernels.
inline constexpr double kBesidePrepareCost = 1.75;
inline constexpr double kBesideChunkCost = 0.90;
inline constexpr double kBesideCost = 28.0;
inline constexpr int64_t kLeastPreparing = 16;
// Of a step of the merge, by clusters of 8, of 4 and of 2 blocks, the last for each pair if that is
// more; of the start and end of a kernel.
inline constexpr double kMergeStepCost8 = 0.55;
inline constexpr double kMergeStepCost4 = 0.58;
inline constexpr double kMergeStepCost2 = 0.85;
inline constexpr double kMergePairCost = 0.12;
inline constexpr double kMergeCost = 5.0;
inline constexpr double kKernelCost = 8.0;

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How often the device is filled by blocks that take equally long, or else share out well.
inline double rounds(const Work& work, int64_t blocks) {
  if (blocks <= work.multiprocessors) return 1.0;
  if (work.even) return static_cast<double>(ceil_divide(blocks, work.multiprocessors));
  return static_cast<double>(blocks) / static_cast<double>(work.multiprocessors);
}

inline double merge_step_cost(int64_t pairs) {
  switch (merge_cluster(pairs)) {
    case 8:
      return kMergeStepCost8;
    case 4:
      return kMergeStepCost4;
    default:
      return std::max(kMergeStepCost2, static_cast<double>(pairs) * kMergePairCost);
  }
}
inline double merge_cost(const Work& work, int64_t segments) {
  if (segments <= 2) return 0.0;
  return kMergeCost + merge_step_cost(work.pairs) * static_cast<double>(segments - 2);
}

// Of the recurrence with output, to the device.
inline double bytes_cost(const Work& work) {
  return static_cast<double>(work.pairs * work.chunks) * kChunkBytesCost;
}

// Preparation on its own.
inline double prepare_cost(const Work& work) {
  return kKernelCost + static_cast<double>(work.chunks * work.pairs) * kPrepareChunkCost;
}

// A whole sequence, by blocks of one warpgroup; the multiprocessors that they leave prepare.
inline bool fits_beside(const Work& work) {
  return 2 * work.pairs + kLeastPreparing <= work.multiprocessors;
}
inline Division divide_beside(const Work& work) {
  Division division;
  division.segment_chunks = kWhole;
  division.preparing = work.multiprocessors - 2 * work.pairs;
  const auto chunks = static_cast<double>(work.chunks);
  const double prepare = chunks * static_cast<double>(work.pairs) * kBesidePrepareCost /
                         static_cast<double>(division.preparing);
  division.microseconds = kBesideCost + std::max(chunks * kBesideChunkCost, prepare);
  return division;
}

// Every sequence in `segments` segments of so many chunks, the last one shorter; 1: whole.
inline Division divide(const Work& work, int64_t segments, int64_t segment_chunks, int groups) {
  Division division;
  division.segment_chunks = segments == 1 ? kWhole : segment_chunks;
  division.groups = groups;
  const auto chunks = static_cast<double>(segment_chunks);
  const double chain =
      rounds(work, work.pairs * segments * (3 - groups)) * chunks * kChunkCost[groups];
  division.microseconds = prepare_cost(work) + kKernelCost + std::max(bytes_cost(work), chain);
  if (segments > 1) {
    const double maps = rounds(work, work.pairs * (2 * segments - 3)) * chunks * kMapChunkCost;
    division.microseconds += kKernelCost + maps;
    division.microseconds += merge_cost(work, segments);
  }
  return division;
}

// What so many segments or more, at least three, cost in any case: maps that share out well.
inline double least_cost(const Work& work, int64_t segments) {
  const double map_chunks = static_cast<double>(work.pairs * work.chunks) /
                            static_cast<double>(work.multiprocessors) *
                            (2.0 - 3.0 / static_cast<double>(segments));
  return prepare_cost(work) + 2 * kKernelCost + bytes_cost(work) + map_chunks * kMapChunkCost +
         merge_cost(work, segments);
}

inline Division choose_division(const Work& work) {
  const int64_t heads = std::max<int64_t>(work.heads, 1);
  const int64_t sequences = work.pairs / heads;
  const int64_t chunks = std::max<int64_t>(work.chunks, 1);  // an average below 1 is 0
  // Maps are numbered with gaps (segment.cuh): one for each sequence, one for each segment_chunks
  // of all chunks, of which there may be a few more than the average tells.
  const int64_t most_chunks = (chunks + 1) * sequences - 1;
  const int64_t most_cuts = std::min(work.most_maps / heads - sequences, most_chunks);
  // More segments than fill the device once with maps are of no use.
  const int64_t most = std::min({chunks / kLeastSegment, work.most_maps / heads - 2 * sequences,
                                 work.multiprocessors / std::max<int64_t>(work.pairs, 1) + 1});
  Division best = divide(work, 1, chunks, 1);
  for (int64_t segments = 1; segments <= std::max<int64_t>(most, 1); ++segments) {
    if (segments > 2 && least_cost(work, segments) > best.microseconds) break;
    const int64_t segment_chunks = ceil_divide(chunks, segments);
    if ((segments - 1) * segment_chunks >= chunks) continue;  // it comes out as fewer
    if (segments > 1 && (most_cuts + 1) * segment_chunks <= most_chunks) continue;
    for (int groups : {1, 2}) {
      const Division division = divide(work, segments, segment_chunks, groups);
      if (division.microseconds < best.microseconds) best = division;
      if (2 * work.pairs * segments <= work.multiprocessors) break;  // two save no round
    }
  }
  // One sequence: of several, a window may hold parts that its pieces do not begin with.
  if (sequences == 1 && fits_beside(work)) {
    const Division division = divide_beside(work);
    if (division.microseconds < best.microseconds) best = division;
  }
  return best;
}

// All of a call, for comparison with other implementations.
inline double total_microseconds(const Work& work) { return choose_division(work).microseconds; }

}  // namespace flash_kda::cuda::sm90_split
