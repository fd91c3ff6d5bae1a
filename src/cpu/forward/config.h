// The sizes of the CPU implementation, each once.
#pragma once

#include "ops/forward/spec.h"

namespace flash_kda::cpu {

inline constexpr int kChunk = 64;  // tokens per chunk
inline constexpr int kBlocks = kChunk / kBlock;

// V columns of the state that one recurrence step works on: rounded to float for the products,
// 128 x 64 of them fit a 48 KiB L1 cache.
// The width never depends on the number of threads, so results don't either.
inline constexpr int kSlice = 64;
inline constexpr int kSlices = kHeadDim / kSlice;

// Sequences of at most this many tokens go token by token: cheaper than one padded chunk.
inline constexpr int kDirectTokens = 32;

// With fewer heads than threads, chunks of a head that are prepared ahead of its recurrence: enough
// that waiting for each other once per that many chunks does not count, at 160 KB each.
inline constexpr int kAhead = 8;

// Problems of at most this many tokens x heads run on the calling thread alone: starting a team
// costs about as much as they do.
inline constexpr int64_t kSerialTokens = 32;

}  // namespace flash_kda::cpu
