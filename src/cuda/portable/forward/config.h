// The constants of the portable kernels, each once.
#pragma once

#include <cstdint>

#include "flash_kda/forward.h"

namespace flash_kda::cuda::portable {

inline constexpr int kWarp = 32;

// Tokens of a chunk: two blocks of 16, over which a decay may be inverted.
inline constexpr int kChunk = 32;
inline constexpr int kBlocks = 2;

// Key channels are worked through in slices of 16, the depth of one matrix instruction.
inline constexpr int kSlices = kHeadDim / 16;

// Two warps prepare a chunk, each of them 64 channels.
inline constexpr int kPrepareWarps = 2;
inline constexpr int kSlicesPerWarp = kSlices / kPrepareWarps;

// The recurrence works on tiles of 16 V rows of the state.
inline constexpr int kTileRows = 16;
inline constexpr int kRowTiles = kHeadDim / kTileRows;

// Chunks of the recurrence under way at once in a block: two cost latency that a third hides, and
// with three two blocks fit a multiprocessor.
inline constexpr int kStages = 3;
inline constexpr int kBlocksPerMultiprocessor = 2;

// Sequences that the plan sorts: by counting the longer ones, which more would make slow.
inline constexpr int kMostSorted = 1024;

// Prepared chunks are kept for a window of the chunks at a time; this bounds their bytes, unless
// one chunk of all heads takes more.
inline constexpr int64_t kRecordBudget = int64_t{1} << 30;

}  // namespace flash_kda::cuda::portable
