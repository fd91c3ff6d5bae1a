// The memory that the steps hand to each other: plain floats, laid out the same for every
// instruction set. All of it is sized by the chunk, none by the number of tokens.
#pragma once

#include "cpu/forward/config.h"

namespace flash_kda::cpu {

// From the preparation to the recurrence: one chunk of one head. prepare.h has the equations.
struct alignas(64) ChunkTiles {
  // kd and qd by blocks of 16 tokens: kd of block 0, qd of block 0, kd of block 1, ...
  float rows[2 * kChunk][kHeadDim];
  float kr[kChunk][kHeadDim];
  float T[kChunk][kChunk];
  float M[kChunk][kChunk];
  float d[kHeadDim];
};

// Where token i of the chunk stands in ChunkTiles::rows.
constexpr int kd_row(int i) { return 2 * kBlock * (i / kBlock) + i % kBlock; }
constexpr int qd_row(int i) { return kd_row(i) + kBlock; }

// From the gates to the preparation: one block of tokens. c_i is the sum of the tokens' log2 decays
// from the block's first through token i.
struct alignas(64) BlockDecay {
  float decay[kBlock][kHeadDim];    // 2^c_i; the last is the decay over the whole block
  float inverse[kBlock][kHeadDim];  // 2^-c_i
  float log2_total[kHeadDim];       // c of the last token
};

struct alignas(64) PrepareScratch {
  BlockDecay blocks[kBlocks];
  // Of the block at hand, anchored at its middle: rows of k^ then q^, and columns.
  float middle_rows[2 * kBlock][kHeadDim];
  float middle_columns[kBlock][kHeadDim];
  float L[kChunk][kChunk];
  float beta[kChunk];
};

// V columns slice * kSlice ... of the transposed state, [K, V].
using StateSlice = float[kHeadDim][kSlice];

struct alignas(64) State {
  StateSlice slices[kSlices];
};

struct alignas(64) RecurScratch {
  float P[2 * kChunk][kSlice];
  float X[kChunk][kSlice];
  float R[kChunk][kSlice];
};

}  // namespace flash_kda::cpu
