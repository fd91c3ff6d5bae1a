// Sizes that host and device code share.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/config.h"

namespace flash_kda::cuda::portable {

// A 16x16 tile of fp16; the parts of a record (record.cuh), in bytes from its start.
inline constexpr int kTileBytes = 16 * 16 * 2;
inline constexpr int kTriangleBytes = 1280;
inline constexpr int kRecordKd = 0;
inline constexpr int kRecordQd = kRecordKd + kBlocks * kSlices * kTileBytes;
inline constexpr int kRecordKr = kRecordQd + kBlocks * kSlices * kTileBytes;
inline constexpr int kRecordT = kRecordKr + kBlocks * kSlices * kTileBytes;
inline constexpr int kRecordM = kRecordT + kTriangleBytes;
inline constexpr int kRecordDecay = kRecordM + kTriangleBytes;
inline constexpr int kRecordBytes = kRecordDecay + kHeadDim * 4;

// An upper bound of the slots (plan.cuh) of `sequences` sequences of `tokens` tokens in all,
// reached when all lengths but one leave a remainder of 1. Never falls when an argument grows.
constexpr int64_t most_slots(int64_t tokens, int64_t sequences) {
  return sequences + (tokens > sequences ? (tokens - sequences) / kChunk : 0);
}

// The most sequences that one window touches: each has a slot in it.
constexpr int64_t sequences_per_window(int64_t sequences, int64_t slots_per_window) {
  return sequences < slots_per_window ? sequences : slots_per_window;
}

}  // namespace flash_kda::cuda::portable
