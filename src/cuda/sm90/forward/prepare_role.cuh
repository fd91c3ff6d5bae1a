// The role of a pair of preparation warps: every kPairs-th chunk of the CTA's work.
#pragma once

#include <cfloat>

#include "cuda/common/tilt.cuh"
#include "cuda/sm90/forward/barriers.cuh"
#include "cuda/sm90/forward/inverse.cuh"
#include "cuda/sm90/forward/prepare.cuh"
#include "cuda/sm90/forward/schedule.cuh"

namespace flash_kda::cuda::sm90 {

__device__ __forceinline__ float load_number(const void* from, bool bf16, int64_t index) {
  if (bf16) return ptx::low_bf16(__ldg(static_cast<const uint16_t*>(from) + index));
  return __ldg(static_cast<const float*>(from) + index);
}

// The gate's constants of a head; the biases of this warp's channels go to shared memory.
__device__ __forceinline__ HeadGate load_gate(const Params& params, const PrepareLane& self,
                                              int32_t head) {
  const float A_log =
      params.A_log == nullptr ? 0.0F : load_number(params.A_log, params.A_log_bf16, head);
  HeadGate gate;
  // Above 0, so that a raw gate of -inf means no decay whatever A_log is (blank_tail).
  gate.gate_scale = fmaxf(0.5F * __expf(A_log), FLT_MIN);
  gate.half_bound = 0.5F * params.lower_bound * kLog2E;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kHalf / 32; ++i) {
    const int channel = self.warp * kHalf + 32 * i + self.lane;
    const float bias = params.dt_bias == nullptr
                           ? 0.0F
                           : load_number(params.dt_bias, params.dt_bias_bf16,
                                         static_cast<int64_t>(head) * kHeadDim + channel);
    ptx::store_shared(self.bias + 4 * (32 * i + self.lane), bias * gate.gate_scale);
  }
  __syncwarp();
  return gate;
}

// Goes through a pair's chunks of the CTA's work, and their stages.
struct PairChunks {
  static_assert(kStages % kPairs == 0, "a pair sees every phase of its stages");
  static_assert(kStages > kPairs, "the tiles of its next chunk don't wait for the one in hand");
  Item item;
  StageCursor at;
  uint32_t k = 0;
  int32_t row;

  // False past the last.
  __device__ __forceinline__ bool settle(const Params& params, const uint16_t* order) {
#pragma unroll 1
    while (row >= item.chunks() * kChunk) {
      row -= item.chunks() * kChunk;
      if (!nth_item(params, order, ++k, item)) return false;
    }
    return true;
  }
  __device__ __forceinline__ bool start(const Params& params, const uint16_t* order, int pair) {
    row = pair * kChunk;
    at.slot = pair;
    return nth_item(params, order, 0, item) && settle(params, order);
  }
  __device__ __forceinline__ bool advance(const Params& params, const uint16_t* order) {
    row += kPairs * kChunk;
    at.slot += kPairs;
    if (at.slot >= kStages) {
      at.slot -= kStages;
      at.parity ^= 1;
    }
    return settle(params, order);
  }
};

__device__ __forceinline__ void prepare_role(const Params& params, const uint16_t* order,
                                             uint32_t shared, Barriers barriers, int thread) {
  const int pair = __shfl_sync(~0U, thread / 64, 0);
  const PrepareLane self = prepare_lane(thread, shared);
  PairChunks chunks;
  if (!chunks.start(params, order, pair)) return;
  Preparation chunk{.self = self};
  auto stage = [&] { return shared + kSharedStages + chunks.at.slot * kStageBytes; };
  // What is done ahead for a chunk takes its tiles, but neither norms nor their place.
  auto await_tiles = [&] {
    ptx::mbarrier_wait(barriers.raw(chunks.at.slot), chunks.at.parity);
    if (chunks.item.length - chunks.row < kChunk) {
      ptx::mbarrier_wait(barriers.normed(chunks.at.slot), chunks.at.parity);
    }
  };
  chunk.gate_constants = load_gate(params, self, chunks.item.head);
  await_tiles();
  chunk.ahead.set(self, stage());
  chunk.start();
  uint32_t parity = 1;
  bool more = true;
#pragma unroll 1
  while (more) {
    ptx::mbarrier_wait(barriers.normed(chunks.at.slot), chunks.at.parity);
    chunk.stage = stage();
    chunk.tilt = chunk_tilt(chunks.row / kChunk);
    chunk.run([&] {
      const uint32_t k = chunks.k;
      more = chunks.advance(params, order);
      if (!more) return;  // what is read ahead then is not used
      if (chunks.k != k) chunk.gate_constants = load_gate(params, self, chunks.item.head);
      await_tiles();
      chunk.ahead.set(self, stage());
    });
    ptx::mbarrier_wait(barriers.unpartial(pair), parity);
    parity ^= 1;
    store_part(self.warp == 0 ? self.scratch + kScratchL : chunk.stage + kStageTM, self.lane,
               chunk.sum.L);
    store_part(self.scratch + kScratchM + self.warp * kPartialBytes, self.lane, chunk.sum.M);
    ptx::fence_async_shared();
    lanes_arrive(barriers.partial(pair));
  }
}

}  // namespace flash_kda::cuda::sm90
