// The roles that move tiles between global and shared memory: one loads q, k, g, one loads v, one
// per V half stores out. The loaders are one thread each, the storers a warp, which writes the rows
// of a partial chunk itself: the copy engine would also write the rows that follow it.
#pragma once

#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/barriers.cuh"
#include "cuda/sm90/forward/schedule.cuh"

namespace flash_kda::cuda::sm90 {

// Rows past the end of the sequence come along; whoever reads the tile blanks them.
__device__ __forceinline__ void load_inputs(const Params& params, const uint16_t* order,
                                            uint32_t stages, Barriers barriers) {
  StageCursor at;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      const uint32_t stage = stages + at.slot * kStageBytes;
      const uint32_t raw = barriers.raw(at.slot);
      ptx::mbarrier_wait(barriers.empty(at.slot), at.parity ^ 1);
      ptx::mbarrier_arrive_expect(raw, kRawBytes);
#pragma unroll 1
      for (int half = 0; half < kHalves; ++half) {
        const int32_t tile[5] = {0, item.begin + row, half, item.head, item.batch};
        ptx::load_tile(stage + kStageK + half * kStageHalf, params.k, tile, raw);
        ptx::load_tile(stage + kStageQ + half * kStageHalf, params.q, tile, raw);
        ptx::load_tile(stage + kStageG + half * kHalfTileBytes, params.g, tile, raw);
      }
    }
  }
}

__device__ __forceinline__ void load_values(const Params& params, const uint16_t* order,
                                            uint32_t tiles, Barriers barriers) {
  ValueCursor at;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      const uint32_t full = barriers.value_full(at.slot);
      ptx::mbarrier_wait(barriers.value_free(at.slot), at.parity ^ 1);
      ptx::mbarrier_arrive_expect(full, kTileBytes);
#pragma unroll 1
      for (int half = 0; half < kHalves; ++half) {
        const int32_t tile[5] = {0, item.begin + row, half, item.head, item.batch};
        ptx::load_tile(tiles + at.slot * kTileBytes + half * kHalfTileBytes, params.v, tile, full);
      }
    }
  }
}

// The first `rows` rows of an out tile, by a warp: 8 lanes write the 128 bytes of a row.
__device__ __forceinline__ void store_rows(const Params& params, const Item& item, int32_t row,
                                           int32_t rows, int half, uint32_t tile, int lane) {
  const int piece = lane & 7;
  uint8_t* to = static_cast<uint8_t*>(params.out_rows) +
                2 * (item.batch * params.out_batch_stride +
                     static_cast<int64_t>(item.begin + row) * params.out_token_stride +
                     item.head * kHeadDim + half * kHalf) +
                16 * piece;
#pragma unroll 1
  for (int r = lane >> 3; r < rows; r += 4) {
    const uint4 words = ptx::load_shared_words4(tile + r * kRowBytes + 16 * (piece ^ (r & 7)));
    *reinterpret_cast<uint4*>(to + 2 * r * params.out_token_stride) = words;
  }
}

__device__ __forceinline__ void store_outputs(const Params& params, const uint16_t* order, int half,
                                              uint32_t tiles, Barriers barriers, int lane) {
  OutputCursor at;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      const uint32_t tile = tiles + at.slot * kHalfTileBytes;
      ptx::mbarrier_wait(barriers.out_full(half, at.slot), at.parity);
      if (item.length - row >= kChunk) {
        if (lane == 0) {
          const int32_t place[5] = {0, item.begin + row, half, item.head, item.batch};
          ptx::store_tile(params.out, place, tile);
          ptx::commit_stores();
          ptx::wait_stores_read();
        }
      } else {
        store_rows(params, item, row, item.length - row, half, tile, lane);
      }
      warp_arrive(barriers.out_free(half, at.slot));
    }
  }
  if (lane == 0) ptx::wait_stores_written();
}

}  // namespace flash_kda::cuda::sm90
