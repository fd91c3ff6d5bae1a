// The record: what the recurrence needs of one chunk of one head, in global memory and, copied as
// it is, in shared memory. With G the inclusive sum of the log2 decays inside the chunk:
//
//   kd = -k^ 2^G        qd = q^ 2^G        kr = k^ 2^(G_last - G)        [32 tokens, 128 channels]
//   T = (I + L)^-1 diag(beta)              M = q^ k^T 2^(G_i - G_j)      [32, 32] lower triangles
//   d = 2^G_last                                                         [128]
//
// Everything but d (fp32) is fp16 and at most 2 in magnitude; M and qd come without the caller's
// scale. T is stored divided by the chunk's tilt, a number from [1, 2), and M and kr times it,
// which cancels: where keys and values repeat with the chunks, their roundings would repeat too and
// add up over the sequence in directions that no later update corrects. Matrices lie in the order
// in which a warp's matrix instructions take them as operand B (mma.cuh), 16x16 elements to a tile,
// 16 bytes a lane: each access is one conflict-free vector and nothing is transposed on the way.
//
//   bytes          what
//   0     ..  8191 kd, tile (block b, slice s) at (8 b + s) * 512: tokens 16 b + 8 r + g, channels
//                  16 s + 8 h + 2c, + 1 in word 2 r + h of lane (g, c)
//   8192  .. 16383 qd, likewise
//   16384 .. 24575 kr, tile (b, s): tokens 16 b + 8 r + 2c, + 1, channel 16 s + 8 h + g in word
//                  2 h + r
//   24576 .. 25855 T, LowerTriangle
//   25856 .. 27135 M, LowerTriangle
//   27136 .. 27647 d, for slice s and c: channels 16 s + 2c, + 1, 16 s + 8 + 2c, + 1
#pragma once

#include <cstdint>

#include "cuda/portable/forward/config.h"
#include "cuda/portable/forward/sizes.h"

namespace flash_kda::cuda::portable {

// Offset of lane's 16 bytes of a tile of kd, qd or kr.
__device__ __forceinline__ constexpr int tile_offset(int block, int slice, int lane) {
  return (block * kSlices + slice) * kTileBytes + lane * 16;
}

// Offset of the 16 bytes of d for slice s and c = lane % 4.
__device__ __forceinline__ constexpr int decay_offset(int slice, int c) {
  return slice * 64 + c * 16;
}

// A lane's share of T or M: rows 16 b + 8 r + g, columns 16 b' + 8 h + 2c, + 1.
struct LowerTriangle {
  uint32_t diagonal[kBlocks][3];  // of block (b, b): (r, h) = (0, 0), (1, 0), (1, 1)
  uint32_t corner[4];             // of block (1, 0): word 2 r + h
};

// Where a lane's words lie: the first four of the diagonal, the corner, the last two.
inline constexpr int kTriangleQuad = 0;
inline constexpr int kTriangleCorner = 512;
inline constexpr int kTrianglePair = 1024;

}  // namespace flash_kda::cuda::portable
