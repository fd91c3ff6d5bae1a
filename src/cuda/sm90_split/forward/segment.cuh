// Which chunks a block works on. Segments are numbered through the sequences of a window with gaps:
// sequence n of the window (from 0), before which lie s slots of the window, has the numbers from
// n + s / chunks on. That leaves it enough of them, and needs no table.
#pragma once

#include <cstdint>

#include "cuda/sm90_split/forward/config.h"
#include "cuda/sm90_split/forward/params.h"

namespace flash_kda::cuda::sm90_split {

// A sequence's part in the window.
struct Part {
  portable::SequenceSlots span;
  int32_t sequence = 0;
  int32_t begin = 0, end = 0;  // chunks of the sequence
  int32_t first_number = 0;    // of its segments

  __device__ __forceinline__ int32_t segments(int32_t chunks) const {
    return (end - begin + chunks - 1) / chunks;
  }
};

struct Segment {
  Part part;
  int32_t number = 0;
  int32_t begin = 0, end = 0;  // chunks of the sequence; no chunks: no such segment

  __device__ __forceinline__ bool first() const { return number == part.first_number; }
  __device__ __forceinline__ bool last() const { return end == part.end; }
};

__device__ __forceinline__ int32_t first_number(const SplitParams& p, int32_t first_sequence,
                                                int32_t sequence, int32_t first_slot) {
  return sequence - first_sequence + max(first_slot - p.window.begin, 0) / p.segments.chunks;
}

// The part of a sequence that has slots in the window.
__device__ __forceinline__ Part part_of(const SplitParams& p, int32_t first_sequence,
                                        int32_t sequence) {
  Part part;
  part.sequence = sequence;
  part.span = p.plan.span(sequence);
  part.begin = max(p.window.begin - part.span.first_slot, 0);
  part.end = min(p.window.begin + p.window.slots - part.span.first_slot, part.span.slots);
  part.first_number = first_number(p, first_sequence, sequence, part.span.first_slot);
  return part;
}

// The last sequence of the window whose numbers begin at `number` or before; all lanes of a warp
// search together. At least one slot of the window must be in use.
__device__ __forceinline__ int32_t sequence_of_number(const SplitParams& p, int32_t first_sequence,
                                                      int32_t number) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int32_t low = first_sequence;
  int64_t count = p.plan.sequences - low;
  while (count > 1) {
    const int64_t step = (count + kWarp - 1) / kWarp;
    const int64_t sequence = low + lane * step;
    bool before = false;
    if (lane * step < count) {
      const int32_t first_slot = p.plan.span(static_cast<int32_t>(sequence)).first_slot;
      before =
          first_slot < p.window.begin + p.window.slots &&
          first_number(p, first_sequence, static_cast<int32_t>(sequence), first_slot) <= number;
    }
    // Lane 0 is always before: its sequence was found so, or is the window's first.
    const int last = 31 - __clz(static_cast<int>(__ballot_sync(0xffffffffU, before) | 1U));
    low += static_cast<int32_t>(last * step);
    count = min(step, count - last * step);
  }
  return low;
}

__device__ __forceinline__ Segment find_segment(const SplitParams& p, int32_t number) {
  Segment segment;
  segment.number = number;
  if (p.window.begin >= p.plan.total_slots()) return segment;
  const int32_t first_sequence = p.plan.sequence_of(p.window.begin);
  segment.part = part_of(p, first_sequence, sequence_of_number(p, first_sequence, number));
  const int64_t begin = segment.part.begin + static_cast<int64_t>(p.segments.chunks) *
                                                 (number - segment.part.first_number);
  if (begin >= segment.part.end) return segment;
  segment.begin = static_cast<int32_t>(begin);
  segment.end = min(segment.begin + p.segments.chunks, segment.part.end);
  return segment;
}

}  // namespace flash_kda::cuda::sm90_split
