// The order in which preparation makes the records of a window: items (params.h), numbered through
// all heads of a slot, the slots of all pieces in turn.
#pragma once

#include <cstdint>

#include "cuda/common/tilt.cuh"
#include "cuda/portable/forward/prepare_steps.cuh"
#include "cuda/sm90_split/forward/params.h"

namespace flash_kda::cuda::sm90_split {

// A chunk to prepare.
struct Work {
  portable::Chunk chunk;
  uint32_t item = 0;    // in the order of preparation
  int32_t record = -1;  // in the order of the window; -1: nothing is left
};

// How many items there are, some of them past the window's end.
__device__ __forceinline__ uint32_t items_of(const RecordParams& p) {
  return static_cast<uint32_t>(p.pieces) * p.piece * p.prepare.heads;
}

// What an item is: a head of a slot of the window, which may be past its end.
struct Item {
  uint32_t place, head;
};
__device__ __forceinline__ Item item_of(const RecordParams& p, uint32_t item) {
  const uint32_t turn = p.by_heads.quotient(item);
  const uint32_t round = p.by_pieces.quotient(turn);
  const uint32_t inside = p.ready == nullptr ? p.piece - 1 - round : round;
  return {(turn - round * p.pieces) * p.piece + inside, item - turn * p.prepare.heads};
}

// From `item` on, every step-th.
__device__ __forceinline__ Work find_work(const RecordParams& params, uint32_t item,
                                          uint32_t step) {
  const portable::PrepareParams& p = params.prepare;
  const int32_t slots = min(p.window.slots, p.plan.total_slots() - p.window.begin);
  Work work;
  for (; item < items_of(params); item += step) {
    const Item it = item_of(params, item);
    if (static_cast<int32_t>(it.place) >= slots) continue;
    const int32_t slot = p.window.begin + static_cast<int32_t>(it.place);
    const int32_t sequence = p.plan.bounds == nullptr
                                 ? static_cast<int32_t>(params.by_sequence_slots.quotient(slot))
                                 : p.plan.sequence_of(slot);
    const portable::SequenceSlots span = p.plan.span(sequence);
    const int64_t first = static_cast<int64_t>(slot - span.first_slot) * kChunk;
    if (first >= span.length) continue;  // an empty sequence
    work.chunk.batch = span.batch;
    work.chunk.token = span.begin + first;
    work.chunk.head = static_cast<int>(it.head);
    work.chunk.tilt = chunk_tilt(static_cast<uint32_t>(slot - span.first_slot));
    work.chunk.rows = static_cast<int>(min(span.length - first, static_cast<int64_t>(kChunk)));
    work.record = static_cast<int32_t>(it.place * p.heads + it.head);
    break;
  }
  work.item = item;
  return work;
}

}  // namespace flash_kda::cuda::sm90_split
