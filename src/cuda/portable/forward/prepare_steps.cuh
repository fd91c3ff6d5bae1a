// The steps from the raw q, k, g and beta of a chunk to the operands of the recurrence, by two
// warps, each of them 64 channels. Where results go is the caller's: a Writer.
#pragma once

#include <cstdint>

#include "cuda/common/numbers.cuh"
#include "cuda/common/tilt.cuh"
#include "cuda/portable/forward/gate.cuh"
#include "cuda/portable/forward/params.h"
#include "cuda/portable/forward/products.cuh"
#include "cuda/portable/forward/record.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "ops/forward/spec.h"

namespace flash_kda::cuda::portable {

// Raw rows in shared memory: 64 channels of a token, 16-byte columns ^ (row % 8).
inline constexpr int kRawRowBytes = 128;

// What a warp works on.
struct Chunk {
  int64_t batch, token;
  int head;
  int rows;    // tokens that exist
  float tilt;  // chunk_tilt
};

struct Lane {
  int warp, lane, g, c;
};

// This warp's 64 channels of the chunk's rows; rows that do not exist become zeros.
__device__ __forceinline__ void load_rows(const Rows& rows, const Chunk& chunk, const Lane& at,
                                          uint32_t to) {
  // A quarter of the lanes to a row. Rows 4 apart differ in the third bit of their swizzle; those
  // that do not exist are not read.
  const int column = at.lane & 7, first = at.lane >> 3;
  const int64_t start = chunk.batch * rows.batch_stride +
                        (chunk.token + first) * rows.token_stride + chunk.head * kHeadDim +
                        64 * at.warp + 8 * column;
  const auto* source = static_cast<const uint16_t*>(rows.data) + start;
  const int64_t step = 4 * rows.token_stride;
  const uint32_t even = to + first * kRawRowBytes + ((column ^ first) << 4);
  const uint32_t odd = (even ^ 4 << 4) + 4 * kRawRowBytes;
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    ptx::copy_async16_or_zero((i % 2 == 0 ? even : odd) + i / 2 * 8 * kRawRowBytes, source,
                              4 * i + first < chunk.rows);
    source += step;
  }
}

// Address that this lane gives to load_matrix4 for the tile (block, slice of this warp).
__device__ __forceinline__ uint32_t tile_address(uint32_t raw, int block, int slice, int lane) {
  const int row = lane & 15;
  return raw + (16 * block + row) * kRawRowBytes + (((2 * slice + (lane >> 4)) ^ (row & 7)) << 4);
}

// Sums of squares over this warp's channels: the diagonal of X X^T, for rows 8 r + g of block b at
// [2 b + r]. Valid in the lanes with c = g / 2 only.
__device__ __forceinline__ void sum_squares(uint32_t raw, const Lane& at, float (&sums)[4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float low[4] = {}, high[4] = {};  // columns 0 ... 7 and 8 ... 15 of the product
#pragma unroll
    for (int s = 0; s < kSlicesPerWarp; ++s) {
      uint32_t x[4];
      ptx::load_matrix4(x, tile_address(raw, b, s, at.lane));
      ptx::mma_bf16(low, x, x[0], x[2]);
      ptx::mma_bf16(high, x, x[1], x[3]);
    }
    sums[2 * b] = at.g & 1 ? low[1] : low[0];
    sums[2 * b + 1] = at.g & 1 ? high[3] : high[2];
  }
}

// This warp's sums for k (0) and q (1) to `squares`: [warp][k, q][g], four rows each.
__device__ __forceinline__ void store_squares(uint32_t raw_k, uint32_t raw_q, const Lane& at,
                                              uint32_t squares) {
  float sums_k[4], sums_q[4];
  sum_squares(raw_k, at, sums_k);
  sum_squares(raw_q, at, sums_q);
  if (at.c == at.g >> 1) {
    ptx::store_shared4(squares + ((2 * at.warp) * 8 + at.g) * 16, sums_k);
    ptx::store_shared4(squares + ((2 * at.warp + 1) * 8 + at.g) * 16, sums_q);
  }
}

// 1 / norm of rows 8 r + g of block b, from both warps' sums of squares.
using RowNorms = float[kBlocks][2];
__device__ __forceinline__ void load_norms(uint32_t squares, int which, const Lane& at,
                                           RowNorms& norms) {
  const float4 a = ptx::load_shared4(squares + (which * 8 + at.g) * 16);
  const float4 b = ptx::load_shared4(squares + ((2 + which) * 8 + at.g) * 16);
  norms[0][0] = ptx::rsqrt_approx(a.x + b.x + kNormEpsilon);
  norms[0][1] = ptx::rsqrt_approx(a.y + b.y + kNormEpsilon);
  norms[1][0] = ptx::rsqrt_approx(a.z + b.z + kNormEpsilon);
  norms[1][1] = ptx::rsqrt_approx(a.w + b.w + kNormEpsilon);
}

__device__ __forceinline__ Gate load_gate(const PrepareParams& p, int head) {
  const float a_log =
      p.A_log.data == nullptr ? 0.0F : load_number(p.A_log.data, p.A_log.dtype, head);
  return {-kLog2e * ptx::exp2_approx(a_log * kLog2e), p.inverse_bound};
}

// slope * dt_bias of this warp's channels.
__device__ __forceinline__ void store_bias(const PrepareParams& p, const Gate& gate, int head,
                                           const Lane& at, uint32_t to) {
  const int channel = 64 * at.warp + 2 * at.lane;
  float2 bias = make_float2(0.0F, 0.0F);
  if (p.dt_bias.data != nullptr) {
    const int64_t index = static_cast<int64_t>(head) * kHeadDim + channel;
    bias.x = load_number(p.dt_bias.data, p.dt_bias.dtype, index);
    bias.y = load_number(p.dt_bias.data, p.dt_bias.dtype, index + 1);
  }
  ptx::store_shared2(to + channel * 4, gate.slope * bias.x, gate.slope * bias.y);
}

// beta of the chunk's token `lane`; 0 where there is none.
__device__ __forceinline__ float load_beta(const Logits& beta, const Chunk& chunk, int lane) {
  if (lane >= chunk.rows) return 0.0F;
  const float logit =
      load_number(beta.data, beta.dtype,
                  chunk.batch * beta.batch_stride + (chunk.token + lane) * beta.token_stride +
                      chunk.head * beta.head_stride);
  return ptx::rcp_approx(1.0F + ptx::exp2_approx(-kLog2e * logit));
}

// Masks for gate words: tokens that do not exist decay nothing. [b][r], tokens 8 r + 2c, + 1.
using TokenMasks = uint32_t[kBlocks][2];
__device__ __forceinline__ void token_masks(int rows, int c, TokenMasks& masks) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = 16 * b + 8 * r + 2 * c;
      masks[b][r] = (token < rows ? 0xffffU : 0) | (token + 1 < rows ? 0xffff0000U : 0);
    }
  }
}

struct SliceInputs {
  uint32_t raw_q, raw_k, raw_g;  // this warp's tiles
  uint32_t bias;                 // of channel 0
  Gate gate;
  uint32_t triangle[4];
  TokenMasks masks;
  RowNorms norm_q, norm_k;
  float tilt;
};

__device__ __forceinline__ void slice_decays(const SliceInputs& in, int block, int slice,
                                             const Lane& at, Tile& power, Tile& inverse) {
  uint32_t w[4];
  ptx::load_matrix4_transposed(w, tile_address(in.raw_g, block, slice, at.lane));
  const uint32_t bias = in.bias + (64 * at.warp + 16 * slice + at.g) * 4;
  const float bias_of_h[2] = {ptx::load_shared(bias), ptx::load_shared(bias + 8 * 4)};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    w[e] = gate_pair(in.gate, w[e], bias_of_h[e >> 1]) & in.masks[block][e & 1];
  }
  decay_powers(in.triangle, w, power, inverse);
}

__device__ __forceinline__ void load_normalized(uint32_t raw, int block, int slice, int lane,
                                                const float (&norm)[2], Tile& tile) {
  uint32_t words[4];
  ptx::load_matrix4(words, tile_address(raw, block, slice, lane));
  normalize_tile(words, norm, tile);
}

// 16 channels: their tiles of kd (without its sign), qd, kr and d to the record, their part of the
// products to l, m. Writer: kd(block, slice, tile), qd and kr likewise, decay(slice, float4) with d
// of channels 2c, + 1, 8 + 2c, + 1. Raw tiles of a slice may be overwritten by its own: the writer
// is called for a block of a tensor after the block has been read.
template <typename Writer>
__device__ __forceinline__ void prepare_slice(const SliceInputs& in, int slice, const Lane& at,
                                              const Writer& record, PairProducts& l,
                                              PairProducts& m) {
  Tile power[kBlocks], inverse[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) slice_decays(in, b, slice, at, power[b], inverse[b]);
  ChannelFactor decay[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) block_decay(power[b], at.c, decay[b]);

  Tile k, q, left_k, left_q, right0, right1;
  load_normalized(in.raw_k, 0, slice, at.lane, in.norm_k[0], k);
  load_normalized(in.raw_q, 0, slice, at.lane, in.norm_q[0], q);
  multiply(k, power[0], left_k);
  multiply(q, power[0], left_q);
  multiply(k, inverse[0], right0);
  record.kd(0, slice, left_k);
  record.qd(0, slice, left_q);
  add_product(l.block[kBlock00], left_k, right0);
  add_product(m.block[kBlock00], left_q, right0);
  scale_channels(right0, decay[0]);

  load_normalized(in.raw_k, 1, slice, at.lane, in.norm_k[1], k);
  load_normalized(in.raw_q, 1, slice, at.lane, in.norm_q[1], q);
  multiply(k, power[1], left_k);
  multiply(q, power[1], left_q);
  multiply(k, inverse[1], right1);
  add_product(l.block[kBlock10], left_k, right0);
  add_product(m.block[kBlock10], left_q, right0);
  add_product(l.block[kBlock11], left_k, right1);
  add_product(m.block[kBlock11], left_q, right1);
  scale_channels(left_k, decay[0]);
  scale_channels(left_q, decay[0]);
  ChannelFactor tilted_decay;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) tilted_decay[h][i] = decay[1][h][i] * in.tilt;
  }
  scale_channels(right0, tilted_decay);
  scale_channels(right1, tilted_decay);
  record.kd(1, slice, left_k);
  record.qd(1, slice, left_q);
  record.kr(0, slice, right0);
  record.kr(1, slice, right1);
  if (at.g == 0) {
    record.decay(slice,
                 make_float4(decay[0][0][0] * decay[1][0][0], decay[0][0][1] * decay[1][0][1],
                             decay[0][1][0] * decay[1][1][0], decay[0][1][1] * decay[1][1][1]));
  }
}

__device__ __forceinline__ void store_products(uint32_t to, const PairProducts& products,
                                               int lane) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      ptx::store_shared4(to + ((2 * b + t) * kWarp + lane) * 16, products.block[b][t]);
    }
  }
}

__device__ __forceinline__ void add_products(uint32_t from, PairProducts& products, int lane) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float4 x = ptx::load_shared4(from + ((2 * b + t) * kWarp + lane) * 16);
      products.block[b][t][0] += x.x;
      products.block[b][t][1] += x.y;
      products.block[b][t][2] += x.z;
      products.block[b][t][3] += x.w;
    }
  }
}

__device__ __forceinline__ void scale_products(PairProducts& products, float factor) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products.block[b][t][i] *= factor;
    }
  }
}

// M's lower triangle in fp16; what lies above may be huge and is left out by selection.
__device__ __forceinline__ void pack_triangle(const PairProducts& m, const Lane& at,
                                              LowerTriangle& triangle) {
  const bool first = 2 * at.c <= at.g;
  const bool second = 2 * at.c + 1 <= at.g;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const BlockProduct& d = m.block[b == 0 ? kBlock00 : kBlock11];
    triangle.diagonal[b][0] = ptx::pack_f16(first ? d[0][0] : 0.0F, second ? d[0][1] : 0.0F);
    triangle.diagonal[b][1] = ptx::pack_f16(d[0][2], d[0][3]);
    triangle.diagonal[b][2] = ptx::pack_f16(first ? d[1][2] : 0.0F, second ? d[1][3] : 0.0F);
  }
  const BlockProduct& corner = m.block[kBlock10];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      triangle.corner[2 * r + h] = ptx::pack_f16(corner[h][2 * r], corner[h][2 * r + 1]);
    }
  }
}

}  // namespace flash_kda::cuda::portable
