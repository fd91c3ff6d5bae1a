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

// The gate's constants of a head; the biases go to the pair's scratch, each warp its channels.
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
    ptx::store_shared(self.scratch + kScratchBias + 4 * channel, bias * gate.gate_scale);
  }
  __syncwarp();
  return gate;
}

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

// Rows past the end of the sequence hold somebody else's tokens: k = q = 0 and no decay instead,
// in this warp's channels.
__device__ __forceinline__ void blank_tail(const PrepareLane& self, uint32_t stage, int32_t rows) {
  constexpr uint32_t kMinusInfinity = 0xFF80FF80;  // as the raw gate
  for (int row = rows + (self.lane >> 3); row < kChunk; row += 4) {
    const uint32_t at = stage + row * kRowBytes + 16 * (self.lane & 7);
    ptx::store_shared_words4(at + kStageK + self.warp * kStageHalf, 0);
    ptx::store_shared_words4(at + kStageQ + self.warp * kStageHalf, 0);
    ptx::store_shared_words4(at + kStageG + self.warp * kHalfTileBytes, kMinusInfinity);
  }
  __syncwarp();
}

// One chunk: the stage's raw tiles become operands. The warps of the pair take turns with T.
__device__ __forceinline__ void prepare_chunk(const PrepareLane& self, const HeadGate& gate,
                                              uint32_t stage, float beta, float tilt,
                                              bool makes_t) {
  Preparation chunk{.self = self, .gate_constants = gate, .tilt = tilt, .stage = stage};
  chunk.run();
  if (makes_t) {
    hand_over(self.scratch + kScratchM, self.lane, chunk.sum.M);
  } else {
    hand_over(self.scratch + kScratchL, self.lane, chunk.sum.L);
  }
  pair_sync(self);
  if (makes_t) {
    finish_t(chunk, beta);
  } else {
    finish_m(chunk);
  }
  ptx::fence_async_shared();
}

__device__ __forceinline__ void prepare_role(const Params& params, const uint16_t* order,
                                             uint32_t shared, Barriers barriers, int thread) {
  const int pair = thread / 64;
  const PrepareLane self = prepare_lane(
      pair, thread, shared + kSharedScratch + pair * kScratchBytes, shared + kSharedZeros);
  StageCursor at;
  int turn = 0;  // of the pairs
  bool makes_t = ((self.warp ^ (pair >> 1)) & 1) != 0;
  Item item;
#pragma unroll 1
  for (uint32_t k = 0; nth_item(params, order, k, item); ++k) {
    bool fresh = true;
    HeadGate gate{};
    uint32_t logit = 0;
#pragma unroll 1
    for (int32_t row = 0; row < item.length; row += kChunk, at.advance()) {
      const bool mine = turn == pair;
      turn = turn + 1 == kPairs ? 0 : turn + 1;
      if (!mine) {
        // Parity can't tell phases two apart: see every phase of a stage that pairs share.
        if (kStages % kPairs != 0) ptx::mbarrier_wait(barriers.raw(at.slot), at.parity);
        continue;
      }
      if (fresh) {
        gate = load_gate(params, self, item.head);
        logit = fetch_beta(params, item, row, self.lane);
        fresh = false;
      }
      const float beta = beta_value(params, logit);
      logit = fetch_beta(params, item, row + kPairs * kChunk, self.lane);
      const uint32_t stage = shared + kSharedStages + at.slot * kStageBytes;
      ptx::mbarrier_wait(barriers.raw(at.slot), at.parity);
      if (item.length - row < kChunk) {
        blank_tail(self, stage, item.length - row);
      }
      prepare_chunk(self, gate, stage, beta, chunk_tilt(row / kChunk), makes_t);
      makes_t = !makes_t;
      ptx::mbarrier_arrive(barriers.full(at.slot));
    }
  }
}

}  // namespace flash_kda::cuda::sm90
