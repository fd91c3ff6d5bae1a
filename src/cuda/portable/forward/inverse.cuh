// Step "inverse": T = (I + L)^-1 diag(beta) of a chunk, by one warp.
//
// The two diagonal blocks are inverted by forward substitution in fp32, a half-warp to a block and
// a lane to a column; then T10 = -X1 L10 X0. A series in half precision would be wrong by orders
// of magnitude for nearly collinear keys, and so would a rounded L10 or X: these products split
// their operands into two tf32 parts.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/products.cuh"
#include "cuda/portable/forward/record.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/ptx/shared.cuh"

namespace flash_kda::cuda::portable {

// Two 16x16 fp32 blocks in shared memory, 16 banks apart so that both half-warps read at once.
inline constexpr int kInverseBlockBytes = 1024 + 64;
inline constexpr int kInverseBytes = 2 * kInverseBlockBytes;

// Byte offset of an element; the swizzle frees reads of a column pair per lane from conflicts.
__device__ __forceinline__ constexpr int element_offset(int row, int column) {
  return (row * 16 + (column ^ (((row >> 1) & 1) << 3))) * 4;
}

// beta of the rows 8 r + g of block b, at [b][r].
using RowBeta = float[kBlocks][2];
// From lanes that have that of a token each.
__device__ __forceinline__ void spread_beta(float beta, int g, RowBeta& rows) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows[b][r] = __shfl_sync(0xffffffffU, beta, 16 * b + 8 * r + g);
    }
  }
}

__device__ __forceinline__ void scale_rows(BlockProduct& product, const float (&beta)[2]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) product[t][i] *= beta[i >> 1];
  }
}

__device__ __forceinline__ void store_block_transposed(uint32_t to, const BlockProduct& product,
                                                       int g, int c) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::store_shared(to + element_offset(8 * t + 2 * c + (i & 1), g + 8 * (i >> 1)),
                        product[t][i]);
    }
  }
}

// From L_bb^T (above its diagonal; the rest is not read) to (I + L_bb)^-1, in place, both blocks.
__device__ __forceinline__ void invert_blocks(uint32_t blocks, int lane) {
  const uint32_t block = blocks + (lane >> 4) * kInverseBlockBytes;
  const int column = lane & 15;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
  for (int k = 0; k < 15; ++k) {
    float l[16];  // column k of L
#pragma unroll
    for (int quad = (k + 1) / 4; quad < 4; ++quad) {
      const float4 part = ptx::load_shared4(block + element_offset(k, 4 * quad));
      l[4 * quad] = part.x;
      l[4 * quad + 1] = part.y;
      l[4 * quad + 2] = part.z;
      l[4 * quad + 3] = part.w;
    }
#pragma unroll
    for (int i = k + 1; i < 16; ++i) x[i] = fmaf(-l[i], x[k], x[i]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) ptx::store_shared(block + element_offset(i, column), x[i]);
  __syncwarp();
}

// X^T as a D fragment from X in shared memory.
__device__ __forceinline__ void load_block_transposed(uint32_t from, BlockProduct& product, int g,
                                                      int c) {
#pragma unroll
  for (int t = 0; t < 2; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      product[t][i] =
          ptx::load_shared(from + element_offset(8 * t + 2 * c + (i & 1), g + 8 * (i >> 1)));
    }
  }
}

__device__ __forceinline__ float tf32_part(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffe000U);
}

// d += a b to about fp32: each operand as the sum of two tf32 numbers.
__device__ __forceinline__ void mma_split(float (&d)[4], const float (&a)[4], float b0, float b1) {
  float high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = tf32_part(a[i]);
    low[i] = a[i] - high[i];
  }
  const float high0 = tf32_part(b0);
  const float high1 = tf32_part(b1);
  ptx::mma_tf32(d, low, high0, high1);
  ptx::mma_tf32(d, high, b0 - high0, b1 - high1);
  ptx::mma_tf32(d, high, high0, high1);
}

// Word 2 r + h of a 16x16 tile from its transpose as a D fragment, columns times beta.
__device__ __forceinline__ uint32_t transposed_word(const BlockProduct& transpose, int r, int h,
                                                    float beta) {
  return ptx::transpose_matrix(
      ptx::pack_f16(transpose[r][2 * h] * beta, transpose[r][2 * h + 1] * beta));
}

// T times `factor` from L without beta (of its diagonal blocks what is below the diagonal).
// `scratch`: kInverseBytes.
__device__ __forceinline__ void invert(PairProducts& l, const RowBeta& beta, float factor,
                                       uint32_t scratch, int lane, LowerTriangle& triangle) {
  const int g = lane >> 2;
  const int c = lane & 3;
  scale_rows(l.block[kBlock00], beta[0]);
  scale_rows(l.block[kBlock10], beta[1]);
  scale_rows(l.block[kBlock11], beta[1]);
  const uint32_t block0 = scratch;
  const uint32_t block1 = scratch + kInverseBlockBytes;
  store_block_transposed(block0, l.block[kBlock00], g, c);
  store_block_transposed(block1, l.block[kBlock11], g, c);
  __syncwarp();
  invert_blocks(scratch, lane);

  BlockProduct x0, x1;  // X0^T, X1^T
  load_block_transposed(block0, x0, g, c);
  load_block_transposed(block1, x1, g, c);
  BlockProduct y = {};  // X0^T L10^T
  BlockProduct z = {};  // T10^T before beta: -(X0^T L10^T) X1^T
#pragma unroll
  for (int u = 0; u < 2; ++u) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      mma_split(y[u], x0[t], l.block[kBlock10][t][2 * u], l.block[kBlock10][t][2 * u + 1]);
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float2 right = ptx::load_shared2(block1 + element_offset(8 * u + g, 8 * t + 2 * c));
      mma_split(z[u], y[t], -right.x, -right.y);
    }
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      triangle.corner[2 * r + h] = transposed_word(z, r, h, beta[0][h] * factor);
      if (h > r) continue;
      triangle.diagonal[0][r + h] = transposed_word(x0, r, h, beta[0][h] * factor);
      triangle.diagonal[1][r + h] = transposed_word(x1, r, h, beta[1][h] * factor);
    }
  }
}

}  // namespace flash_kda::cuda::portable
