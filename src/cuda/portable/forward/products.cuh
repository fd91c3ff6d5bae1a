// Step "products": from k^, q^ and the decays of 16 channels to their part of L and M, and to the
// tiles kd, qd, kr of the record.
//
// With P = 2^G, Q = 2^-G inside each block of 16 tokens and e_b = 2^(sum of block b):
//
//   kd0 = k^ P0       kd1 = (k^ P1) e0       kr0 = ((k^ Q0) e0) e1       kr1 = (k^ Q1) e1
//   L00 = k^ P0 . k^ Q0        L10 = k^ P1 . (k^ Q0) e0        L11 = k^ P1 . k^ Q1
//
// and qd, M with q^ for the left k^. The products run in tf32 straight from the fp32 registers:
// its range holds P and Q, and its 10 bits of mantissa leave L and M more exact than fp16 can
// store them.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/gate.cuh"
#include "cuda/portable/forward/record.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/movmatrix.cuh"

namespace flash_kda::cuda::portable {

// Sums over channels of the products of two blocks of 16 tokens: rows 8 r + g, columns
// 8 t + 2c + i at [t][2 r + i].
using BlockProduct = float[2][4];

// L or M before beta and the triangle's mask, as the blocks (0, 0), (1, 0), (1, 1).
inline constexpr int kBlock00 = 0;
inline constexpr int kBlock10 = 1;
inline constexpr int kBlock11 = 2;
struct PairProducts {
  BlockProduct block[3] = {};
};

__device__ __forceinline__ void add_product(BlockProduct& sum, const Tile& left,
                                            const Tile& right) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float a[4] = {left[2 * h][0], left[2 * h][1], left[2 * h + 1][0], left[2 * h + 1][1]};
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      ptx::mma_tf32(sum[t], a, right[2 * h + t][0], right[2 * h + t][1]);
    }
  }
}

// bf16 words [2 h + r] times a factor per row r, by words times one per element.
__device__ __forceinline__ void normalize_tile(const uint32_t (&words)[4], const float (&norm)[2],
                                               Tile& tile) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    tile[e][0] = ptx::low_bf16(words[e]) * norm[e & 1];
    tile[e][1] = ptx::high_bf16(words[e]) * norm[e & 1];
  }
}

__device__ __forceinline__ void multiply(const Tile& a, const Tile& b, Tile& product) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    product[e][0] = a[e][0] * b[e][0];
    product[e][1] = a[e][1] * b[e][1];
  }
}

// A factor per channel: [h][i].
using ChannelFactor = float[2][2];

__device__ __forceinline__ void scale_channels(Tile& tile, const ChannelFactor& factor) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    tile[e][0] *= factor[e >> 1][0];
    tile[e][1] *= factor[e >> 1][1];
  }
}

// The decay of a whole block: row 15 of its P, which lanes 28 ... 31 hold.
__device__ __forceinline__ void block_decay(const Tile& power, int c, ChannelFactor& decay) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      decay[h][i] = __shfl_sync(0xffffffffU, power[2 * h + 1][i], 28 + c);
    }
  }
}

__device__ __forceinline__ void store_vector(unsigned char* to, uint32_t x, uint32_t y, uint32_t z,
                                             uint32_t w) {
  *reinterpret_cast<uint4*>(to) = make_uint4(x, y, z, w);
}

// A tile of kd or qd.
__device__ __forceinline__ void store_tile(unsigned char* to, const Tile& tile) {
  uint32_t word[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) word[e] = ptx::pack_f16(tile[e][0], tile[e][1]);
  store_vector(to, word[0], word[2], word[1], word[3]);
}

// -tile, of kd.
__device__ __forceinline__ void store_negative_tile(unsigned char* to, const Tile& tile) {
  constexpr uint32_t kSigns = 0x80008000U;
  uint32_t word[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) word[e] = ptx::pack_f16(tile[e][0], tile[e][1]) ^ kSigns;
  store_vector(to, word[0], word[2], word[1], word[3]);
}

// A tile of kr, whose pairs run along the tokens.
__device__ __forceinline__ void store_transposed_tile(unsigned char* to, const Tile& tile) {
  uint32_t word[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    word[e] = ptx::transpose_matrix(ptx::pack_f16(tile[e][0], tile[e][1]));
  }
  store_vector(to, word[0], word[1], word[2], word[3]);
}

}  // namespace flash_kda::cuda::portable
