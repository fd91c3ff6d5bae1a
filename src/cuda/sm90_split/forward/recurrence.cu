// Recurrence: chains over the chunks of segments (chain.cuh), in two kernels.
//
//   maps_kernel        where a sequence is cut: of the first segment, the state after it; of the
//                      others but the last the map, which is V rows from a state of zeros, and the
//                      rows of the identity without values. No output
//   recurrence_kernel  all segments with output, from the states that the merge has made; or
//                      shared_recurrence_kernel, the same by clusters
//
// A block: kGroups chain warpgroups of 64 rows each, and one whose first warp brings records by
// bulk copies (a warpgroup, because register files belong to a quarter of a multiprocessor).
// Results of a row do not depend on this division.
//
// Shared memory: stages of a record each; then, per chain warp, its tiles of v and out; barriers.
// Who waits for whom: the chain for full[stage] (bytes have come); the producer for empty[stage]
// (all chain warps are through with the record). Tiles of v and out belong to one warp alone.
//
// Where preparation is over, the two blocks of one group that have the same segment and head are a
// cluster (kShared; beside preparation the multiprocessors left may not be pairs): each producer
// brings half of every record, to both. It tells the other one that its own stage is free, and
// waits for agreed[stage], which the other one's arrival completes. A block waits for all that
// comes from the other one, its chain for the bytes and its producer for the arrivals, and so may
// end when it is through.
//
// Beside preparation (ready flags; recurrence_kernel only), the first thread of a block waits for
// the flag of its first record and the producer for those of the next ones, while prepare.cu, which
// says more, waits for nobody. The last block ends after preparation has, so the kernel does.
#include "cuda/common/check.h"
#include "cuda/common/launch_dependent.cuh"
#include "cuda/common/per_device.h"
#include "cuda/ptx/bulk_linear.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90_split/forward/chain.cuh"
#include "cuda/sm90_split/forward/launch.h"
#include "cuda/sm90_split/forward/segment.cuh"
#include "cuda/sm90_split/forward/shared_memory.cuh"

namespace flash_kda::cuda::sm90_split {
namespace {

constexpr int kChainRegisters = 240;
constexpr int kProducerRegisters = 24;
constexpr int kWarpTileBytes = (kValueStages + 1) * kValueTileBytes;

template <int kGroups>
struct Block {
  static constexpr int kChainWarps = kGroups * kGroupWarps;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  static constexpr int kTiles = kStages * kStageBytes;
  static constexpr int kBarriers = kTiles + kChainWarps * kWarpTileBytes;
  static constexpr int kSharedBytes = kBarriers + 3 * kStages * 8;
  static_assert(kWarpgroup * (kGroups * kChainRegisters + kProducerRegisters) <= 65536);
  static_assert(kSharedBytes <= 227 * 1024);
};

// The state of a sequence without tokens: the initial one, bit for bit if the dtypes agree.
// `count` numbers from `begin` on, by the whole block.
__device__ __forceinline__ void pass_state(const SplitParams& p, int64_t begin, int count) {
  if (p.final_state.data == nullptr) return;
  const bool given = p.initial_state.data != nullptr;
  if (given && p.initial_state.dtype == p.final_state.dtype) {
    const int numbers = p.final_state.dtype == DType::kFloat32 ? 2 : 4;  // in 8 bytes
    const auto* from = static_cast<const uint2*>(p.initial_state.data) + begin / numbers;
    auto* to = static_cast<uint2*>(p.final_state.data) + begin / numbers;
    for (int i = threadIdx.x; i < count / numbers; i += blockDim.x) to[i] = from[i];
    return;
  }
  for (int i = 2 * threadIdx.x; i < count; i += 2 * blockDim.x) {
    const float2 x = given ? load_pair(p.initial_state, begin + i) : make_float2(0.0F, 0.0F);
    store_pair(p.final_state, begin + i, x.x, x.y);
  }
}

// Of the segment's first chunk, in the window's order.
__device__ __forceinline__ int64_t first_record(const SplitParams& p, const Segment& segment,
                                                int head) {
  const int64_t slot = segment.part.span.first_slot + segment.begin - p.window.begin;
  return slot * p.heads + head;
}

__device__ __forceinline__ void await_record(const SplitParams& p, int64_t record) {
  while (ptx::acquire_flag(p.ready + record) == 0) {
  }
}

// Beside preparation: until the first record is there, so that all that the block reads and writes
// from now on comes after everything that preparation came after.
__device__ __forceinline__ void await_first_record(const SplitParams& p, const Segment& segment,
                                                   int head) {
  if (p.ready == nullptr) return;
  if (threadIdx.x == 0) await_record(p, first_record(p, segment, head));
  __syncthreads();
}

// How many of `most` chunks, the first of them `record`, have their records, looking 32 ahead;
// waits until one has. By a warp.
__device__ __forceinline__ int32_t await_records(const SplitParams& p, int64_t record,
                                                 int32_t most) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (p.ready == nullptr) return most;
  const uint32_t* flag = p.ready + record + static_cast<int64_t>(lane) * p.heads;
  uint32_t there;
  do {
    there = __ballot_sync(0xffffffffU, lane < most && ptx::acquire_flag(flag) != 0);
  } while ((there & 1) == 0);
  __syncwarp();
  ptx::fence_async_global();
  return there == 0xffffffffU ? kWarp : __ffs(static_cast<int>(~there)) - 1;
}

__device__ __forceinline__ uint32_t agreed(const Ring& ring, int slot) {
  return ring.full(2 * ring.count + slot);
}

// One thread's: its half of a record to both blocks of a cluster, when both have room.
__device__ __forceinline__ void share_record(const unsigned char* record, const Ring& ring,
                                             const Cursor& cursor) {
  constexpr int kPart = kRecordBytes / 2;
  static_assert(kPart % 128 == 0);
  const int rank = static_cast<int>(blockIdx.x) % 2;
  ptx::mbarrier_arrive_in_block(ptx::address_in_block(agreed(ring, cursor.slot), rank ^ 1));
  ptx::mbarrier_wait(agreed(ring, cursor.slot), cursor.parity);
  ptx::load_bulk_multicast(ring.stage(cursor.slot) + rank * kPart, record + rank * kPart, kPart,
                           ring.full(cursor.slot), 3);
}

// Brings the records of a segment, without qd if there is no output. By a warp.
template <bool kOutput, bool kShared>
__device__ __forceinline__ void produce(const SplitParams& p, const Segment& segment, int head,
                                        const Ring& ring) {
  int64_t number = first_record(p, segment, head);
  constexpr uint32_t kBytes = kRecordBytes - (kOutput ? 0 : kHalves * kPanelBytes);
  Cursor cursor;
  int32_t known = segment.begin;  // chunks before it have their records
#pragma unroll 1
  for (int32_t chunk = segment.begin; chunk < segment.end; ++chunk, number += p.heads) {
    if (!kShared && chunk == known) known += await_records(p, number, segment.end - chunk);
    const unsigned char* record = p.records + number * kRecordBytes;
    const uint32_t stage = ring.stage(cursor.slot);
    const uint32_t full = ring.full(cursor.slot);
    ptx::mbarrier_wait(ring.empty(cursor.slot), cursor.parity ^ 1);
    if (threadIdx.x % kWarp == 0) {
      ptx::mbarrier_arrive_expect(full, kBytes);
      if constexpr (kShared) {
        share_record(record, ring, cursor);
      } else if constexpr (kOutput) {
        ptx::load_bulk(stage, record, kBytes, full);
      } else {
        for (int half = 0; half < kHalves; ++half) {
          const int kd = kRecordKd + half * kHalfBytes;
          ptx::load_bulk(stage + kd, record + kd, kPanelBytes, full);
        }
        ptx::load_bulk(stage + kRecordKr, record + kRecordKr, kRecordBytes - kRecordKr, full);
      }
    }
    __syncwarp();
    cursor.advance(ring.count);
  }
}

template <int kGroups, bool kShared>
__device__ __forceinline__ Ring make_ring(uint32_t shared) {
  using B = Block<kGroups>;
  const Ring ring = {shared, shared + B::kBarriers, kStages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < ring.count; ++i) {
      ptx::mbarrier_init(ring.full(i), 1);
      ptx::mbarrier_init(ring.empty(i), B::kChainWarps);
      if constexpr (kShared) ptx::mbarrier_init(agreed(ring, i), 1);
    }
    ptx::fence_async_shared();
    if constexpr (kShared) ptx::fence_mbarrier_init();
  }
  if constexpr (kShared) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
  return ring;
}

template <int kGroups>
__device__ __forceinline__ WarpTokens make_tokens(const SplitParams& p, const Segment& segment,
                                                  int head, int row, uint32_t shared) {
  const portable::SequenceSlots& span = segment.part.span;
  WarpTokens tokens;
  tokens.lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t column = static_cast<int64_t>(head) * kHeadDim + row + 8 * (tokens.lane & 1);
  tokens.v = static_cast<const uint16_t*>(p.v.data) + span.batch * p.v.batch_stride +
             span.begin * p.v.token_stride + column;
  tokens.out = static_cast<uint16_t*>(p.out.data) + span.batch * p.out.batch_stride +
               span.begin * p.out.token_stride + column;
  tokens.v_stride = p.v.token_stride;
  tokens.out_stride = p.out.token_stride;
  tokens.length = span.length;
  tokens.begin = segment.begin;
  tokens.tiles = shared + Block<kGroups>::kTiles + threadIdx.x / kWarp * kWarpTileBytes;
  return tokens;
}

__device__ __forceinline__ float* map_of(const SplitParams& p, int64_t number, int head,
                                         int which) {
  return p.maps + ((number * p.heads + head) * 2 + which) * kMatrixElements;
}

// S before a sequence's part in the window.
__device__ __forceinline__ void initial_state(const SplitParams& p, const Segment& segment,
                                              int head, int64_t sequence_head, int index,
                                              StateRows& state) {
  if (segment.begin > 0) {
    load_rows({const_cast<float*>(p.carry_in), DType::kFloat32},
              static_cast<int64_t>(head) * kMatrixElements + index, state);
  } else if (p.initial_state.data != nullptr) {
    load_rows(p.initial_state, sequence_head * kMatrixElements + index, state);
  } else {
    constant_rows(state, 0.0F);
  }
}

// S before a segment. The final state may take the place of the initial one while other segments of
// the sequence run, so the first of several has a copy of it.
__device__ __forceinline__ void begin_state(const SplitParams& p, const Segment& segment, int head,
                                            int64_t sequence_head, int index, StateRows& state) {
  if (segment.first() && segment.last()) {
    initial_state(p, segment, head, sequence_head, index, state);
  } else {
    const bool first = segment.first();
    load_rows({map_of(p, segment.number - (first ? 0 : 1), head, first ? 1 : 0), DType::kFloat32},
              index, state);
  }
}

// S after a sequence or, where the window cuts it, for the next window.
__device__ __forceinline__ void end_state(const SplitParams& p, const Segment& segment, int head,
                                          int64_t sequence_head, int index, const StateRows& state,
                                          const RowScale& scale) {
  if (!segment.last()) return;
  if (segment.end < segment.part.span.slots) {
    store_rows({p.carry_out, DType::kFloat32}, static_cast<int64_t>(head) * kMatrixElements + index,
               state, scale.inverse);
  } else if (p.final_state.data != nullptr) {
    store_rows(p.final_state, sequence_head * kMatrixElements + index, state, scale.inverse);
  }
}

template <int kGroups, bool kShared>
__device__ __forceinline__ void recur(const SplitParams& p, const Ring& ring) {
  constexpr int kParts = kHeadDim / (kGroups * kGroupRows);
  const int index = static_cast<int>(blockIdx.x);
  const int head = index / kParts % p.heads;
  const Segment segment = find_segment(p, index / kParts / p.heads);
  if (segment.end == segment.begin) return;
  const int64_t sequence_head = static_cast<int64_t>(segment.part.sequence) * p.heads + head;
  const int first_row = index % kParts * kGroups * kGroupRows;
  if (segment.part.span.length == 0) {
    if constexpr (!kShared) ptx::wait_for_previous_kernels();
    pass_state(p, (sequence_head * kHeadDim + first_row) * kHeadDim,
               kGroups * kGroupRows * kHeadDim);
    return;
  }
  if constexpr (!kShared) await_first_record(p, segment, head);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp >= Block<kGroups>::kChainWarps) {
    ptx::give_registers<kProducerRegisters>();
    if (warp == Block<kGroups>::kChainWarps) produce<true, kShared>(p, segment, head, ring);
    return;
  }
  ptx::take_registers<kChainRegisters>();
  const int row = first_row + 16 * warp;
  const WarpTokens tokens = make_tokens<kGroups>(p, segment, head, row, ring.stages);
  const int at = matrix_index(row, tokens.lane);
  Chain<true> chain;
  begin_state(p, segment, head, sequence_head, at, chain.state);
  run_chain(chain, tokens, segment.end, ring, p.scale);
  end_state(p, segment, head, sequence_head, at, chain.state, chain.scale);
}

template <int kGroups, bool kShared>
__device__ __forceinline__ void recurrence(const SplitParams& p) {
  extern __shared__ __align__(1024) unsigned char recurrence_shared[];
  const Ring ring = make_ring<kGroups, kShared>(ptx::shared_address(recurrence_shared));
  if (kShared || p.ready == nullptr) {
    ptx::wait_for_previous_kernels();
  } else {
    __threadfence();  // what the L1 cache may hold is too old
  }
  recur<kGroups, kShared>(p, ring);
  ptx::let_next_kernel_start();
  if (!kShared && blockIdx.x + 1 == gridDim.x) ptx::wait_for_previous_kernels();
}

template <int kGroups>
__global__ void __launch_bounds__(Block<kGroups>::kThreads, 1)
    recurrence_kernel(const __grid_constant__ SplitParams p) {
  recurrence<kGroups, false>(p);
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Block<1>::kThreads, 1)
    shared_recurrence_kernel(const __grid_constant__ SplitParams p) {
  recurrence<1, true>(p);
}

template <int kGroups>
__global__ void __launch_bounds__(Block<kGroups>::kThreads, 1)
    maps_kernel(const __grid_constant__ SplitParams p) {
  extern __shared__ __align__(1024) unsigned char maps_shared[];
  const uint32_t shared = ptx::shared_address(maps_shared);
  const Ring ring = make_ring<kGroups, false>(shared);
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  constexpr int kParts = 2 * kHeadDim / (kGroups * kGroupRows);
  const int index = static_cast<int>(blockIdx.x);
  const int head = index / kParts % p.heads;
  const Segment segment = find_segment(p, index / kParts / p.heads);
  if (segment.end == segment.begin || segment.last()) return;
  if (segment.first() && index % kParts * kGroups * kGroupRows >= kHeadDim) return;
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp >= Block<kGroups>::kChainWarps) {
    ptx::give_registers<kProducerRegisters>();
    if (warp == Block<kGroups>::kChainWarps) produce<false, false>(p, segment, head, ring);
    return;
  }
  ptx::take_registers<kChainRegisters>();
  const int all_rows = index % kParts * kGroups * kGroupRows + 16 * warp;
  const int which = all_rows / kHeadDim;  // 0: V rows; 1: the identity's
  const int row = all_rows % kHeadDim;
  WarpTokens tokens = make_tokens<kGroups>(p, segment, head, row, shared);
  const int at = matrix_index(row, tokens.lane);
  Chain<false> chain;
  if (which == 1) {
    tokens.length = 0;
    identity_rows(row, tokens.lane, chain.state);
  } else if (segment.first()) {
    constexpr float kAsItIs[2] = {1.0F, 1.0F};
    const int64_t sequence_head = static_cast<int64_t>(segment.part.sequence) * p.heads + head;
    initial_state(p, segment, head, sequence_head, at, chain.state);
    store_rows({map_of(p, segment.number, head, 1), DType::kFloat32}, at, chain.state, kAsItIs);
  } else {
    constant_rows(chain.state, 0.0F);
  }
  run_chain(chain, tokens, segment.end, ring, 0.0F);
  float* map = map_of(p, segment.number, head, which);
  if (which == 0) {
    store_rows({map, DType::kFloat32}, at, chain.state, chain.scale.inverse);
  } else {
    store_phi(map, row, tokens.lane, chain.state, chain.scale.inverse);
  }
}

template <int kGroups>
Status launch(void (*kernel)(SplitParams), PerDevice& prepared, int parts,
              const SplitParams& params, cudaStream_t stream) {
  constexpr int kBytes = Block<kGroups>::kSharedBytes;
  FLASH_KDA_RETURN_IF_ERROR(prepared.once([kernel] { return allow_shared(kernel, kBytes); }));
  const auto blocks = static_cast<unsigned>(int64_t{params.segments.most} * params.heads * parts);
  return launch_dependent("cuda.sm90_split recurrence", kernel, blocks, Block<kGroups>::kThreads,
                          kBytes, params, stream);
}

}  // namespace

Status launch_maps(const SplitParams& params, cudaStream_t stream) {
  static PerDevice prepared;
  return launch<2>(maps_kernel<2>, prepared, 2, params, stream);
}

Status launch_recurrence(const SplitParams& params, int groups, cudaStream_t stream) {
  static PerDevice prepared[3];
  if (groups == 2) return launch<2>(recurrence_kernel<2>, prepared[1], 1, params, stream);
  return params.ready == nullptr
             ? launch<1>(shared_recurrence_kernel, prepared[2], 2, params, stream)
             : launch<1>(recurrence_kernel<1>, prepared[0], 2, params, stream);
}

}  // namespace flash_kda::cuda::sm90_split
