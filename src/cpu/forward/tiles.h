// The memory that the steps hand to each other: plain floats, laid out the same for every
// instruction set. All of it is sized by the chunk, none by the number of tokens.
#pragma once

#include "cpu/forward/config.h"

namespace flash_kda::cpu {

// From the preparation to the recurrence: one chunk of one head. prepare.h has the equations.
struct alignas(64) ChunkTiles {
  // kd and qd by blocks of 16 tokens: kd of block 0, qd of block 0, kd of block 1, ...
  float rows[2 * kChunk][kHeadDim];
  double kr[kChunk][kHeadDim];
  float T[kChunk][kChunk];
  float M[kChunk][kChunk];
  double d[kHeadDim];
};

// Where token i of the chunk stands in ChunkTiles::rows.
constexpr int kd_row(int i) { return 2 * kBlock * (i / kBlock) + i % kBlock; }
constexpr int qd_row(int i) { return kd_row(i) + kBlock; }

// From the gates to the preparation: one block of tokens. c_i is the sum of the tokens' log2 decays
// from the block's first through token i.
struct alignas(64) BlockDecay {
  float log2[kBlock][kHeadDim];     // c_i
  float decay[kBlock][kHeadDim];    // 2^c_i; the last is the decay over the whole block
  float inverse[kBlock][kHeadDim];  // 2^-c_i
};

struct alignas(64) PrepareScratch {
  BlockDecay blocks[kBlocks];
  float k_hat[kChunk][kHeadDim];
  float columns[kChunk][kHeadDim];  // k^ decayed to the end of its block, later of its half
  // Of the block at hand, anchored at its middle: rows of k^ then q^, and columns.
  float middle_rows[2 * kBlock][kHeadDim];
  float middle_columns[kBlock][kHeadDim];
  float L[kChunk][kChunk];
  float beta[kChunk];
};

// V columns slice * kSlice ... of the transposed state, [K, V]. In double: a token's update is a
// difference of much larger terms when keys repeat, and what a sum in float loses there adds up
// over all the chunks for as long as the decay is slow.
using StateSlice = double[kHeadDim][kSlice];

struct alignas(64) State {
  StateSlice slices[kSlices];
};

struct alignas(64) RecurScratch {
  float S[kHeadDim][kSlice];  // the state rounded to float
  float P[2 * kChunk][kSlice];
  float X[kChunk][kSlice];
  float R[kChunk][kSlice];
  double R_wide[kChunk][kSlice];
};

}  // namespace flash_kda::cpu
