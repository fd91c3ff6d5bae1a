// The copying role, a warp: tiles from global to shared memory and back. Loads are one lane's.
#pragma once

#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/barriers.cuh"
#include "cuda/sm90/forward/schedule.cuh"

namespace flash_kda::cuda::sm90 {

// Goes through the chunks of a CTA.
template <typename Ring>
struct Walk {
  Ring at;
  Item item;
  uint32_t k = 0;
  int32_t row = 0;
  bool more = false;

  __device__ __forceinline__ void start(const Params& params, const uint16_t* order) {
    more = nth_item(params, order, 0, item);
  }
  // Whether there is a chunk at hand.
  __device__ __forceinline__ bool ready(const Params& params, const uint16_t* order) {
#pragma unroll 1
    while (more && row >= item.length) {
      row = 0;
      more = nth_item(params, order, ++k, item);
    }
    return more;
  }
  __device__ __forceinline__ void advance() {
    row += kChunk;
    at.advance();
  }
};

// Rows past the end of the sequence come along; whoever reads the tiles blanks them.
__device__ __forceinline__ void load_inputs(const Params& params, const uint16_t* order,
                                            uint32_t shared, Barriers barriers,
                                            Walk<StageCursor>& next) {
  if (!next.ready(params, order)) return;
  const uint32_t stage = shared + kSharedStages + next.at.slot * kStageBytes;
  const uint32_t raw = barriers.raw(next.at.slot);
  const Item& item = next.item;
  ptx::mbarrier_arrive_expect(raw, kRawBytes);
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    const int32_t tile[5] = {0, item.begin + next.row, half, item.head, item.batch};
    ptx::load_tile(stage + kStageK + half * kStageHalf, params.k, tile, raw);
    ptx::load_tile(stage + kStageQ + half * kStageHalf, params.q, tile, raw);
    ptx::load_tile(stage + kStageG + half * kHalfTileBytes, params.g, tile, raw);
  }
  next.advance();
}
__device__ __forceinline__ void load_values(const Params& params, const uint16_t* order,
                                            uint32_t shared, Barriers barriers,
                                            Walk<ValueCursor>& next) {
  if (!next.ready(params, order)) return;
  const uint32_t full = barriers.value_full(next.at.slot);
  const Item& item = next.item;
  ptx::mbarrier_wait(barriers.value_free(next.at.slot), next.at.parity ^ 1);
  ptx::mbarrier_arrive_expect(full, kTileBytes);
  const uint32_t tiles = shared + kSharedValues + next.at.slot * kTileBytes;
#pragma unroll 1
  for (int half = 0; half < kHalves; ++half) {
    const int32_t tile[5] = {0, item.begin + next.row, half, item.head, item.batch};
    ptx::load_tile(tiles + half * kHalfTileBytes, params.v, tile, full);
  }
  next.advance();
}

// The first `rows` rows of the out tile of a half, since the copy engine would also write the rows
// that follow: 8 lanes write the 128 bytes of a row.
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

// All in one order. When v of a chunk has been read, v of the chunk kValueTiles on is asked for;
// when its stage is done with, q, k, g of the chunk kStages on; then out is awaited.
__device__ __forceinline__ void copy_role(const Params& params, const uint16_t* order,
                                          uint32_t shared, Barriers barriers, int lane) {
  Walk<StageCursor> inputs;
  Walk<ValueCursor> values;
  if (lane == 0) {
    inputs.start(params, order);
    values.start(params, order);
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      load_inputs(params, order, shared, barriers, inputs);
      if (i < kValueTiles) load_values(params, order, shared, barriers, values);
    }
  }
  __syncwarp();
  OutputCursor at;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      if (lane == 0) load_values(params, order, shared, barriers, values);
      __syncwarp();
      ptx::mbarrier_wait(barriers.drained(at.slot), at.parity);
      if (lane == 0) load_inputs(params, order, shared, barriers, inputs);
      __syncwarp();
      ptx::mbarrier_wait(barriers.out_full(at.slot), at.parity);
      const uint32_t out = shared + kSharedOutputs + at.slot * kTileBytes;
      const int32_t rows = item.length - row;
#pragma unroll 1
      for (int half = 0; half < kHalves; ++half) {
        const uint32_t tile = out + half * kHalfTileBytes;
        const int32_t place[5] = {0, item.begin + row, half, item.head, item.batch};
        if (rows < kChunk) {
          store_rows(params, item, row, rows, half, tile, lane);
        } else if (lane == 0) {
          ptx::store_tile(params.out, place, tile);
        }
      }
      if (lane == 0) {
        ptx::commit_stores();
        ptx::wait_stores_read();
      }
      lanes_arrive(barriers.out_free(at.slot));
    }
  }
  if (lane == 0) ptx::wait_stores_written();
}

}  // namespace flash_kda::cuda::sm90
