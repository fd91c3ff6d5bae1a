// Recurrence: through the chunks of one sequence and head with the state in registers.
//
// A block to a part of a head's V rows, a warp to 16 of them (recurrence_steps.cuh). Rows never
// meet, so results do not depend on the number of parts.
//
// Shared memory: kStages stages, each a record (record.cuh) and behind it a tile of v for every
// warp, which becomes the tile of out. Stage of chunk j: j % kStages.
//
// Who waits for whom: each thread waits for its own copies of chunk j, then the block's barrier
// makes all copies visible and says that chunk j - 1 is consumed; only then its stage is filled
// again, with chunk j - 1 + kStages. Tiles of v and out belong to one warp, copies included.
#include "cuda/common/check.h"
#include "cuda/common/numbers.cuh"
#include "cuda/common/per_device.h"
#include "cuda/portable/forward/launch.h"
#include "cuda/portable/forward/params.h"
#include "cuda/portable/forward/record.cuh"
#include "cuda/portable/forward/recurrence_steps.cuh"
#include "cuda/portable/forward/row_scale.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/movmatrix.cuh"
#include "cuda/ptx/shared.cuh"

namespace flash_kda::cuda::portable {
namespace {

// What a block may have on every device of compute capability 8.0 and higher: 8.6, 8.9 and 12.0
// have the least.
constexpr int kLeastSharedBytes = 99 * 1024;

constexpr int stage_bytes(int warps) { return kRecordBytes + warps * kValueTileBytes; }

// What a block works on, and where its warp is in it.
struct Part {
  SequenceSlots span;
  int32_t sequence = 0;
  int head = 0;
  int32_t begin = 0, end = 0;  // chunks of the sequence in this window
  int warp = 0, lane = 0, g = 0, c = 0;
  int row = 0;  // first V row of the warp

  int last_tokens = 0;  // of the sequence's last chunk

  // Tokens of a chunk that exist.
  __device__ __forceinline__ int tokens(int32_t chunk) const {
    return chunk == span.slots - 1 ? last_tokens : kChunk;
  }
};

// A lane's 16 bytes of the token lane / 2 of a chunk, in v or out; strides stay in the parameters.
__device__ __forceinline__ uint16_t* token_row(const Rows& rows, const Part& at, int32_t chunk) {
  const int64_t token = at.span.begin + static_cast<int64_t>(chunk) * kChunk + (at.lane >> 1);
  return static_cast<uint16_t*>(rows.data) + at.span.batch * rows.batch_stride +
         token * rows.token_stride + at.head * kHeadDim + at.row + 8 * (at.lane & 1);
}

// Index of (row g of the warp, channel 2c) in a state [N, H, V, K].
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
template <int kThreads, int kRows>
__device__ __forceinline__ void pass_state(const RecurrenceParams& p, int64_t sequence_head,
                                           int first_row) {
  if (p.final_state.data == nullptr) return;
  const int64_t begin = (sequence_head * kHeadDim + first_row) * kHeadDim;
  for (int i = 2 * threadIdx.x; i < kRows * kHeadDim; i += 2 * kThreads) {
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

// Brings chunks into stages, in order.
template <int kWarps>
struct Fetcher {
  const RecurrenceParams& p;
  const unsigned char* record;  // this thread's first 16 bytes
  const uint16_t* v;            // token_row

  __device__ __forceinline__ Fetcher(const RecurrenceParams& params, const Part& at)
      : p(params), v(token_row(params.v, at, at.begin)) {
    const int64_t slot = at.span.first_slot + at.begin - p.window.begin;
    record = p.records + (slot * p.heads + at.head) * kRecordBytes + threadIdx.x * 16;
  }

  // Queues this thread's share of the copies of a chunk, the one after the last; none past the end.
  __device__ __forceinline__ void fetch(const Part& at, int32_t chunk, uint32_t stage) {
    if (chunk < at.end) {
      fetch_record(stage + threadIdx.x * 16);
      fetch_values(at.tokens(chunk), at.lane, stage + kRecordBytes + at.warp * kValueTileBytes);
      record += static_cast<int64_t>(p.heads) * kRecordBytes;
      v += kChunk * p.v.token_stride;
    }
    ptx::copy_async_commit();
  }

 private:
  __device__ __forceinline__ void fetch_record(uint32_t to) const {
    constexpr int kThreads = kWarp * kWarps;
    constexpr int kCopies = kRecordBytes / 16;
#pragma unroll
    for (int i = 0; i < (kCopies + kThreads - 1) / kThreads; ++i) {
      if ((i + 1) * kThreads <= kCopies || i * kThreads + threadIdx.x < kCopies) {
        ptx::copy_async16(to + i * kThreads * 16, record + i * kThreads * 16);
      }
    }
  }

  // Tokens that do not exist become zeros.
  __device__ __forceinline__ void fetch_values(int tokens, int lane, uint32_t tile) const {
    const int token = lane >> 1;
    const uint32_t to = tile + value_offset(token, lane & 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = 16 * i + token < tokens;
      // An address that exists: the lane's own, or that of token 0 in its place.
      const uint16_t* source = v + (exists ? 16 * i : -token) * p.v.token_stride;
      ptx::copy_async16_or_zero(to + value_offset(16 * i, 0), source, exists);
    }
  }
};

// Rounds O^T, turns it round in the tile of v, which has been read, and writes the tokens that
// exist.
__device__ __forceinline__ void store_out(const RecurrenceParams& p, uint16_t* out, int tokens,
                                          const Part& at, uint32_t tile, const RowTokens& o,
                                          const RowScale& scale) {
  const float factor[2] = {p.scale * inverse_unit(scale.unit[0]),
                           p.scale * inverse_unit(scale.unit[1])};
  __syncwarp();
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
  const int token = at.lane >> 1;
  const uint32_t from = tile + value_offset(token, at.lane & 1);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 x = ptx::load_shared_words4(from + value_offset(16 * i, 0));
    if (16 * i + token < tokens) {
      *reinterpret_cast<uint4*>(out + 16 * i * p.out.token_stride) = x;
    }
  }
}

// The rows of a warp.
struct WarpRows {
  RowState state = {};
  RowScale scale;
  uint32_t bits[2] = {};  // RowExtent's state_bits
  bool fresh = true;      // not fitted yet
};

// From the initial state, or from the window before.
__device__ __forceinline__ void begin_rows(const RecurrenceParams& p, const Part& at,
                                           int64_t sequence_head, WarpRows& rows) {
  rows.fresh = at.begin == 0;
  if (!rows.fresh) {
    load_state({p.carry_in.state, DType::kFloat32}, state_index(at.head, at), rows.state);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.head * kHeadDim + at.row + at.g + 8 * r;
      rows.scale.unit[r] = p.carry_in.unit[row];
      rows.bits[r] = p.carry_in.bits[row * 4 + at.c];
    }
  } else if (p.initial_state.data != nullptr) {
    load_state(p.initial_state, state_index(sequence_head, at), rows.state);
  }
}

// To the final state, or to the next window.
__device__ __forceinline__ void end_rows(const RecurrenceParams& p, const Part& at,
                                         int64_t sequence_head, const WarpRows& rows) {
  if (at.end < at.span.slots) {
    const float one[2] = {1.0F, 1.0F};
    store_state({p.carry_out.state, DType::kFloat32}, state_index(at.head, at), rows.state, one);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.head * kHeadDim + at.row + at.g + 8 * r;
      if (at.c == 0) p.carry_out.unit[row] = rows.scale.unit[r];
      p.carry_out.bits[row * 4 + at.c] = rows.bits[r];
    }
  } else if (p.final_state.data != nullptr) {
    const float inverse[2] = {inverse_unit(rows.scale.unit[0]), inverse_unit(rows.scale.unit[1])};
    store_state(p.final_state, state_index(sequence_head, at), rows.state, inverse);
  }
}

// X, with all rows fitted: what is found unfit is fitted and read again.
__device__ __forceinline__ void read_fitted(WarpRows& rows, uint32_t record, uint32_t tile,
                                            int lane, RowTokens& x) {
#pragma unroll 1
  for (int fits = 0;; ++fits) {
    RowExtent extent;
    load_values(tile, lane, rows.scale, x);
    row_maxima(x, extent.value_most);
    extent.state_bits[0] = rows.bits[0];
    extent.state_bits[1] = rows.bits[1];
    if (!rows.fresh) {
      uint32_t ignored[2];
      read_state(rows.state, record + kRecordKd, lane, x, ignored);
      if (fits == kMostFits || !some_row_unfit(extent, rows.scale)) return;
    }
    fit_rows(rows.state, extent, rows.scale, rows.fresh);
    rows.fresh = false;
  }
}

// One chunk, from its stage: O^T / scale, and the next state.
__device__ __forceinline__ void step_chunk(WarpRows& rows, uint32_t record, uint32_t tile,
                                           const Part& at, RowTokens& o) {
  RowTokens x;
  read_fitted(rows, record, tile, at.lane, x);

  LowerTriangle triangle;
  load_triangle(record + kRecordT, at.lane, triangle);
  TokenOperand operand;
  tokens_operand(x, operand);
  RowTokens r = {};
  multiply_triangle(operand, triangle, r);
#pragma unroll
  for (int e = 0; e < 16; ++e) o[e >> 2][e & 3] = 0.0F;
  read_state(rows.state, record + kRecordQd, at.lane, o, rows.bits);  // while R is under way
  decay_state(record, at.c, rows.state);
  tokens_operand(r, operand);
  update_state(operand, record, at.lane, rows.state);
  load_triangle(record + kRecordM, at.lane, triangle);
  multiply_triangle(operand, triangle, o);
}

template <int kWarps>
__device__ __forceinline__ void run_part(const RecurrenceParams& p, const Part& at,
                                         uint32_t shared) {
  constexpr int kStageBytes = stage_bytes(kWarps);
  constexpr int kLastStage = (kStages - 1) * kStageBytes;
  Fetcher<kWarps> fetcher(p, at);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetcher.fetch(at, at.begin + i, shared + i * kStageBytes);
  const int64_t sequence_head = static_cast<int64_t>(at.sequence) * p.heads + at.head;
  WarpRows rows;
  begin_rows(p, at, sequence_head, rows);
  uint16_t* out = token_row(p.out, at, at.begin);

  uint32_t stage = shared;
  uint32_t free_stage = shared + kLastStage;  // for the next chunk to fetch
#pragma unroll 1
  for (int32_t chunk = at.begin; chunk < at.end; ++chunk) {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();
    fetcher.fetch(at, chunk + kStages - 1, free_stage);
    const uint32_t tile = stage + kRecordBytes + at.warp * kValueTileBytes;
    RowTokens o;
    step_chunk(rows, stage, tile, at, o);
    store_out(p, out, at.tokens(chunk), at, tile, o, rows.scale);
    out += kChunk * p.out.token_stride;
    free_stage = stage;
    stage = stage == shared + kLastStage ? shared : stage + kStageBytes;
  }
  end_rows(p, at, sequence_head, rows);
}

template <int kWarps>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocksPerMultiprocessor)
    recurrence_kernel(const __grid_constant__ RecurrenceParams p) {
  extern __shared__ __align__(128) unsigned char recurrence_shared[];
  if (p.window.begin >= p.plan.total_slots()) return;
  constexpr int kParts = kRowTiles / kWarps;
  const int index = static_cast<int>(blockIdx.x);
  Part at;
  at.sequence = p.plan.nth_sequence(p.window.begin, index / kParts / p.heads);
  if (at.sequence >= p.plan.sequences) return;
  at.head = index / kParts % p.heads;
  at.span = p.plan.span(at.sequence);
  const int32_t window_end = p.window.begin + p.window.slots;
  if (at.span.first_slot >= window_end) return;
  at.begin = max(p.window.begin - at.span.first_slot, 0);
  at.end = min(window_end - at.span.first_slot, at.span.slots);
  at.last_tokens =
      static_cast<int>(at.span.length - static_cast<int64_t>(at.span.slots - 1) * kChunk);
  at.warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarp, 0);
  at.lane = static_cast<int>(threadIdx.x) % kWarp;
  at.g = at.lane >> 2;
  at.c = at.lane & 3;
  constexpr int kRows = kWarps * kTileRows;
  const int first_row = index % kParts * kRows;
  at.row = first_row + at.warp * kTileRows;
  if (at.span.length == 0) {
    pass_state<kWarp * kWarps, kRows>(p, static_cast<int64_t>(at.sequence) * p.heads + at.head,
                                      first_row);
  } else {
    run_part<kWarps>(p, at, ptx::shared_address(recurrence_shared));
  }
}

template <int kWarps>
Status launch(const RecurrenceParams& params, int32_t sequences, cudaStream_t stream) {
  constexpr int kParts = kRowTiles / kWarps;
  constexpr int kShared = kStages * stage_bytes(kWarps);
  static_assert(kShared <= kLeastSharedBytes);
  const void* entry = reinterpret_cast<const void*>(recurrence_kernel<kWarps>);
  static PerDevice prepared;
  FLASH_KDA_RETURN_IF_ERROR(prepared.once([entry] {
    return to_status(
        cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
        "cudaFuncSetAttribute(recurrence_kernel)");
  }));
  const auto blocks = static_cast<unsigned>(sequences * params.heads * kParts);
  recurrence_kernel<kWarps><<<blocks, kWarp * kWarps, kShared, stream>>>(params);
  return launch_status("recurrence_kernel launch");
}

}  // namespace

Status launch_recurrence(const RecurrenceParams& params, int row_parts, int32_t sequences,
                         cudaStream_t stream) {
  return row_parts == 2 ? launch<4>(params, sequences, stream)
                        : launch<2>(params, sequences, stream);
}

}  // namespace flash_kda::cuda::portable
