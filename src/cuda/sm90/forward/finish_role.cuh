// The role of a finishing warp: T and M of the chunks of its pair of preparation warps.
#pragma once

#include "cuda/common/tilt.cuh"
#include "cuda/sm90/forward/barriers.cuh"
#include "cuda/sm90/forward/inverse.cuh"
#include "cuda/sm90/forward/schedule.cuh"

namespace flash_kda::cuda::sm90 {

__device__ __forceinline__ float sigmoid(float x) {
  return ptx::rcp_approx(1.0F + ptx::exp2_approx(-kLog2E * x));
}

// The beta logit of the lane's token of the chunk at `row`, 0 past the end, as it lies in memory:
// it is fetched a chunk ahead, and converting it would wait for it.
__device__ __forceinline__ uint32_t fetch_beta(const Params& params, const Item& item, int32_t row,
                                               int lane) {
  if (row + lane >= item.length) return 0;
  const int64_t index = item.batch * params.beta_batch_stride +
                        static_cast<int64_t>(item.begin + row + lane) * params.beta_token_stride +
                        item.head * params.beta_head_stride;
  return params.beta_bf16 ? __ldg(static_cast<const uint16_t*>(params.beta) + index)
                          : __ldg(static_cast<const uint32_t*>(params.beta) + index);
}

__device__ __forceinline__ float beta_value(const Params& params, uint32_t logit) {
  return sigmoid(params.beta_bf16 ? ptx::low_bf16(logit) : __uint_as_float(logit));
}

__device__ __forceinline__ void finish_role(const Params& params, const uint16_t* order,
                                            uint32_t shared, Barriers barriers, int pair,
                                            int lane) {
  Finish self{.lane = lane,
              .stage = 0,
              .scratch = shared + kSharedScratch + pair * kScratchBytes,
              .tilt = 1.0F};
  StageCursor at;
  int turn = 0;  // of the pairs
  uint32_t parity = 0;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
    bool fresh = true;
    uint32_t logit = 0;
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      const bool mine = turn == pair;
      turn = turn + 1 == kPairs ? 0 : turn + 1;
      if (!mine) continue;
      if (fresh) logit = fetch_beta(params, item, row, lane);
      fresh = false;
      const float beta = beta_value(params, logit);
      logit = fetch_beta(params, item, row + kPairs * kChunk, lane);
      self.stage = shared + kSharedStages + at.slot * kStageBytes;
      self.tilt = chunk_tilt(row / kChunk);
      ptx::mbarrier_wait(barriers.partial(pair), parity);
      parity ^= 1;
      finish_t(self, beta);
      finish_m(self);
      ptx::fence_async_shared();
      lanes_arrive(barriers.unpartial(pair), barriers.full(at.slot));
    }
  }
}

}  // namespace flash_kda::cuda::sm90
