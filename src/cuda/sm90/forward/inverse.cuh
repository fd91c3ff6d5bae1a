// What follows the tiles of a chunk (prepare.cuh): the two warps of a pair leave their parts of L
// and M, and the finishing warp adds them up and makes M and T = (I + L)^-1 diag(beta). The parts
// of M come with the other sign, since k is negative in them.
//
// With X_b the inverse of the diagonal block I + L_bb (forward substitution in fp32, a lane per
// column, half a warp per block), the block below is -X_1 L_10 X_0. Blocks are held transposed, as
// D fragments, which are the A operands of the next product.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/config.h"

namespace flash_kda::cuda::sm90 {

// Byte offset in a 16 x 16 fp32 block: pairs at (row, 2c) and whole rows without bank conflicts.
__device__ __forceinline__ uint32_t block_offset(int row, int column) {
  return 4 * (16 * row + (column ^ (((row >> 1) & 1) << 3)));
}

using BlockRow = float[2][4];  // 16 rows x 16 columns as two D fragments

// What is finished: a chunk's stage, its pair's scratch.
struct Finish {
  int lane;
  uint32_t stage, scratch;  // shared addresses
  float tilt;               // tilt.cuh
};

// Where blocks 00, 10, 11 of a part lie: the diagonal ones first.
__device__ __forceinline__ constexpr uint32_t part_offset(int block) {
  return block == 0 ? 0 : block == 1 ? kBlockStride + 1024 : kBlockStride;
}

// A preparation warp's part of L or M, and the sum of both warps' parts of a block.
__device__ __forceinline__ void store_part(uint32_t to, int lane, const float (&part)[3][2][4]) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::store_shared4(to + part_offset(b) + n * 512 + lane * 16, part[b][n]);
    }
  }
}
__device__ __forceinline__ void add_parts(BlockRow& sum, uint32_t first, uint32_t second, int block,
                                          int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint32_t at = part_offset(block) + n * 512 + lane * 16;
    const float4 a = ptx::load_shared4(first + at), b = ptx::load_shared4(second + at);
    sum[n][0] = a.x + b.x;
    sum[n][1] = a.y + b.y;
    sum[n][2] = a.z + b.z;
    sum[n][3] = a.w + b.w;
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

// M of the chunk, tilted.
__device__ __forceinline__ void finish_m(const Finish& self) {
  const uint32_t zero[4] = {0, 0, 0, 0};
  const int g = self.lane >> 2, c = self.lane & 3;
  const int first = (self.lane >> 3) & 1, second = self.lane >> 4;
  auto at = [&](int i, int j) {
    return matrix_address(self.stage, self.lane, i, j, 1, first, second);
  };
#pragma unroll 1
  for (int b = 0; b < 3; ++b) {
    BlockRow m;
    add_parts(m, self.scratch + kScratchM, self.scratch + kScratchM + kPartialBytes, b, self.lane);
    uint32_t block[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) m[n][i] *= -self.tilt;
      const int column = 8 * n + 2 * c;
      const bool whole = b == 1;
      block[2 * n] = ptx::pack_f16(whole || column <= g ? m[n][0] : 0.0F,
                                   whole || column + 1 <= g ? m[n][1] : 0.0F);
      block[2 * n + 1] = ptx::pack_f16(whole || column <= g + 8 ? m[n][2] : 0.0F,
                                       whole || column + 1 <= g + 8 ? m[n][3] : 0.0F);
    }
    ptx::store_matrix4(at((b + 1) / 2, b / 2), block);
  }
  ptx::store_matrix4(at(0, 1), zero);
}

// Both diagonal blocks, in place: L transposed before (what lies above its diagonal is not read),
// the inverse after.
__device__ __forceinline__ void invert_blocks(uint32_t blocks, int lane) {
  const int column = lane & 15;
  const uint32_t mine = blocks + (lane >> 4) * kBlockStride;
  float x[16], next[16];
  auto load_row = [&](int k) {
#pragma unroll
    for (int i = (k + 1) / 4; i < 4; ++i) {
      const float4 v = ptx::load_shared4(mine + block_offset(k, 4 * i));
      next[4 * i] = v.x;
      next[4 * i + 1] = v.y;
      next[4 * i + 2] = v.z;
      next[4 * i + 3] = v.w;
    }
  };
  load_row(0);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0F : 0.0F;
#pragma unroll
  for (int k = 0; k < 15; ++k) {
    float l[16];
#pragma unroll
    for (int i = k + 1; i < 16; ++i) l[i] = next[i];
    if (k < 14) load_row(k + 1);
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

// beta of tokens g, g + 8 of a block. beta_of_lane: of the lane's token (lane = token of the
// chunk).
struct Beta {
  float low, high;
  __device__ __forceinline__ Beta(float beta_of_lane, int block, int g)
      : low(__shfl_sync(~0U, beta_of_lane, kBlock * block + g)),
        high(__shfl_sync(~0U, beta_of_lane, kBlock * block + g + 8)) {}
};

// Both warps' parts of L of a block, times beta of the row's token.
__device__ __forceinline__ void take_L(BlockRow& L, const Finish& self, int block,
                                       const Beta& beta) {
  add_parts(L, self.scratch + kScratchL, self.stage + kStageTM, block, self.lane);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    L[n][0] *= beta.low;
    L[n][1] *= beta.low;
    L[n][2] *= beta.high;
    L[n][3] *= beta.high;
  }
}

// Columns of T are scaled by beta of their token; held transposed, those are the rows g, g + 8.
__device__ __forceinline__ void pack_scaled(uint32_t (&to)[4], const BlockRow& from,
                                            const Beta& beta) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    to[2 * n] = ptx::pack_f16(from[n][0] * beta.low, from[n][1] * beta.low);
    to[2 * n + 1] = ptx::pack_f16(from[n][2] * beta.high, from[n][3] * beta.high);
  }
}

// T of the chunk, divided by the tilt. L_10 is read last: its parts lie outside of the blocks, and
// in the place of T.
__device__ __forceinline__ void finish_t(const Finish& self, float beta_of_lane) {
  const int g = self.lane >> 2, c = self.lane & 3;
  const uint32_t blocks = self.scratch + kScratchL;
#pragma unroll 1
  for (int b = 0; b < 2; ++b) {
    BlockRow L;
    take_L(L, self, 2 * b, Beta(beta_of_lane, b, g));
    __syncwarp();  // both parts are read: the block takes the place of one
    write_transposed(L, blocks + b * kBlockStride, g, c);
  }
  __syncwarp();
  invert_blocks(blocks, self.lane);
  const float untilt = ptx::rcp_approx(self.tilt);
  const Beta beta0(beta_of_lane * untilt, 0, g), beta1(beta_of_lane * untilt, 1, g);
  uint32_t T00[4], T10[4], T11[4];
  BlockRow X, below;
  read_transposed(X, blocks, g, c);
  pack_scaled(T00, X, beta0);
  {
    BlockRow L;
    take_L(L, self, 1, Beta(beta_of_lane, 1, g));
    merge_blocks(below, X, L, blocks + kBlockStride, g, c);
  }
  pack_scaled(T10, below, beta0);
  read_transposed(X, blocks + kBlockStride, g, c);
  pack_scaled(T11, X, beta1);
  const uint32_t zero[4] = {0, 0, 0, 0};
  const int first = (self.lane >> 3) & 1, second = self.lane >> 4;
  auto at = [&](int i, int j) {
    return matrix_address(self.stage, self.lane, i, j, 0, second, first);
  };
  __syncwarp();  // the part that lay here is read
  ptx::store_matrix4_transposed(at(0, 0), T00);
  ptx::store_matrix4_transposed(at(0, 1), zero);
  ptx::store_matrix4_transposed(at(1, 0), T10);
  ptx::store_matrix4_transposed(at(1, 1), T11);
}

}  // namespace flash_kda::cuda::sm90
