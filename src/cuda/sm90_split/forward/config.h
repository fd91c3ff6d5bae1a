// The constants of the Hopper forward for few sequences and heads: the record, the shared-memory
// maps, the ring of stages.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/config.h"

namespace flash_kda::cuda::sm90_split {

using portable::kBlocks;
using portable::kChunk;
using portable::kWarp;

// Rows of 128 bytes whose 16-byte pieces lie at piece ^ (row % 8): the 128-byte swizzle.
inline constexpr int kRowBytes = 128;
inline constexpr int kHalves = 2;                         // of the channels of a row
inline constexpr int kPanelBytes = kChunk * kRowBytes;    // 32 tokens of 64 channels, fp16
inline constexpr int kTileBytes = kHalves * kPanelBytes;  // of all channels

// A record: what the recurrence needs of one chunk of one head, as portable's record.cuh defines
// it, in the layout in which the tensor cores read it from shared memory. -kd and qd of a half of
// the channels lie together: 64 rows, one operand.
inline constexpr int kRecordKd = 0;  // [2 halves][-kd, qd][32 tokens][64]
inline constexpr int kRecordQd = kRecordKd + kPanelBytes;
inline constexpr int kHalfBytes = 2 * kPanelBytes;            // to the other half of kd and qd
inline constexpr int kRecordKr = kHalves * kHalfBytes;        // kr [2 halves][32 tokens][64]
inline constexpr int kRecordTM = kRecordKr + kTileBytes;      // [32 i][T: 32 j | M: 32 j]
inline constexpr int kRecordDecay = kRecordTM + kPanelBytes;  // d [128] fp32
inline constexpr int kRecordBytes = kRecordDecay + kHeadDim * 4;
static_assert(kRecordBytes % 128 == 0);

// The recurrence: a warpgroup has 64 rows, V rows of the state or rows of a segment's map.
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kGroupWarps = kWarpgroup / kWarp;
inline constexpr int kGroupRows = 64;
inline constexpr int kStages = 5;
inline constexpr int kStageBytes = (kRecordBytes + 1023) / 1024 * 1024;
inline constexpr int kValueStages = 4;                   // tiles of v per warp, under way at once
inline constexpr int kValueTileBytes = kChunk * 16 * 2;  // [32 tokens][16 V rows] bf16

// Prepared chunks are kept for a window of the chunks at a time; this bounds their bytes, unless
// one chunk of all heads takes more.
inline constexpr int64_t kRecordBudget = int64_t{1} << 30;

// Maps of segments (S -> S Phi + S0) that the workspace holds: two matrices each.
inline constexpr int64_t kMostMaps = 160;
inline constexpr int kMatrixElements = kHeadDim * kHeadDim;

// Blocks that share 16 V rows in the merge, for so many sequences times heads: the more, the
// shorter a step, and the less do all steps together fit on the device.
constexpr int merge_cluster(int64_t pairs) { return pairs == 1 ? 8 : pairs <= 3 ? 4 : 2; }

// A segment is at least this long, in chunks.
inline constexpr int64_t kLeastSegment = 8;

}  // namespace flash_kda::cuda::sm90_split
