// The constants of the Hopper forward kernel: tile shapes, the shared-memory map, warp roles and
// registers. docs/hopper.md says why they are what they are.
#pragma once

#include <cstdint>

#include "ops/forward/spec.h"

namespace flash_kda::cuda::sm90 {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr int kChunk = 32;           // tokens that are treated at a time
inline constexpr int kHalf = kHeadDim / 2;  // V rows of a chain warpgroup; channels of a row
inline constexpr int kHalves = 2;           // of 128 bytes
static_assert(kChunk == 2 * kBlock, "preparation joins two blocks to a chunk");

// Warps. One CTA per SM: the warpgroups of a CTA share 65,536 registers.
inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kPairs = 2;        // pairs of preparation warps, each with a finishing warp
inline constexpr int kPrepareThreads = 64 * kPairs;
inline constexpr int kChainThreads = kHalves * kWarpgroup;
inline constexpr int kServiceThreads = kWarpgroup;
inline constexpr int kThreads = kChainThreads + kPrepareThreads + kServiceThreads;
inline constexpr int kChainRegisters = 152;
inline constexpr int kPrepareRegisters = 160;
inline constexpr int kServiceRegisters = 48;
static_assert(kChainThreads * kChainRegisters + kPrepareThreads * kPrepareRegisters +
                      kServiceThreads * kServiceRegisters <=
                  65536,
              "the register file");

// A tile of one tensor and chunk: [2 channel halves][32 tokens][64 channels] bf16. Rows of 128
// bytes, whose 16-byte pieces lie at piece ^ (row % 8) (the 128-byte swizzle).
inline constexpr int kRowBytes = 128;
inline constexpr int kHalfTileBytes = kChunk * kRowBytes;
inline constexpr int kTileBytes = kHalves * kHalfTileBytes;

// A stage: the raw tiles of a chunk, which preparation overwrites with the chain's operands. k and
// q of a channel half lie together: 64 rows, one operand.
inline constexpr int kStageK = 0;                              // k, then kd
inline constexpr int kStageQ = kStageK + kHalfTileBytes;       // q, then qd
inline constexpr int kStageHalf = 2 * kHalfTileBytes;          // to the other channel half of k, q
inline constexpr int kStageG = kStageHalf * kHalves;           // g, then kr, a tile
inline constexpr int kStageTM = kStageG + kTileBytes;          // [32 i][T: 32 j | M: 32 j] fp16
inline constexpr int kStageDecay = kStageTM + kHalfTileBytes;  // d [128] fp32
inline constexpr int kStageNorms = kStageDecay + 512;          // -1/|k|, 1/|q|: [8 g][4] fp32
inline constexpr int kStageBias = kStageNorms + 256;           // see below
inline constexpr int kStageBytes = kStageDecay + 1024;         // keeps stages aligned to 1024
inline constexpr int kRawBytes = 3 * kTileBytes;

inline constexpr int kStages = 6;
inline constexpr int kValueTiles = 2;   // v, both halves
inline constexpr int kOutputTiles = 2;  // out, both halves

// Scratch of a pair of preparation warps and its finishing warp: two parts each of L and M, of
// which the second warp's L lies in the stage, where T and M will be. A part is three blocks of 1
// KB; 64 bytes keep the diagonal ones in different banks.
inline constexpr int kBlockStride = 1024 + 64;
inline constexpr int kPartialBytes = 3 * 1024 + 64;
inline constexpr int kScratchL = 0;                          // warp 0's L; then the blocks of T
inline constexpr int kScratchM = kScratchL + kPartialBytes;  // M of both warps
inline constexpr int kScratchBytes = kScratchM + 2 * kPartialBytes;
static_assert(kPartialBytes <= kHalfTileBytes);

// What is left of stage i holds the scaled dt_bias of the channels of preparation warp i, for as
// long as that is at a head.
static_assert(kPrepareThreads / 32 <= kStages && kStageBias + 4 * kHalf <= kStageBytes);

// The sequences in order of falling length, where a CTA works on several.
inline constexpr int kMaxSorted = 1024;

inline constexpr int kSharedStages = 0;
inline constexpr int kSharedValues = kSharedStages + kStages * kStageBytes;
inline constexpr int kSharedOutputs = kSharedValues + kValueTiles * kTileBytes;
inline constexpr int kSharedScratch = kSharedOutputs + kOutputTiles * kTileBytes;
inline constexpr int kSharedZeros = kSharedScratch + kPairs * kScratchBytes;  // 16 bytes of zero
inline constexpr int kSharedOrder = kSharedZeros + 16;                        // uint16 [kMaxSorted]
inline constexpr int kSharedBarriers = kSharedOrder + 2 * kMaxSorted;
inline constexpr int kSharedBytes = kSharedBarriers + 512;
static_assert(kSharedBytes <= 232448, "shared memory of a CTA");

}  // namespace flash_kda::cuda::sm90
