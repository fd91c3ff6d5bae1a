// Recurrence: through the chunks of one sequence and head with the state in registers.
//
// A block to a part of a head's V rows, a warp to 16 of them (recurrence_steps.cuh). Rows never
// meet, so results do not depend on how many parts there are: 8, 4, 2 or 1, as many as it takes to
// fill the device.
//
// Shared memory: kStages stages, each a record (record.cuh) and behind it a tile of v for every
// warp, which becomes the tile of out. Stage of chunk j: j % kStages.
//
// Who waits for whom: each thread waits for its own copies of chunk j, then the block's barrier
// makes all copies visible and says that chunk j - 1 is consumed; only then its stage is filled
// again, with chunk j - 1 + kStages. Tiles of v and out belong to one warp, copies included.
#include "cuda/common/check.h"
#include "cuda/common/per_device.h"
#include "cuda/portable/forward/launch.h"
#include "cuda/portable/forward/numbers.cuh"
#include "cuda/portable/forward/params.h"
#include "cuda/portable/forward/record.cuh"
#include "cuda/portable/forward/recurrence_steps.cuh"
#include "cuda/portable/forward/row_scale.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/ptx/shared.cuh"

namespace flash_kda::cuda::portable {
namespace {

constexpr int stage_bytes(int warps) { return kRecordBytes + warps * kValueTileBytes; }

// What a block works on, and where its warp is in it.
struct Part {
  SequenceSlots span;
  int32_t sequence = 0;
  int head = 0;
  int32_t begin = 0, end = 0;  // chunks of the sequence in this window
  int warp = 0, lane = 0, g = 0, c = 0;
  int row = 0;  // first V row of the warp
};

// Index of (row + g, channel 2c) in a state [N, H, V, K].
__device__ __forceinline__ int64_t state_index(int64_t sequence_head, const Part& at) {
  return (sequence_head * kHeadDim + at.row + at.g) * kHeadDim + 2 * at.c;
}

__device__ __forceinline__ void load_state(const Dense& from, int64_t index, RowState& state) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 x = load_pair(from, index + r * 8 * kHeadDim + 8 * j);
      state[j][2 * r] = x.x;
      state[j][2 * r + 1] = x.y;
    }
  }
}

__device__ __forceinline__ void store_state(const Dense& to, int64_t index, const RowState& state,
                                            const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_pair(to, index + r * 8 * kHeadDim + 8 * j, state[j][2 * r] * factor[r],
                 state[j][2 * r + 1] * factor[r]);
    }
  }
}

// The state of a sequence without tokens: the initial one, bit for bit if the dtypes agree.
template <int kWarps>
__device__ __forceinline__ void pass_state(const RecurrenceParams& p, int64_t sequence_head,
                                           int first_row) {
  if (p.final_state.data == nullptr) return;
  const int64_t begin = (sequence_head * kHeadDim + first_row) * kHeadDim;
  for (int i = 2 * threadIdx.x; i < kWarps * kWarpRows * kHeadDim; i += 2 * kWarp * kWarps) {
    if (p.initial_state.data == nullptr) {
      store_pair(p.final_state, begin + i, 0.0F, 0.0F);
    } else if (p.initial_state.dtype != p.final_state.dtype) {
      const float2 x = load_pair(p.initial_state, begin + i);
      store_pair(p.final_state, begin + i, x.x, x.y);
    } else if (p.initial_state.dtype == DType::kFloat32) {
      *reinterpret_cast<uint2*>(static_cast<float*>(p.final_state.data) + begin + i) =
          *reinterpret_cast<const uint2*>(static_cast<const float*>(p.initial_state.data) + begin +
                                          i);
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.final_state.data) + begin + i) =
          *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.initial_state.data) +
                                             begin + i);
    }
  }
}

// Queues this thread's share of the copies of a chunk.
template <int kWarps>
__device__ __forceinline__ void fetch(const RecurrenceParams& p, const Part& at, int32_t chunk,
                                      uint32_t stage) {
  constexpr int kThreads = kWarp * kWarps;
  constexpr int kCopies = kRecordBytes / 16;
  const int64_t slot = at.span.first_slot + chunk - p.window.begin;
  const unsigned char* record =
      p.records + (slot * p.heads + at.head) * kRecordBytes + threadIdx.x * 16;
  const uint32_t to = stage + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < (kCopies + kThreads - 1) / kThreads; ++i) {
    if ((i + 1) * kThreads <= kCopies || i * kThreads + threadIdx.x < kCopies) {
      ptx::copy_async16(to + i * kThreads * 16, record + i * kThreads * 16);
    }
  }
  const uint32_t tile = stage + kRecordBytes + at.warp * kValueTileBytes;
  const int64_t first = static_cast<int64_t>(chunk) * kChunk;
  const int half = at.lane & 1;
  const auto* v = static_cast<const uint16_t*>(p.v.data) + at.span.batch * p.v.batch_stride +
                  (at.span.begin + first) * p.v.token_stride + at.head * kHeadDim + at.row +
                  8 * half;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 16 * i + (at.lane >> 1);
    const bool exists = first + token < at.span.length;
    ptx::copy_async16_or_zero(tile + value_offset(token, half),
                              v + (exists ? token : 0) * p.v.token_stride, exists);
  }
}

// Rounds O^T, turns it round in the warp's tile and writes the rows of tokens that exist.
__device__ __forceinline__ void store_out(const RecurrenceParams& p, const Part& at, int32_t chunk,
                                          uint32_t tile, const RowTokens& o,
                                          const RowScale& scale) {
  const float factor[2] = {p.scale * scale.inverse[0], p.scale * scale.inverse[1]};
  __syncwarp();  // v has been read
#pragma unroll
  for (int t = 0; t < 4; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t word = ptx::transpose_matrix(
          ptx::pack_bf16(o[t][2 * r] * factor[r], o[t][2 * r + 1] * factor[r]));
      ptx::store_shared(tile + value_offset(8 * t + at.g, r) + 4 * at.c, __uint_as_float(word));
    }
  }
  __syncwarp();
  const int64_t first = static_cast<int64_t>(chunk) * kChunk;
  const int half = at.lane & 1;
  auto* out = static_cast<uint16_t*>(p.out.data) + at.span.batch * p.out.batch_stride +
              (at.span.begin + first) * p.out.token_stride + at.head * kHeadDim + at.row + 8 * half;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 16 * i + (at.lane >> 1);
    const uint4 x = ptx::load_shared_words4(tile + value_offset(token, half));
    if (first + token < at.span.length) {
      *reinterpret_cast<uint4*>(out + token * p.out.token_stride) = x;
    }
  }
}

template <int kWarps>
__device__ __forceinline__ void run_part(const RecurrenceParams& p, const Part& at,
                                         uint32_t shared) {
  constexpr int kStageBytes = stage_bytes(kWarps);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (at.begin + i < at.end) fetch<kWarps>(p, at, at.begin + i, shared + i * kStageBytes);
    ptx::copy_async_commit();
  }

  const int64_t sequence_head = static_cast<int64_t>(at.sequence) * p.heads + at.head;
  RowState state = {};
  RowScale scale;
  bool fresh = at.begin == 0;  // rows not fitted yet
  if (!fresh) {
    load_state({p.carry_in.state, DType::kFloat32}, state_index(at.head, at), state);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale.unit[r] = p.carry_in.unit[at.head * kHeadDim + at.row + at.g + 8 * r];
      scale.inverse[r] = 1.0F / scale.unit[r];
    }
  } else if (p.initial_state.data != nullptr) {
    load_state(p.initial_state, state_index(sequence_head, at), state);
  }
  RowOperand s;
  state_operand(state, s);

  uint32_t stage = shared;
  uint32_t next_stage = shared + (kStages - 1) * kStageBytes;  // of the chunk to fetch
#pragma unroll 1
  for (int32_t chunk = at.begin; chunk < at.end; ++chunk) {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();
    if (chunk + kStages - 1 < at.end) fetch<kWarps>(p, at, chunk + kStages - 1, next_stage);
    ptx::copy_async_commit();

    const uint32_t tile = stage + kRecordBytes + at.warp * kValueTileBytes;
    RowTokens x, o = {};
    load_values(tile, at.lane, scale, x);
    if (some_row_unfit(s, x, scale) || fresh) {
      fit_rows(state, x, scale, fresh);
      state_operand(state, s);
      fresh = false;
    }
    read_state(s, stage + kRecordKd, at.lane, x);
    decay_state(stage + kRecordDecay, at.c, state);

    uint32_t operand[kBlocks][4];
    LowerTriangle triangle;
    load_triangle(stage + kRecordT, at.lane, triangle);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) to_operand(x[2 * b], x[2 * b + 1], operand[b]);
    RowTokens r = {};
    multiply_triangle(operand, triangle, r);

    read_state(s, stage + kRecordQd, at.lane, o);
    load_triangle(stage + kRecordM, at.lane, triangle);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) to_operand(r[2 * b], r[2 * b + 1], operand[b]);
    update_state(operand, stage + kRecordKr, at.lane, state);
    multiply_triangle(operand, triangle, o);
    state_operand(state, s);
    store_out(p, at, chunk, tile, o, scale);

    next_stage = stage;
    stage = stage == shared + (kStages - 1) * kStageBytes ? shared : stage + kStageBytes;
  }

  if (at.end < at.span.slots) {
    const float one[2] = {1.0F, 1.0F};
    store_state({p.carry_out.state, DType::kFloat32}, state_index(at.head, at), state, one);
    if (at.c == 0) {
      p.carry_out.unit[at.head * kHeadDim + at.row + at.g] = scale.unit[0];
      p.carry_out.unit[at.head * kHeadDim + at.row + at.g + 8] = scale.unit[1];
    }
  } else if (p.final_state.data != nullptr) {
    store_state(p.final_state, state_index(sequence_head, at), state, scale.inverse);
  }
}

template <int kWarps>
__global__ void __launch_bounds__(kWarp* kWarps)
    recurrence_kernel(const __grid_constant__ RecurrenceParams p) {
  extern __shared__ __align__(128) unsigned char recurrence_shared[];
  if (p.window.begin >= p.plan.total_slots()) return;
  constexpr int kParts = kRowGroups / kWarps;
  const int index = static_cast<int>(blockIdx.x);
  Part at;
  at.sequence = p.plan.sequence_of(p.window.begin) + index / kParts / p.heads;
  if (at.sequence >= p.plan.sequences) return;
  at.head = index / kParts % p.heads;
  at.span = p.plan.span(at.sequence);
  const int32_t window_end = p.window.begin + p.window.slots;
  if (at.span.first_slot >= window_end) return;
  at.begin = max(p.window.begin - at.span.first_slot, 0);
  at.end = min(window_end - at.span.first_slot, at.span.slots);
  at.warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarp, 0);
  at.lane = static_cast<int>(threadIdx.x) % kWarp;
  at.g = at.lane >> 2;
  at.c = at.lane & 3;
  const int first_row = index % kParts * kWarps * kWarpRows;
  at.row = first_row + at.warp * kWarpRows;
  if (at.span.length == 0) {
    pass_state<kWarps>(p, static_cast<int64_t>(at.sequence) * p.heads + at.head, first_row);
  } else {
    run_part<kWarps>(p, at, ptx::shared_address(recurrence_shared));
  }
}

template <int kWarps>
Status launch(const RecurrenceParams& params, int32_t sequences, cudaStream_t stream) {
  constexpr int kParts = kRowGroups / kWarps;
  const int shared = recurrence_shared_bytes(kParts);
  static PerDevice prepared;
  FLASH_KDA_RETURN_IF_ERROR(prepared.once([shared] {
    return to_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(recurrence_kernel<kWarps>),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                     "cudaFuncSetAttribute(recurrence_kernel)");
  }));
  const auto blocks = static_cast<unsigned>(sequences * params.heads * kParts);
  recurrence_kernel<kWarps>
      <<<blocks, kWarp * kWarps, static_cast<size_t>(shared), stream>>>(params);
  return launch_status("recurrence_kernel launch");
}

}  // namespace

int recurrence_shared_bytes(int row_parts) { return kStages * stage_bytes(kRowGroups / row_parts); }

Status launch_recurrence(const RecurrenceParams& params, int32_t sequences, cudaStream_t stream) {
  switch (params.row_parts) {
    case 1:
      return launch<8>(params, sequences, stream);
    case 2:
      return launch<4>(params, sequences, stream);
    case 4:
      return launch<2>(params, sequences, stream);
    default:
      return launch<1>(params, sequences, stream);
  }
}

}  // namespace flash_kda::cuda::portable
