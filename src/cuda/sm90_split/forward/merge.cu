// Merge: the states between segments, S_p+1 = S_p Phi_p + S0_p, from the state after the first
// segment of a sequence's part on. Phi and S0 are fp32, and so is the product but for the last
// bits: operands are split into two tf32 parts.
//
// A block: 16 V rows of one sequence and head; a warp: 16 of their columns. Each step replaces S0
// by the state after the segment.
//
// Shared memory: kPhiStages of Phi, columns permuted (phi_swizzle); S [16], rows padded so that
// they are read free of conflicts; barriers full[stage]. Thread 0 fills the stage that a step has
// left, after the barrier that says so.
#include "cuda/common/check.h"
#include "cuda/common/per_device.h"
#include "cuda/portable/forward/inverse.cuh"
#include "cuda/ptx/bulk_linear.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90_split/forward/launch.h"
#include "cuda/sm90_split/forward/launch_dependent.cuh"
#include "cuda/sm90_split/forward/segment.cuh"

namespace flash_kda::cuda::sm90_split {
namespace {

constexpr int kRows = 16;
constexpr int kParts = kHeadDim / kRows;
constexpr int kWarpColumns = 16;
constexpr int kThreads = kHeadDim / kWarpColumns * kWarp;
constexpr int kPhiStages = 3;
constexpr int kPaddedBytes = (kHeadDim + 8) * 4;  // a row of S
constexpr int kPhiRowBytes = kHeadDim * 4;
constexpr int kPhiBytes = kHeadDim * kPhiRowBytes;
constexpr int kStateAt = kPhiStages * kPhiBytes;
constexpr int kBarriersAt = kStateAt + kRows * kPaddedBytes;
constexpr int kSharedBytes = kBarriersAt + kPhiStages * 8;

__device__ __forceinline__ void fetch_phi(const float* phi, uint32_t stage, uint32_t full) {
  ptx::mbarrier_arrive_expect(full, kPhiBytes);
  ptx::load_bulk(stage, phi, kPhiBytes, full);
}

// The warp's columns of S0 as accumulators: [t][2 r + e] is row g + 8 r, column 8 t + 2 c + e.
using Columns = float[kWarpColumns / 8][4];
__device__ __forceinline__ void load_columns(const float* from, Columns& x) {
#pragma unroll
  for (int t = 0; t < kWarpColumns / 8; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 pair = *reinterpret_cast<const float2*>(from + 8 * r * kHeadDim + 8 * t);
      x[t][2 * r] = pair.x;
      x[t][2 * r + 1] = pair.y;
    }
  }
}

__device__ __forceinline__ void store_columns(float* to, uint32_t state, const Columns& x) {
#pragma unroll
  for (int t = 0; t < kWarpColumns / 8; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float2*>(to + 8 * r * kHeadDim + 8 * t) =
          make_float2(x[t][2 * r], x[t][2 * r + 1]);
      ptx::store_shared2(state + 8 * r * kPaddedBytes + 8 * t * 4, x[t][2 * r], x[t][2 * r + 1]);
    }
  }
}

// d += a b to about fp32, in three sums that do not wait for each other.
__device__ __forceinline__ void add_split(Columns (&sum)[3], int t, const float (&high)[4],
                                          const float (&low)[4], float b0, float b1) {
  const float high0 = portable::tf32_part(b0);
  const float high1 = portable::tf32_part(b1);
  ptx::mma_tf32(sum[0][t], high, high0, high1);
  ptx::mma_tf32(sum[1][t], low, high0, high1);
  ptx::mma_tf32(sum[2][t], high, b0 - high0, b1 - high1);
}

// x += S Phi for the warp's columns. `state`: row g, channel 2c; `phi`: row 2c, columns g and 8 + g
// of the warp's.
__device__ __forceinline__ void multiply_phi(uint32_t state, const uint32_t (&phi)[2], Columns& x) {
  Columns sum[3] = {};
#pragma unroll
  for (int k = 0; k < kHeadDim / 8; ++k) {
    const float2 top = ptx::load_shared2(state + k * 32);
    const float2 bottom = ptx::load_shared2(state + k * 32 + 8 * kPaddedBytes);
    const float a[4] = {top.x, top.y, bottom.x, bottom.y};
    float high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = portable::tf32_part(a[i]);
      low[i] = a[i] - high[i];
    }
#pragma unroll
    for (int t = 0; t < kWarpColumns / 8; ++t) {
      const uint32_t at = phi[t] + k * 8 * kPhiRowBytes;
      add_split(sum, t, high, low, ptx::load_shared(at), ptx::load_shared(at + kPhiRowBytes));
    }
  }
#pragma unroll
  for (int t = 0; t < kWarpColumns / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[t][i] += sum[0][t][i] + (sum[1][t][i] + sum[2][t][i]);
  }
}

// The block's rows of a state in global memory.
__device__ __forceinline__ void load_state(const float* from, uint32_t state) {
  for (int i = 2 * threadIdx.x; i < kRows * kHeadDim; i += 2 * kThreads) {
    const float2 x = *reinterpret_cast<const float2*>(from + i);
    ptx::store_shared2(state + i / kHeadDim * kPaddedBytes + i % kHeadDim * 4, x.x, x.y);
  }
}

__global__ void __launch_bounds__(kThreads, 1) merge_kernel(const __grid_constant__ SplitParams p) {
  extern __shared__ __align__(128) unsigned char merge_shared[];
  const uint32_t shared = ptx::shared_address(merge_shared);
  const uint32_t full = shared + kBarriersAt;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPhiStages; ++i) ptx::mbarrier_init(full + 8 * i, 1);
    ptx::fence_async_shared();
  }
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  if (p.window.begin >= p.plan.total_slots()) return;
  const int index = static_cast<int>(blockIdx.x);
  const int first_row = index % kParts * kRows;
  const int head = index / kParts % p.heads;
  const int32_t first_sequence = p.plan.sequence_of(p.window.begin);
  const int32_t sequence = first_sequence + index / kParts / p.heads;
  if (sequence >= p.plan.sequences) return;
  const Part part = part_of(p, first_sequence, sequence);
  const int32_t steps = part.segments(p.segments.chunks) - 2;
  if (steps < 1) return;

  const int64_t stride = int64_t{2} * p.heads * kMatrixElements;  // from segment to segment
  float* map = p.maps + part.first_number * stride + int64_t{2} * head * kMatrixElements;
  load_state(map + first_row * kHeadDim, shared + kStateAt);
  map += stride;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < min(kPhiStages, steps); ++i) {
      fetch_phi(map + i * stride + kMatrixElements, shared + i * kPhiBytes, full + 8 * i);
    }
  }
  const int g = lane >> 2;
  const int c = lane & 3;
  const int column = warp * kWarpColumns;
  float* at = map + (first_row + g) * kHeadDim + column + 2 * c;
  const uint32_t state = shared + kStateAt + g * kPaddedBytes + 2 * c * 4;
  Columns next;
  load_columns(at, next);
  int stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step, at += stride) {
    Columns x;
#pragma unroll
    for (int i = 0; i < kWarpColumns / 8 * 4; ++i) x[i >> 2][i & 3] = next[i >> 2][i & 3];
    if (step + 1 < steps) load_columns(at + stride, next);
    ptx::mbarrier_wait(full + 8 * stage, parity);
    const uint32_t phi = shared + stage * kPhiBytes + 2 * c * kPhiRowBytes;
    const int swizzle = phi_swizzle(2 * c);
    multiply_phi(state,
                 {phi + ((column + g) ^ swizzle) * 4, phi + ((column + 8 + g) ^ swizzle) * 4}, x);
    __syncthreads();
    store_columns(at, state + column * 4, x);
    if (threadIdx.x == 0 && step + kPhiStages < steps) {
      fetch_phi(map + (step + kPhiStages) * stride + kMatrixElements, shared + stage * kPhiBytes,
                full + 8 * stage);
    }
    __syncthreads();
    if (++stage == kPhiStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

}  // namespace

Status launch_merge(const SplitParams& params, int32_t sequences, cudaStream_t stream) {
  static PerDevice prepared;
  FLASH_KDA_RETURN_IF_ERROR(prepared.once([] {
    return to_status(cudaFuncSetAttribute(merge_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          kSharedBytes),
                     "cudaFuncSetAttribute(cuda.sm90_split merge)");
  }));
  const auto blocks = static_cast<unsigned>(int64_t{sequences} * params.heads * kParts);
  return launch_dependent(merge_kernel, blocks, kThreads, kSharedBytes, params, stream);
}

}  // namespace flash_kda::cuda::sm90_split
