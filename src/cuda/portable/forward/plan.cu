// Tile plan from cu_seqlens, by one block: offsets clamped to [0, T] and made never to fall by a
// running maximum, first slots by a running sum, then the sequence of each slot by bisection.
#include "cuda/common/check.h"
#include "cuda/portable/forward/launch.h"
#include "cuda/portable/forward/params.h"

namespace flash_kda::cuda::portable {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

struct Largest {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a > b ? a : b; }
};
struct Sum {
  __device__ int64_t operator()(int64_t a, int64_t b) const { return a + b; }
};

// Inclusive scan over the block's threads; `parts` is shared memory for kWarps numbers.
template <typename Combine>
__device__ int64_t scan(int64_t value, int64_t* parts, Combine combine) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffU, value, step);
    if (lane >= step) value = combine(value, other);
  }
  __syncthreads();  // the previous scan has read its parts
  if (lane == kWarp - 1) parts[warp] = value;
  __syncthreads();
  for (int before = 0; before < warp; ++before) value = combine(parts[before], value);
  return value;
}

__device__ int64_t offset_at(const PlanParams& p, int32_t index) {
  const int64_t offset = p.cu_seqlens.dtype == DType::kInt32
                             ? static_cast<const int32_t*>(p.cu_seqlens.data)[index]
                             : static_cast<const int64_t*>(p.cu_seqlens.data)[index];
  return min(max(offset, int64_t{0}), p.plan.tokens);
}

// The sequence whose slots hold `slot`.
__device__ int32_t find_sequence(const TilePlan& plan, int32_t slot) {
  int32_t low = 0;
  int32_t high = plan.sequences - 1;
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    if (plan.first_slots[middle] <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Longest first, equal ones as they come. `lengths` is shared memory for kThreads numbers.
__device__ void sort_sequences(const TilePlan& plan, int64_t* lengths) {
  static_assert(kMostSorted <= kThreads);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t length =
      thread < plan.sequences ? plan.bounds[thread + 1] - plan.bounds[thread] : 0;
  lengths[thread] = length;
  __syncthreads();
  if (thread >= plan.sequences) return;
  int rank = 0;
  for (int other = 0; other < plan.sequences; ++other) {
    rank += lengths[other] > length || (lengths[other] == length && other < thread) ? 1 : 0;
  }
  plan.order[rank] = thread;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  extern __shared__ __align__(128) unsigned char plan_shared[];
  auto* parts = reinterpret_cast<int64_t*>(plan_shared);  // [kWarps]
  auto* ends = parts + kWarps;                            // [kThreads]
  const int thread = static_cast<int>(threadIdx.x);
  int64_t last_end = offset_at(p, 0);
  int64_t slots_before = 0;
  if (thread == 0) {
    p.plan.bounds[0] = last_end;
    p.plan.first_slots[0] = 0;
  }
  for (int32_t first = 0; first < p.plan.sequences; first += kThreads) {
    const int32_t sequence = first + thread;
    const bool exists = sequence < p.plan.sequences;
    const int64_t offset = exists ? offset_at(p, sequence + 1) : 0;
    const int64_t end = scan(max(offset, last_end), parts, Largest());
    ends[thread] = end;
    __syncthreads();
    const int64_t begin = thread == 0 ? last_end : ends[thread - 1];
    const int64_t slots = slots_before + scan(exists ? slots_of(end - begin) : 0, parts, Sum());
    if (exists) {
      p.plan.bounds[sequence + 1] = end;
      p.plan.first_slots[sequence + 1] = static_cast<int32_t>(slots);
    }
    last_end = ends[kThreads - 1];
    __syncthreads();
    if (thread == kThreads - 1) ends[0] = slots;
    __syncthreads();
    slots_before = ends[0];
    __syncthreads();
  }
  if (p.plan.order != nullptr) sort_sequences(p.plan, ends);
  for (int32_t slot = thread; slot < slots_before; slot += kThreads) {
    p.plan.slot_sequences[slot] = find_sequence(p.plan, slot);
  }
}

}  // namespace

Status launch_plan(const PlanParams& params, cudaStream_t stream) {
  constexpr int kSharedBytes = (kWarps + kThreads) * 8;
  plan_kernel<<<1, kThreads, kSharedBytes, stream>>>(params);
  return launch_status("plan_kernel launch");
}

}  // namespace flash_kda::cuda::portable
