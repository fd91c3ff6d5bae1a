// The tile plan: where the chunks of all sequences are. Chunks are numbered through in slots,
// sequence after sequence; an empty sequence has one slot, so that every sequence has some.
//
// With cu_seqlens the plan is made on the device. Offsets are clamped to [0, T] and never fall, so
// that no contents of cu_seqlens lead outside the tensors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/portable/forward/config.h"

namespace flash_kda::cuda::portable {

// Consecutive slots whose records are in the workspace at the same time.
struct Window {
  int32_t begin = 0;
  int32_t slots = 0;
};

struct SequenceSlots {
  int64_t batch = 0;  // axis 0 of the tensors
  int64_t begin = 0;  // first token, on axis 1
  int64_t length = 0;
  int32_t first_slot = 0;
  int32_t slots = 0;
};

struct TilePlan {
  int32_t sequences = 0;
  // Fixed length: sequence n is batch entry n.
  int64_t tokens = 0;
  int32_t slots_per_sequence = 0;
  // cu_seqlens: the clamped offsets [N + 1], the first slots [N + 1], the sequences of the slots.
  // Null for fixed length.
  int64_t* bounds = nullptr;
  int32_t* first_slots = nullptr;
  int32_t* slot_sequences = nullptr;
  // The sequences, longest first [N]; null where one window does not hold them all, for fixed
  // length and for more than kMostSorted.
  int32_t* order = nullptr;

  __device__ __forceinline__ int32_t total_slots() const {
    return bounds == nullptr ? sequences * slots_per_sequence : first_slots[sequences];
  }

  __device__ __forceinline__ int32_t sequence_of(int32_t slot) const {
    return bounds == nullptr ? slot / slots_per_sequence : slot_sequences[slot];
  }

  // The n-th sequence of a window that begins with this slot, in the order to work on them;
  // `sequences` or more where there is none.
  __device__ __forceinline__ int32_t nth_sequence(int32_t window_begin, int32_t n) const {
    if (order != nullptr) return n < sequences ? order[n] : sequences;
    return sequence_of(window_begin) + n;
  }

  __device__ __forceinline__ SequenceSlots span(int32_t sequence) const {
    if (bounds == nullptr) {
      return {sequence, 0, tokens, sequence * slots_per_sequence, slots_per_sequence};
    }
    const int64_t begin = bounds[sequence];
    const int32_t first = first_slots[sequence];
    return {0, begin, bounds[sequence + 1] - begin, first, first_slots[sequence + 1] - first};
  }
};

// Slots of a sequence of this many tokens.
__host__ __device__ constexpr int64_t slots_of(int64_t tokens) {
  return tokens <= kChunk ? 1 : (tokens + kChunk - 1) / kChunk;
}

}  // namespace flash_kda::cuda::portable
