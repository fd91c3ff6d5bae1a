// The steps of the recurrence of one chunk for 16 V rows, by one warp. S, X and R are accumulators
// that become operand A in registers; kd, qd, kr, T, M, d come from a record (record.cuh) in shared
// memory.
//
//   X = V^T + S kd^T        R = X T^T        O^T = S qd^T + R M^T        S <- S d + R kr
#pragma once

#include <cstdint>

#include "cuda/portable/forward/record.cuh"
#include "cuda/portable/forward/row_scale.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace flash_kda::cuda::portable {

// Two neighbouring D tiles (16 columns) as operand A.
__device__ __forceinline__ void to_operand(const float (&left)[4], const float (&right)[4],
                                           uint32_t (&a)[4]) {
  a[0] = ptx::pack_f16(left[0], left[1]);
  a[1] = ptx::pack_f16(left[2], left[3]);
  a[2] = ptx::pack_f16(right[0], right[1]);
  a[3] = ptx::pack_f16(right[2], right[3]);
}

// sum += S x^T for x = kd or qd at `matrix`. `bits`: all S of the lane's rows in fp16, united.
__device__ __forceinline__ void read_state(const RowState& state, uint32_t matrix, int lane,
                                           RowTokens& sum, uint32_t (&bits)[2]) {
  bits[0] = bits[1] = 0;
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    uint32_t a[4];
    to_operand(state[2 * s], state[2 * s + 1], a);
    bits[0] |= a[0] | a[2];
    bits[1] |= a[1] | a[3];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint4 x = ptx::load_shared_words4(matrix + tile_offset(b, s, lane));
      ptx::mma_f16(sum[2 * b], a, x.x, x.y);
      ptx::mma_f16(sum[2 * b + 1], a, x.z, x.w);
    }
  }
}

__device__ __forceinline__ void load_triangle(uint32_t from, int lane, LowerTriangle& triangle) {
  const uint4 quad = ptx::load_shared_words4(from + kTriangleQuad + lane * 16);
  const uint4 corner = ptx::load_shared_words4(from + kTriangleCorner + lane * 16);
  const float2 pair = ptx::load_shared2(from + kTrianglePair + lane * 8);
  triangle.diagonal[0][0] = quad.x;
  triangle.diagonal[0][1] = quad.y;
  triangle.diagonal[0][2] = quad.z;
  triangle.diagonal[1][0] = quad.w;
  triangle.diagonal[1][1] = __float_as_uint(pair.x);
  triangle.diagonal[1][2] = __float_as_uint(pair.y);
  triangle.corner[0] = corner.x;
  triangle.corner[1] = corner.y;
  triangle.corner[2] = corner.z;
  triangle.corner[3] = corner.w;
}

// The tokens of both blocks as operand A.
using TokenOperand = uint32_t[kBlocks][4];

__device__ __forceinline__ void tokens_operand(const RowTokens& x, TokenOperand& a) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) to_operand(x[2 * b], x[2 * b + 1], a[b]);
}

// sum += x t^T for t = T or M.
__device__ __forceinline__ void multiply_triangle(const TokenOperand& x, const LowerTriangle& t,
                                                  RowTokens& sum) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    ptx::mma_f16(sum[2 * b], x[b], t.diagonal[b][0], 0);
    ptx::mma_f16(sum[2 * b + 1], x[b], t.diagonal[b][1], t.diagonal[b][2]);
  }
  ptx::mma_f16(sum[2], x[0], t.corner[0], t.corner[1]);
  ptx::mma_f16(sum[3], x[0], t.corner[2], t.corner[3]);
}

// S <- S d.
__device__ __forceinline__ void decay_state(uint32_t record, int c, RowState& state) {
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
    const float4 d = ptx::load_shared4(record + kRecordDecay + decay_offset(s, c));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state[2 * s][2 * r] *= d.x;
      state[2 * s][2 * r + 1] *= d.y;
      state[2 * s + 1][2 * r] *= d.z;
      state[2 * s + 1][2 * r + 1] *= d.w;
    }
  }
}

// S += R kr.
__device__ __forceinline__ void update_state(const TokenOperand& r, uint32_t record, int lane,
                                             RowState& state) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const uint4 kr = ptx::load_shared_words4(record + kRecordKr + tile_offset(b, s, lane));
      ptx::mma_f16(state[2 * s], r[b], kr.x, kr.y);
      ptx::mma_f16(state[2 * s + 1], r[b], kr.z, kr.w);
    }
  }
}

// A chunk's [32 tokens, 16 V rows] of v or out, bf16, in shared memory: 32 bytes a token, whose two
// halves change places every four tokens, so that 8x8 matrices are read and written free of
// conflicts.
inline constexpr int kValueTileBytes = kChunk * kTileRows * 2;

__device__ __forceinline__ int value_offset(int token, int half) {
  return token * 32 + ((half ^ ((token >> 2) & 1)) << 4);
}

// V^T of the tile, times the rows' units.
__device__ __forceinline__ void load_values(uint32_t tile, int lane, const RowScale& scale,
                                            RowTokens& values) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    uint32_t x[4];  // tokens 0 ... 7 of rows g, g + 8; tokens 8 ... 15 likewise
    const int token = 16 * b + (lane & 7) + 8 * (lane >> 4);
    ptx::load_matrix4_transposed(x, tile + value_offset(token, (lane >> 3) & 1));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float unit = scale.unit[e & 1];
      values[2 * b + (e >> 1)][2 * (e & 1)] = ptx::low_bf16(x[e]) * unit;
      values[2 * b + (e >> 1)][2 * (e & 1) + 1] = ptx::high_bf16(x[e]) * unit;
    }
  }
}

}  // namespace flash_kda::cuda::portable
