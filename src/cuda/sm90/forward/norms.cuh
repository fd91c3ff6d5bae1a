// The norming role, a warp: 1/|k| and 1/|q| of the tokens of all chunks.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/barriers.cuh"
#include "cuda/sm90/forward/schedule.cuh"

namespace flash_kda::cuda::sm90 {

// Rows past the end of the sequence hold somebody else's tokens: k = q = 0 and no decay instead.
__device__ __forceinline__ void blank_tail(uint32_t stage, int32_t rows, int lane) {
  constexpr uint32_t kMinusInfinity = 0xFF80FF80;  // as the raw gate
  for (int row = rows + (lane >> 3); row < kChunk; row += 4) {
    const uint32_t at = stage + row * kRowBytes + 16 * (lane & 7);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      ptx::store_shared_words4(at + kStageK + half * kStageHalf, 0);
      ptx::store_shared_words4(at + kStageQ + half * kStageHalf, 0);
      ptx::store_shared_words4(at + kStageG + half * kHalfTileBytes, kMinusInfinity);
    }
  }
  __syncwarp();
}

// Squares are summed by bf16 pairs of 16 channels, then by products with ones. k is negative from
// here on, which makes kd so, as the chain wants it.
__device__ __forceinline__ void write_norms(uint32_t stage, int lane) {
  constexpr uint32_t kOnes = 0x3F803F80;  // bf16
  const int row = lane & 15, piece = lane >> 4;
  const uint32_t place = row * kRowBytes + ((piece ^ (row & 7)) << 4);
#pragma unroll 1
  for (int tensor = 0; tensor < 2; ++tensor) {
    const uint32_t from = stage + (tensor == 0 ? kStageK : kStageQ) + place;
    float sum[2][4] = {};  // by block: rows g and g + 8
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int s = 0; s < kHalf / 16; s += 2) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const uint32_t at = from + half * kStageHalf + b * kBlock * kRowBytes;
          uint32_t x[4], y[4], squares[4];
          ptx::load_matrix4(x, at ^ (s << 5));
          ptx::load_matrix4(y, at ^ ((s + 1) << 5));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            squares[i] = ptx::fma_bf16x2(x[i], x[i], ptx::mul_bf16x2(y[i], y[i]));
          }
          ptx::mma_bf16(sum[b], squares, kOnes, kOnes);
        }
      }
    }
    const float sign = tensor == 0 ? -1.0F : 1.0F;
    float norm[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      norm[n] = sign * ptx::rsqrt_approx(sum[n >> 1][2 * (n & 1)] + kNormEpsilon);
    }
    ptx::store_shared4_if((lane & 3) == 0, stage + kStageNorms + 128 * tensor + 4 * (lane & ~3),
                          norm);
  }
}

__device__ __forceinline__ void norm_role(const Params& params, const uint16_t* order,
                                          uint32_t shared, Barriers barriers, int lane) {
  StageCursor at;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      const uint32_t stage = shared + kSharedStages + at.slot * kStageBytes;
      ptx::mbarrier_wait(barriers.raw(at.slot), at.parity);
      if (item.length - row < kChunk) blank_tail(stage, item.length - row, lane);
      write_norms(stage, lane);
      lanes_arrive(barriers.normed(at.slot));
    }
  }
}

}  // namespace flash_kda::cuda::sm90
