// The copying role, a warp: tiles from global to shared memory and back. Loads are one lane's.
#pragma once

#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/bulk_linear.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/barriers.cuh"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90_split/forward/config.h"

namespace flash_kda::cuda::sm90 {

using sm90_split::kRecordBytes;
static_assert(kRecordBytes == kStageDecay + 4 * kHeadDim, "a record is a prepared stage");

// Goes through the chunks of a CTA.
template <typename Ring>
struct Walk {
  Ring at;
  Item item;
  uint32_t k = 0;
  int32_t row = 0;
  bool more = false;

  template <typename P>
  __device__ __forceinline__ void start(const P& params, const uint16_t* order) {
    more = nth_item(params, order, 0, item);
  }
  // Whether there is a chunk at hand.
  template <typename P>
  __device__ __forceinline__ bool ready(const P& params, const uint16_t* order) {
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

// How many of a sequence's records are known to be there.
struct Records {
  uint32_t known = 0;

  // Waits until the n-th is there and looks at up to 31 after it. By a warp.
  __device__ __forceinline__ void await(const HelpedParams& params, const Item& item, uint32_t n,
                                        int lane) {
    if (n < known) return;
    const bool asked = n + lane < records_before(item.chunks(), params.share);
    const uint32_t chunk = record_chunk(n + lane, params.share);
    const uint32_t* flag = params.ready + static_cast<int64_t>(chunk) * params.heads + item.head;
    uint32_t there;
    do {
      there = __ballot_sync(~0U, asked && ptx::acquire_flag(flag) != 0);
    } while ((there & 1) == 0);
    __syncwarp();
    ptx::fence_async_global();
    known = n + (there == ~0U ? 32 : __ffs(static_cast<int>(~there)) - 1);
  }
};

// A record is what preparation would make of the chunk: it passes by all roles but the chain.
__device__ __forceinline__ void load_record(const HelpedParams& params, uint32_t stage,
                                            Barriers barriers, const Walk<StageCursor>& next,
                                            Records& records, int lane) {
  const uint32_t chunk = next.row / kChunk;
  records.await(params, next.item, records_before(chunk, params.share), lane);
  const uint32_t full = barriers.full(next.at.slot);
  if (lane != 0) {
    ptx::mbarrier_arrive(full);
    return;
  }
  const int64_t record = static_cast<int64_t>(chunk) * params.heads + next.item.head;
  ptx::mbarrier_arrive(barriers.raw(next.at.slot));
  ptx::mbarrier_arrive_expect(full, kRecordBytes);
  ptx::load_bulk(stage, params.records + record * kRecordBytes, kRecordBytes, full);
}
__device__ __forceinline__ void load_record(const Params&, uint32_t, Barriers,
                                            const Walk<StageCursor>&, Records&, int) {}

// Rows past the end of the sequence come along; whoever reads the tiles blanks them. By a warp.
template <typename P>
__device__ __forceinline__ void load_inputs(const P& params, const uint16_t* order, uint32_t shared,
                                            Barriers barriers, Walk<StageCursor>& next,
                                            Records& records, int lane) {
  if (!next.ready(params, order)) return;
  const uint32_t stage = shared + kSharedStages + next.at.slot * kStageBytes;
  const Item& item = next.item;
  if (comes_as_record(params, next.row)) {
    load_record(params, stage, barriers, next, records, lane);
  } else if (lane == 0) {
    const uint32_t raw = barriers.raw(next.at.slot);
    ptx::mbarrier_arrive_expect(raw, kRawBytes);
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half) {
      const int32_t tile[5] = {0, item.begin + next.row, half, item.head, item.batch};
      ptx::load_tile(stage + kStageK + half * kStageHalf, params.k, tile, raw);
      ptx::load_tile(stage + kStageQ + half * kStageHalf, params.q, tile, raw);
      ptx::load_tile(stage + kStageG + half * kHalfTileBytes, params.g, tile, raw);
    }
  }
  __syncwarp();
  next.advance();
}
template <typename P>
__device__ __forceinline__ void load_values(const P& params, const uint16_t* order, uint32_t shared,
                                            Barriers barriers, Walk<ValueCursor>& next) {
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

// The kernel that makes the records ends before this one.
__device__ __forceinline__ void end_after_helpers(const HelpedParams&) {
  if (blockIdx.x + 1 == gridDim.x) ptx::wait_for_previous_kernels();
}
__device__ __forceinline__ void end_after_helpers(const Params&) {}

// All in one order. When v of a chunk has been read, v of the chunk kValueTiles on is asked for;
// then out of that chunk is awaited. With it the stage is done with, and q, k, g of the chunk
// kStages on are asked for.
template <typename P>
__device__ __forceinline__ void copy_role(const P& params, const uint16_t* order, uint32_t shared,
                                          Barriers barriers, int lane) {
  Walk<StageCursor> inputs;
  Walk<ValueCursor> values;
  Records records;
  inputs.start(params, order);
  values.start(params, order);
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) {
    load_inputs(params, order, shared, barriers, inputs, records, lane);
    if (i < kValueTiles && lane == 0) load_values(params, order, shared, barriers, values);
    __syncwarp();
  }
  OutputCursor at;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      if (lane == 0) load_values(params, order, shared, barriers, values);
      __syncwarp();
      ptx::mbarrier_wait(barriers.out_full(at.slot), at.parity);
      load_inputs(params, order, shared, barriers, inputs, records, lane);
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
      warp_arrive(barriers.out_free(at.slot));
    }
  }
  if (lane == 0) {
    ptx::wait_stores_written();
    end_after_helpers(params);
  }
}

}  // namespace flash_kda::cuda::sm90
