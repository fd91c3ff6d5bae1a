// What the kernels of the split forward take, by value.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/params.h"
#include "cuda/sm90_split/forward/config.h"
#include "cuda/sm90_split/forward/divisor.h"

namespace flash_kda::cuda::sm90_split {

using portable::TilePlan;
using portable::Window;

// The part of a sequence that lies in a window is cut into segments of this many chunks, the last
// of them shorter. Segments have numbers (segment.cuh) below `most`.
struct Segmentation {
  int32_t chunks = 0;
  int32_t most = 0;
};

// A Phi lies in tiles of 16 rows and 8 columns, in the order in which a warp of the merge takes
// them: lane (g, c) has column g of rows 2c, 2c + 8, 2c + 1, 2c + 9, from this index on.
__host__ __device__ constexpr int phi_index(int row_tile, int column_tile, int lane) {
  return ((column_tile * (kHeadDim / 16) + row_tile) * kWarp + lane) * 4;
}

// Preparation makes the records in an order in which all chains can go on at once: the slots of a
// window count as pieces of `piece` slots, from which it takes one slot each, then the next. Beside
// the chains that is from the first on; before them from the last, so that what they read first is
// still in the L2 cache.
struct RecordParams {
  portable::PrepareParams prepare;
  uint32_t* ready = nullptr;  // as in SplitParams
  int32_t piece = 1;
  int32_t pieces = 1;
  Divisor by_heads, by_pieces, by_sequence_slots;  // the last for fixed length
};

struct SplitParams : portable::ChainParams {
  Segmentation segments;
  const unsigned char* records = nullptr;  // [window.slots, heads] of kRecordBytes
  // [window.slots, heads]: not 0 once a record is there. Null: all are, once the kernels before
  // have ended.
  const uint32_t* ready = nullptr;
  // [segments.most, heads, 2] matrices, row-major. With S the state before a segment, the state
  // after it is S Phi + S0: first S0, which the merge replaces by the state after the segment, then
  // Phi, in tiles (phi_index). Of a first segment: the state after it, the state before it. Not
  // there for the last segment of a sequence's part.
  float* maps = nullptr;
  // State of the sequence that the end of a window cuts, [H, V, K]; not the same memory.
  const float* carry_in = nullptr;
  float* carry_out = nullptr;
};

}  // namespace flash_kda::cuda::sm90_split
