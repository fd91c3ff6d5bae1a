// Recurrence: through the chunks of one sequence and head with the state in registers.
//
// A block to a part of a head's V rows, a warp to kTiles tiles of 16 rows (recurrence_steps.cuh).
// Rows never meet, so results do not depend on this division: into 8, 4, 2 or 1 parts, as many as
// it takes to fill the device. Two tiles to a warp halve the reads of the records, which bound a
// full device; one tile is quicker where a chunk's latency counts.
//
// Shared memory: kStages stages, each a record (record.cuh) and behind it a tile of v for every
// tile of rows, which becomes the tile of out. Stage of chunk j: j % kStages.
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

constexpr int stage_bytes(int row_tiles) { return kRecordBytes + row_tiles * kValueTileBytes; }

// What a block works on, and where its warp is in it.
struct Part {
  SequenceSlots span;
  int32_t sequence = 0;
  int head = 0;
  int32_t begin = 0, end = 0;  // chunks of the sequence in this window
  int warp = 0, lane = 0, g = 0, c = 0;
  int row = 0;  // first V row of the warp

  // Tokens of a chunk that exist.
  __device__ __forceinline__ int tokens(int32_t chunk) const {
    const int64_t left = span.length - static_cast<int64_t>(chunk) * kChunk;
    return left < kChunk ? static_cast<int>(left) : kChunk;
  }
};

// A lane's 16 bytes of tokens lane / 2 and lane / 2 + 16 of a chunk, in v or out.
struct TokenRows {
  uint16_t* first;  // of the token lane / 2
  int64_t stride;   // elements of 16 tokens

  __device__ __forceinline__ TokenRows(const Rows& rows, const Part& at, int32_t chunk)
      : stride(16 * rows.token_stride) {
    const int64_t token = at.span.begin + static_cast<int64_t>(chunk) * kChunk + (at.lane >> 1);
    first = static_cast<uint16_t*>(rows.data) + at.span.batch * rows.batch_stride +
            token * rows.token_stride + at.head * kHeadDim + at.row + 8 * (at.lane & 1);
  }
  __device__ __forceinline__ void advance() { first += 2 * stride; }
};

// Index of (row g of the warp's tile, channel 2c) in a state [N, H, V, K].
__device__ __forceinline__ int64_t state_index(int64_t sequence_head, const Part& at, int tile) {
  return (sequence_head * kHeadDim + at.row + tile * kTileRows + at.g) * kHeadDim + 2 * at.c;
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
template <int kWarps, int kTiles>
struct Fetcher {
  const unsigned char* record;  // this thread's first 16 bytes
  int64_t record_stride;        // from chunk to chunk
  TokenRows v;
  int32_t chunk;

  __device__ __forceinline__ Fetcher(const RecurrenceParams& p, const Part& at)
      : record_stride(static_cast<int64_t>(p.heads) * kRecordBytes),
        v(p.v, at, at.begin),
        chunk(at.begin) {
    const int64_t slot = at.span.first_slot + at.begin - p.window.begin;
    record = p.records + slot * record_stride + static_cast<int64_t>(at.head) * kRecordBytes +
             threadIdx.x * 16;
  }

  // Queues this thread's share of the copies of the next chunk, if there is one.
  __device__ __forceinline__ void fetch(const Part& at, uint32_t stage) {
    if (chunk < at.end) {
      fetch_record(stage + threadIdx.x * 16);
      fetch_values(at, stage + kRecordBytes + at.warp * kTiles * kValueTileBytes);
      record += record_stride;
      v.advance();
      ++chunk;
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
  __device__ __forceinline__ void fetch_values(const Part& at, uint32_t tiles) const {
    const int tokens = at.tokens(chunk);
    const int token = at.lane >> 1;
    const uint32_t to = tiles + value_offset(token, at.lane & 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = 16 * i + token < tokens;
      // An address that exists: the lane's own, or that of token 0 in its place.
      const uint16_t* source = exists ? v.first + i * v.stride : v.first - token * (v.stride / 16);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        ptx::copy_async16_or_zero(to + value_offset(16 * i, 0) + tile * kValueTileBytes,
                                  source + tile * kTileRows, exists);
      }
    }
  }
};

// Rounds O^T, turns it round in the tiles of v, which have been read, and writes the tokens that
// exist.
template <int kTiles>
__device__ __forceinline__ void store_out(const TokenRows& out, int tokens, const Part& at,
                                          float output_scale, uint32_t tiles,
                                          const RowTokens (&o)[kTiles],
                                          const RowScale (&scale)[kTiles]) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const uint32_t tile = tiles + i * kValueTileBytes;
    const float factor[2] = {output_scale * scale[i].inverse[0],
                             output_scale * scale[i].inverse[1]};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t word = ptx::transpose_matrix(
            ptx::pack_bf16(o[i][t][2 * r] * factor[r], o[i][t][2 * r + 1] * factor[r]));
        ptx::store_shared(tile + value_offset(8 * t + at.g, r) + 4 * at.c, __uint_as_float(word));
      }
    }
  }
  __syncwarp();
  const int token = at.lane >> 1;
  const uint32_t from = tiles + value_offset(token, at.lane & 1);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 x =
          ptx::load_shared_words4(from + value_offset(16 * i, 0) + tile * kValueTileBytes);
      if (16 * i + token < tokens) {
        *reinterpret_cast<uint4*>(out.first + i * out.stride + tile * kTileRows) = x;
      }
    }
  }
}

// The rows of a warp.
template <int kTiles>
struct WarpRows {
  RowState state[kTiles] = {};
  RowScale scale[kTiles];
  bool fresh = true;  // not fitted yet
};

// From the initial state, or from the window before.
template <int kTiles>
__device__ __forceinline__ void begin_rows(const RecurrenceParams& p, const Part& at,
                                           int64_t sequence_head, WarpRows<kTiles>& rows) {
  rows.fresh = at.begin == 0;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (!rows.fresh) {
      load_state({p.carry_in.state, DType::kFloat32}, state_index(at.head, at, i), rows.state[i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = at.row + i * kTileRows + at.g + 8 * r;
        rows.scale[i].unit[r] = p.carry_in.unit[at.head * kHeadDim + row];
        rows.scale[i].inverse[r] = 1.0F / rows.scale[i].unit[r];
      }
    } else if (p.initial_state.data != nullptr) {
      load_state(p.initial_state, state_index(sequence_head, at, i), rows.state[i]);
    }
  }
}

// To the final state, or to the next window.
template <int kTiles>
__device__ __forceinline__ void end_rows(const RecurrenceParams& p, const Part& at,
                                         int64_t sequence_head, const WarpRows<kTiles>& rows) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if (at.end < at.span.slots) {
      const float one[2] = {1.0F, 1.0F};
      store_state({p.carry_out.state, DType::kFloat32}, state_index(at.head, at, i), rows.state[i],
                  one);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = at.row + i * kTileRows + at.g + 8 * r;
        if (at.c == 0) p.carry_out.unit[at.head * kHeadDim + row] = rows.scale[i].unit[r];
      }
    } else if (p.final_state.data != nullptr) {
      store_state(p.final_state, state_index(sequence_head, at, i), rows.state[i],
                  rows.scale[i].inverse);
    }
  }
}

// X, with all rows fitted: what is found unfit on the way is fitted and read again.
template <int kTiles>
__device__ __forceinline__ void read_fitted(WarpRows<kTiles>& rows, uint32_t record, uint32_t tiles,
                                            int lane, RowTokens (&x)[kTiles]) {
#pragma unroll 1
  for (bool last = false;; last = true) {
    RowExtent extent[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      load_values(tiles + i * kValueTileBytes, lane, rows.scale[i], x[i]);
      row_maxima(x[i], extent[i].value_most);
    }
    if (!rows.fresh) {
      read_state(rows.state, record + kRecordKd, lane, x, extent);
      if (!some_row_unfit(extent, rows.scale) || last) return;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      fit_rows(rows.state[i], extent[i], rows.scale[i], rows.fresh);
    }
    rows.fresh = false;
  }
}

// One chunk, from its stage: O^T / scale, and the next state.
template <int kTiles>
__device__ __forceinline__ void step_chunk(WarpRows<kTiles>& rows, uint32_t record, uint32_t tiles,
                                           const Part& at, RowTokens (&o)[kTiles]) {
  RowTokens x[kTiles];
  read_fitted(rows, record, tiles, at.lane, x);

  LowerTriangle triangle;
  load_triangle(record + kRecordT, at.lane, triangle);
  TokenOperand operand[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    tokens_operand(x[i], operand[i]);
    RowTokens r = {};
    multiply_triangle(operand[i], triangle, r);
    tokens_operand(r, operand[i]);
#pragma unroll
    for (int e = 0; e < 16; ++e) o[i][e >> 2][e & 3] = 0.0F;
  }
  RowExtent ignored[kTiles];
  read_state(rows.state, record + kRecordQd, at.lane, o, ignored);
  decay_state(record, at.c, rows.state);
  update_state(operand, record, at.lane, rows.state);
  load_triangle(record + kRecordM, at.lane, triangle);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) multiply_triangle(operand[i], triangle, o[i]);
}

template <int kWarps, int kTiles>
__device__ __forceinline__ void run_part(const RecurrenceParams& p, const Part& at,
                                         uint32_t shared) {
  constexpr int kStageBytes = stage_bytes(kWarps * kTiles);
  constexpr int kLastStage = (kStages - 1) * kStageBytes;
  Fetcher<kWarps, kTiles> fetcher(p, at);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetcher.fetch(at, shared + i * kStageBytes);
  const int64_t sequence_head = static_cast<int64_t>(at.sequence) * p.heads + at.head;
  WarpRows<kTiles> rows;
  begin_rows(p, at, sequence_head, rows);
  TokenRows out(p.out, at, at.begin);

  uint32_t stage = shared;
  uint32_t free_stage = shared + kLastStage;  // for the next chunk to fetch
#pragma unroll 1
  for (int32_t chunk = at.begin; chunk < at.end; ++chunk) {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();
    fetcher.fetch(at, free_stage);
    const uint32_t tiles = stage + kRecordBytes + at.warp * kTiles * kValueTileBytes;
    RowTokens o[kTiles];
    step_chunk(rows, stage, tiles, at, o);
    store_out(out, at.tokens(chunk), at, p.scale, tiles, o, rows.scale);
    out.advance();
    free_stage = stage;
    stage = stage == shared + kLastStage ? shared : stage + kStageBytes;
  }
  end_rows(p, at, sequence_head, rows);
}

template <int kWarps, int kTiles>
__global__ void __launch_bounds__(kWarp* kWarps)
    recurrence_kernel(const __grid_constant__ RecurrenceParams p) {
  extern __shared__ __align__(128) unsigned char recurrence_shared[];
  if (p.window.begin >= p.plan.total_slots()) return;
  constexpr int kParts = kRowTiles / (kWarps * kTiles);
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
  constexpr int kRows = kWarps * kTiles * kTileRows;
  const int first_row = index % kParts * kRows;
  at.row = first_row + at.warp * kTiles * kTileRows;
  if (at.span.length == 0) {
    pass_state<kWarp * kWarps, kRows>(p, static_cast<int64_t>(at.sequence) * p.heads + at.head,
                                      first_row);
  } else {
    run_part<kWarps, kTiles>(p, at, ptx::shared_address(recurrence_shared));
  }
}

template <int kWarps, int kTiles>
Status launch(const RecurrenceParams& params, int32_t sequences, cudaStream_t stream) {
  constexpr int kParts = kRowTiles / (kWarps * kTiles);
  const int shared = recurrence_shared_bytes(kParts);
  const void* entry = reinterpret_cast<const void*>(recurrence_kernel<kWarps, kTiles>);
  static PerDevice prepared;
  FLASH_KDA_RETURN_IF_ERROR(prepared.once([entry, shared] {
    return to_status(
        cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
        "cudaFuncSetAttribute(recurrence_kernel)");
  }));
  const auto blocks = static_cast<unsigned>(sequences * params.heads * kParts);
  recurrence_kernel<kWarps, kTiles>
      <<<blocks, kWarp * kWarps, static_cast<size_t>(shared), stream>>>(params);
  return launch_status("recurrence_kernel launch");
}

}  // namespace

int recurrence_shared_bytes(int row_parts) { return kStages * stage_bytes(kRowTiles / row_parts); }

Status launch_recurrence(const RecurrenceParams& params, int32_t sequences, cudaStream_t stream) {
  const bool pairs = params.tiles_per_warp == 2;
  switch (params.row_parts) {
    case 1:
      return pairs ? launch<4, 2>(params, sequences, stream)
                   : launch<8, 1>(params, sequences, stream);
    case 2:
      return pairs ? launch<2, 2>(params, sequences, stream)
                   : launch<4, 1>(params, sequences, stream);
    case 4:
      return pairs ? launch<1, 2>(params, sequences, stream)
                   : launch<2, 1>(params, sequences, stream);
    default:
      return launch<1, 1>(params, sequences, stream);
  }
}

}  // namespace flash_kda::cuda::portable
