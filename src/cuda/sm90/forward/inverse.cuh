// What follows the tiles of a chunk (prepare.cuh): the two warps of a pair add up their parts of L
// and M. One finishes M, the other T = (I + L)^-1 diag(beta); they take turns by chunk.
//
// With X_b the inverse of the diagonal block I + L_bb (forward substitution in fp32, a lane per
// column, half a warp per block), the block below is -X_1 L_10 X_0. Blocks are held transposed, as
// D fragments, which are the A operands of the next product.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/prepare.cuh"

namespace flash_kda::cuda::sm90 {

// Byte offset in a 16 x 16 fp32 block: pairs at (row, 2c) and whole rows without bank conflicts.
__device__ __forceinline__ uint32_t block_offset(int row, int column) {
  return 4 * (16 * row + (column ^ (((row >> 1) & 1) << 3)));
}
inline constexpr int kInverseStride = 1088;  // from the block of X_0 to that of X_1
static_assert(kInverseStride + 1024 <= kPartialBytes);

using BlockRow = float[2][4];  // 16 rows x 16 columns as two D fragments

// This warp's part of L or M for the partner, and the partner's added to it.
__device__ __forceinline__ void hand_over(uint32_t to, int lane, const float (&part)[3][2][4]) {
#pragma unroll
  for (int i = 0; i < 6; ++i) ptx::store_shared4(to + i * 512 + lane * 16, part[i >> 1][i & 1]);
}
__device__ __forceinline__ void add_partner(uint32_t from, int lane, float (&part)[3][2][4]) {
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const float4 other = ptx::load_shared4(from + i * 512 + lane * 16);
    float(&mine)[4] = part[i >> 1][i & 1];
    mine[0] += other.x;
    mine[1] += other.y;
    mine[2] += other.z;
    mine[3] += other.w;
  }
}

// The lane's address for storing block (i, j) of T (m = 0) or M (m = 1) as four matrices; row_half
// and column_half say which of the four is the lane's.
__device__ __forceinline__ uint32_t matrix_address(uint32_t stage, int lane, int i, int j, int m,
                                                   int row_half, int column_half) {
  const int row = (lane & 7) + 8 * row_half;
  return stage + kStageTM + (kBlock * i + row) * kRowBytes +
         (((4 * m + 2 * j + column_half) ^ (lane & 7)) << 4);
}

__device__ __forceinline__ void finish_m(Preparation& chunk) {
  const PrepareLane& self = chunk.self;
  add_partner(self.scratch + kScratchM, self.lane, chunk.sum.M);
  const uint32_t zero[4] = {0, 0, 0, 0};
  uint32_t block[3][4];
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float(&m)[4] = chunk.sum.M[b][n];
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] *= chunk.tilt;
      const int column = 8 * n + 2 * self.c;
      const bool whole = b == 1;
      block[b][2 * n] = ptx::pack_f16(whole || column <= self.g ? m[0] : 0.0F,
                                      whole || column + 1 <= self.g ? m[1] : 0.0F);
      block[b][2 * n + 1] = ptx::pack_f16(whole || column <= self.g + 8 ? m[2] : 0.0F,
                                          whole || column + 1 <= self.g + 8 ? m[3] : 0.0F);
    }
  }
  const int first = (self.lane >> 3) & 1, second = self.lane >> 4;
  auto at = [&](int i, int j) {
    return matrix_address(chunk.stage, self.lane, i, j, 1, first, second);
  };
  ptx::store_matrix4(at(0, 0), block[0]);
  ptx::store_matrix4(at(0, 1), zero);
  ptx::store_matrix4(at(1, 0), block[1]);
  ptx::store_matrix4(at(1, 1), block[2]);
}

// Both diagonal blocks, in place: L transposed before (what lies above its diagonal is not read),
// the inverse after.
__device__ __forceinline__ void invert_blocks(uint32_t blocks, int lane) {
  const int column = lane & 15;
  const uint32_t mine = blocks + (lane >> 4) * kInverseStride;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
  for (int k = 0; k < 15; ++k) {
    float l[16];
#pragma unroll
    for (int i = (k + 1) / 4; i < 4; ++i) {
      const float4 v = ptx::load_shared4(mine + block_offset(k, 4 * i));
      l[4 * i] = v.x;
      l[4 * i + 1] = v.y;
      l[4 * i + 2] = v.z;
      l[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int i = k + 1; i < 16; ++i) x[i] = fmaf(-l[i], x[k], x[i]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) ptx::store_shared(mine + block_offset(i, column), x[i]);
  __syncwarp();
}

// The transpose of a stored 16 x 16 block as D fragments, and the way back.
__device__ __forceinline__ void read_transposed(BlockRow& to, uint32_t block, int g, int c) {
  const uint32_t low = block + block_offset(2 * c, g), high = block + block_offset(2 * c, g + 8);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    to[n][0] = ptx::load_shared(low + n * 512);
    to[n][1] = ptx::load_shared(low + n * 512 + 64);
    to[n][2] = ptx::load_shared(high + n * 512);
    to[n][3] = ptx::load_shared(high + n * 512 + 64);
  }
}
__device__ __forceinline__ void write_transposed(const BlockRow& from, uint32_t block, int g,
                                                 int c) {
  const uint32_t low = block + block_offset(2 * c, g), high = block + block_offset(2 * c, g + 8);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    ptx::store_shared(low + n * 512, from[n][0]);
    ptx::store_shared(low + n * 512 + 64, from[n][1]);
    ptx::store_shared(high + n * 512, from[n][2]);
    ptx::store_shared(high + n * 512 + 64, from[n][3]);
  }
}

// below = -(X_0^T L_10^T) X_1^T, tf32.
__device__ __forceinline__ void merge_blocks(BlockRow& below, const BlockRow& X0,
                                             const BlockRow& L10, uint32_t block_X1, int g, int c) {
  BlockRow Y = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int k = 0; k < 2; ++k) ptx::mma_tf32(Y[n], X0[k], L10[k][2 * n], L10[k][2 * n + 1]);
  }
  const uint32_t row[2] = {block_X1 + block_offset(g, 2 * c),
                           block_X1 + block_offset(g, 8 + 2 * c)};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) below[n][i] = 0.0F;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float2 b = ptx::load_shared2(row[k] + n * 512);
      ptx::mma_tf32(below[n], Y[k], -b.x, -b.y);
    }
  }
}

// Columns of T are scaled by beta of their token; held transposed, those are the rows g, g + 8.
__device__ __forceinline__ void pack_scaled(uint32_t (&to)[4], const BlockRow& from,
                                            const float (&beta)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    to[2 * n] = ptx::pack_f16(from[n][0] * beta[0], from[n][1] * beta[0]);
    to[2 * n + 1] = ptx::pack_f16(from[n][2] * beta[1], from[n][3] * beta[1]);
  }
}

// beta of this lane's token (lane = token of the chunk).
__device__ __forceinline__ void finish_t(Preparation& chunk, float beta_of_lane) {
  const PrepareLane& self = chunk.self;
  const int g = self.g, c = self.c;
  float beta[2][2];  // of tokens 16 b + g + 8 r
#pragma unroll
  for (int i = 0; i < 4; ++i) beta[i >> 1][i & 1] = __shfl_sync(~0U, beta_of_lane, 8 * i + g);
  float(&L)[3][2][4] = chunk.sum.L;
  const uint32_t blocks = self.scratch + kScratchL;
  add_partner(blocks, self.lane, L);
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    const float(&scale)[2] = beta[b > 0];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      L[b][n][0] *= scale[0];
      L[b][n][1] *= scale[0];
      L[b][n][2] *= scale[1];
      L[b][n][3] *= scale[1];
    }
  }
  __syncwarp();  // the partner's part is read; the blocks lie over it
  write_transposed(L[0], blocks, g, c);
  write_transposed(L[2], blocks + kInverseStride, g, c);
  __syncwarp();
  invert_blocks(blocks, self.lane);
  BlockRow X0, X1, below;
  read_transposed(X0, blocks, g, c);
  read_transposed(X1, blocks + kInverseStride, g, c);
  merge_blocks(below, X0, L[1], blocks + kInverseStride, g, c);
  const float untilt = ptx::rcp_approx(chunk.tilt);
#pragma unroll
  for (int i = 0; i < 4; ++i) beta[i >> 1][i & 1] *= untilt;
  uint32_t T[3][4];
  const uint32_t zero[4] = {0, 0, 0, 0};
  pack_scaled(T[0], X0, beta[0]);
  pack_scaled(T[1], below, beta[0]);
  pack_scaled(T[2], X1, beta[1]);
  const int first = (self.lane >> 3) & 1, second = self.lane >> 4;
  auto at = [&](int i, int j) {
    return matrix_address(chunk.stage, self.lane, i, j, 0, second, first);
  };
  ptx::store_matrix4_transposed(at(0, 0), T[0]);
  ptx::store_matrix4_transposed(at(0, 1), zero);
  ptx::store_matrix4_transposed(at(1, 0), T[1]);
  ptx::store_matrix4_transposed(at(1, 1), T[2]);
}

}  // namespace flash_kda::cuda::sm90
