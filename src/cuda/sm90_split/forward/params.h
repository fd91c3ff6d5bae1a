// What the kernels of the split forward take, by value. Prepare takes portable's parameters.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/params.h"
#include "cuda/sm90_split/forward/config.h"

namespace flash_kda::cuda::sm90_split {

using portable::PrepareParams;
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

struct SplitParams {
  Rows v, out;
  Dense initial_state, final_state;
  float scale = 0.0F;
  int32_t heads = 0;
  TilePlan plan;
  Window window;
  Segmentation segments;
  const unsigned char* records = nullptr;  // [window.slots, heads] of kRecordBytes
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
