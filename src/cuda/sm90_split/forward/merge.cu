// Merge: the states between segments, S_p+1 = S_p Phi_p + S0_p, from the state after the first
// segment of a sequence's part on. Phi and S0 are fp32; the product takes S and Phi as sums of two
// bf16 numbers, which leaves an error of about 2^-18 and the range of fp32.
//
// A cluster of blocks: 16 V rows of one sequence and head; a warp: 8 of their columns, for which it
// holds its columns of Phi in registers, brought from global memory a step ahead. Each step
// replaces S0 by the state after the segment; the warps send it to all blocks of their cluster.
//
// Shared memory: S twice, in turn from step to step, [16 column blocks][32 lanes] of 16 bytes;
// barriers full[2] (the bytes of the other blocks, the own threads' arrivals, and thread 0's that
// expects the bytes). Nobody says that a buffer is free: who sends the next but one state has the
// next from every warp, and all of them have then read this one.
#include "cuda/common/check.h"
#include "cuda/common/launch_dependent.cuh"
#include "cuda/common/per_device.h"
#include "cuda/ptx/bulk_linear.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90_split/forward/launch.h"
#include "cuda/sm90_split/forward/segment.cuh"

namespace flash_kda::cuda::sm90_split {
namespace {

constexpr int kRows = 16;
constexpr int kParts = kHeadDim / kRows;
constexpr int kColumns = 8;  // of a warp
constexpr int kColumnBlocks = kHeadDim / kColumns;
constexpr int kColumnBlockBytes = kWarp * 16;  // of S in shared memory
constexpr int kStateBytes = kColumnBlocks * kColumnBlockBytes;
constexpr int kBarriersAt = 2 * kStateBytes;
constexpr int kSharedBytes = kBarriersAt + 2 * ptx::kMbarrierBytes;
constexpr int kSums = 4;  // that do not wait for each other

// So few blocks get a multiprocessor each, by asking for more than half of its shared memory. They
// would otherwise crowd on those that the kernel before leaves free.
constexpr int kMostSpread = 128;
constexpr int kSpreadBytes = 116 * 1024;

template <int kCluster>
struct Shape {
  static constexpr int kWarps = kColumnBlocks / kCluster;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kRemoteBytes = (kCluster - 1) * kWarps * kColumnBlockBytes;
};

// The warp's columns of a state as accumulators: [2 r + e] is row g + 8 r, column 2 c + e.
using Columns = float[4];

__device__ __forceinline__ void load_columns(const float* from, Columns& x) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float2 pair = *reinterpret_cast<const float2*>(from + 8 * r * kHeadDim);
    x[2 * r] = pair.x;
    x[2 * r + 1] = pair.y;
  }
}

__device__ __forceinline__ void store_columns(float* to, const Columns& x) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    *reinterpret_cast<float2*>(to + 8 * r * kHeadDim) = make_float2(x[2 * r], x[2 * r + 1]);
  }
}

// Two numbers as bf16, and what that leaves of them.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  high = ptx::pack_bf16(x, y);
  low = ptx::pack_bf16(x - ptx::low_bf16(high), y - ptx::high_bf16(high));
}

// The warp's columns of Phi as store_phi has put them: rows 2c, 2c + 8, 2c + 1, 2c + 9 of column g
// for every 16 rows.
using RawPhi = float4[kHeadDim / kRows];

__device__ __forceinline__ void load_phi(const float* from, RawPhi& phi) {
#pragma unroll
  for (int i = 0; i < kHeadDim / kRows; ++i) {
    phi[i] = __ldcg(reinterpret_cast<const float4*>(from) + i * kWarp);
  }
}

// The same as rows 2c, 2c + 1 for every 8 rows.
struct Phi {
  uint32_t high[kColumnBlocks], low[kColumnBlocks];

  __device__ __forceinline__ explicit Phi(const RawPhi& raw) {
#pragma unroll
    for (int i = 0; i < kHeadDim / kRows; ++i) {
      split(raw[i].x, raw[i].z, high[2 * i], low[2 * i]);
      split(raw[i].y, raw[i].w, high[2 * i + 1], low[2 * i + 1]);
    }
  }
};

// x += S Phi for the warp's columns; `state`: the lane's share of S. Eight columns of S are an
// operand of sixteen: first their high parts, then the low ones. Both meet the same rows of Phi.
__device__ __forceinline__ void multiply_phi(uint32_t state, const Phi& phi, Columns& x) {
  float sum[kSums][2][4] = {};
#pragma unroll
  for (int i = 0; i < kColumnBlocks; ++i) {
    const uint4 word = ptx::load_shared_words4(state + i * kColumnBlockBytes);
    const uint32_t a[4] = {word.x, word.y, word.z, word.w};
    ptx::mma_bf16(sum[i % kSums][0], a, phi.high[i], phi.high[i]);
    ptx::mma_bf16(sum[i % kSums][1], a, phi.low[i], phi.low[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float high = (sum[0][0][i] + sum[1][0][i]) + (sum[2][0][i] + sum[3][0][i]);
    const float low = (sum[0][1][i] + sum[1][1][i]) + (sum[2][1][i] + sum[3][1][i]);
    x[i] += high + low;
  }
}

// What a lane of a warp needs to hand its columns of S to the cluster.
template <int kCluster>
struct Sender {
  uint32_t shared;                // of this block
  uint32_t others[kCluster - 1];  // of the others, first the next in rank, lest all send to one
  uint32_t place;                 // of the lane in a buffer

  __device__ __forceinline__ Sender(uint32_t block_shared, int rank, int column_block, int lane)
      : shared(block_shared), place(column_block * kColumnBlockBytes + lane * 16) {
#pragma unroll
    for (int i = 0; i < kCluster - 1; ++i) {
      others[i] = ptx::address_in_block(block_shared, (rank + i + 1) % kCluster);
    }
  }

  __device__ __forceinline__ void send(const Columns& x, int buffer) const {
    uint32_t v[4];  // operand A: high parts of rows g and g + 8, then low parts
    split(x[0], x[1], v[0], v[2]);
    split(x[2], x[3], v[1], v[3]);
    const uint32_t at = buffer * kStateBytes + place;
    const uint32_t full = kBarriersAt + buffer * ptx::kMbarrierBytes;
#pragma unroll
    for (int i = 0; i < kCluster - 1; ++i) {
      ptx::store_async4(others[i] + at, v, others[i] + full);
    }
    ptx::store_shared_words4(shared + at, v);
    ptx::mbarrier_arrive(shared + full);
  }
};

// Barriers of both buffers, known to the cluster; they wait for the first states.
template <int kCluster>
__device__ __forceinline__ void set_up_barriers(uint32_t full) {
  using S = Shape<kCluster>;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(full + i * ptx::kMbarrierBytes, S::kThreads + 1);
      ptx::mbarrier_arrive_expect(full + i * ptx::kMbarrierBytes, S::kRemoteBytes);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
}

template <int kCluster>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(Shape<kCluster>::kThreads, 2)
    merge_kernel(const __grid_constant__ SplitParams p) {
  using S = Shape<kCluster>;
  extern __shared__ __align__(128) unsigned char merge_shared[];
  const uint32_t shared = ptx::shared_address(merge_shared);
  const uint32_t full = shared + kBarriersAt;
  set_up_barriers<kCluster>(full);
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  if (p.window.begin >= p.plan.total_slots()) return;
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  const int index = static_cast<int>(blockIdx.x) / kCluster;
  const int head = index / kParts % p.heads;
  const int32_t first_sequence = p.plan.sequence_of(p.window.begin);
  const int32_t sequence = first_sequence + index / kParts / p.heads;
  if (sequence >= p.plan.sequences) return;
  const Part part = part_of(p, first_sequence, sequence);
  const int32_t steps = part.segments(p.segments.chunks) - 2;
  if (steps < 1) return;

  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int column_block = rank * S::kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int64_t stride = int64_t{2} * p.heads * kMatrixElements;  // from segment to segment
  float* map = p.maps + part.first_number * stride + int64_t{2} * head * kMatrixElements;
  float* at = map + (index % kParts * kRows + (lane >> 2)) * kHeadDim + column_block * kColumns +
              2 * (lane & 3);
  const float* phi_at = map + stride + kMatrixElements + phi_index(0, column_block, lane);
  const Sender<kCluster> sender(shared, rank, column_block, lane);
  Columns x, next;
  RawPhi next_phi;
  load_columns(at, x);
  at += stride;
  load_columns(at, next);
  load_phi(phi_at, next_phi);
  sender.send(x, 0);
#pragma unroll 1
  for (int32_t step = 0;; ++step) {
    // While S is on its way: this step's Phi is split, the next one's loads start.
    const Phi phi(next_phi);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = next[i];
    if (step + 1 < steps) {
      phi_at += stride;
      load_phi(phi_at, next_phi);
      load_columns(at + stride, next);
    }
    const int buffer = step & 1;
    const uint32_t barrier = full + buffer * ptx::kMbarrierBytes;
    ptx::mbarrier_wait(barrier, step >> 1 & 1);
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(barrier, S::kRemoteBytes);
    multiply_phi(shared + buffer * kStateBytes + lane * 16, phi, x);
    if (step + 1 == steps) break;
    sender.send(x, buffer ^ 1);
    store_columns(at, x);
    at += stride;
  }
  store_columns(at, x);
}

template <int kCluster>
Status launch(const SplitParams& params, int64_t clusters, cudaStream_t stream) {
  static PerDevice prepared;
  FLASH_KDA_RETURN_IF_ERROR(prepared.once([] {
    return to_status(
        cudaFuncSetAttribute(merge_kernel<kCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSpreadBytes),
        "cudaFuncSetAttribute(cuda.sm90_split merge)");
  }));
  const int64_t blocks = clusters * kCluster;
  return launch_dependent("cuda.sm90_split merge", merge_kernel<kCluster>,
                          static_cast<unsigned>(blocks), Shape<kCluster>::kThreads,
                          blocks <= kMostSpread ? kSpreadBytes : kSharedBytes, params, stream);
}

}  // namespace

Status launch_merge(const SplitParams& params, int32_t sequences, cudaStream_t stream) {
  const int64_t pairs = int64_t{sequences} * params.heads;
  switch (merge_cluster(pairs)) {
    case 8:
      return launch<8>(params, pairs * kParts, stream);
    case 4:
      return launch<4>(params, pairs * kParts, stream);
    default:
      return launch<2>(params, pairs * kParts, stream);
  }
}

}  // namespace flash_kda::cuda::sm90_split
