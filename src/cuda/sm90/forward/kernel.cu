// The forward pass on Hopper, one CTA per sequence and head (in turn, where there are more of those
// than SMs). With chunks of C = 32 tokens and the notation of docs/algorithm.md:
//
//   X = V^T - S kd^T      R = X T^T      O^T = S qd^T + R M^T      S = S d + R kr
//
// tiles   q, k, g -> qd, kd, kr [32 x 128] fp16; T, M [32 x 32] fp16; d [128] fp32
//         S [128 x 128] fp32 in registers, 64 V rows per chain warpgroup; X, R, O [64 x 32]
// shared  6 stages of 29 KB (q, k, g become operands in place; T | M; d), 2 tiles of v, 2 tiles of
//         out, scratch of the preparation pairs, barriers (config.h)
// roles   warpgroups 0, 1  chain, V half 0 and 1          152 registers (recurrence.cuh)
//         warpgroup  2     2 pairs of preparation warps   160 (prepare_role.cuh)
//         warpgroup  3     service                         48: warp 0 norms (norms.cuh), 1 copies
//                          (copy.cuh), 2 and 3 finish T and M of a pair each (finish_role.cuh)
// barriers: the table in barriers.cuh
#include "cuda/common/launch_dependent.cuh"
#include "cuda/common/per_device.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/forward/copy.cuh"
#include "cuda/sm90/forward/finish_role.cuh"
#include "cuda/sm90/forward/kernel.h"
#include "cuda/sm90/forward/norms.cuh"
#include "cuda/sm90/forward/prepare_role.cuh"
#include "cuda/sm90/forward/recurrence.cuh"

namespace flash_kda::cuda::sm90 {
namespace {

__device__ __forceinline__ void service_role(const Params& params, const uint16_t* order,
                                             uint32_t shared, Barriers barriers, int thread) {
  const int warp = __shfl_sync(~0U, thread >> 5, 0), lane = thread & 31;
  if (warp == 0) {
    norm_role(params, order, shared, barriers, lane);
  } else if (warp == 1) {
    copy_role(params, order, shared, barriers, lane);
  } else {
    finish_role(params, order, shared, barriers, warp - 2, lane);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = ptx::shared_address(memory);
  const int thread = threadIdx.x;
  const Barriers barriers{shared + kSharedBarriers};
  uint16_t* order = reinterpret_cast<uint16_t*>(memory + kSharedOrder);
  // One thread waits for all: what was written is visible to the whole grid then, and nobody
  // touches global memory before the barrier. None lets the next kernel start. Otherwise the
  // compiler runs the chain's products one at a time.
  if (thread == 0) {
    barriers.init();
    ptx::wait_for_previous_kernels();
  }
  if (thread < 4) reinterpret_cast<uint32_t*>(memory + kSharedZeros)[thread] = 0;
  if (params.sort) {
    __syncthreads();
    static_assert(sizeof(int32_t) * kMaxSorted <= kPairs * kScratchBytes);
    sort_sequences(params, order, reinterpret_cast<int32_t*>(memory + kSharedScratch));
  }
  __syncthreads();
  const int group = thread / kWarpgroup;
  if (group < kHalves) {
    ptx::take_registers<kChainRegisters>();
    chain_role(params, order, shared);
  } else if (thread < kChainThreads + kPrepareThreads) {
    ptx::take_registers<kPrepareRegisters>();
    prepare_role(params, order, shared, barriers, thread - kChainThreads);
  } else {
    ptx::give_registers<kServiceRegisters>();
    service_role(params, order, shared, barriers, thread % kWarpgroup);
  }
}

}  // namespace

const void* forward_entry() { return reinterpret_cast<const void*>(forward_kernel); }

Status launch_forward(const Params& params, uint32_t ctas, cudaStream_t stream) {
  static PerDevice attributes;
  FLASH_KDA_RETURN_IF_ERROR(attributes.once([] {
    return to_status(cudaFuncSetAttribute(
                         forward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
                     "cudaFuncSetAttribute(cuda.sm90 forward)");
  }));
  return launch_dependent("cuda.sm90 forward", forward_kernel, ctas, kThreads, kSharedBytes, params,
                          stream);
}

}  // namespace flash_kda::cuda::sm90
