// Prepare: from the raw q, k, g and beta of one chunk and head to its record (config.h).
//
// The steps and their division are portable's (prepare_steps.cuh): a pair of warps, each of them 64
// channels. Raw rows lie in shared memory as the tensor cores want the results, so that operands
// take the place of what they are made of and leave in one copy; T, M and d follow in another.
//
// Before the recurrence, a block is one pair and makes one record; seven of them share a
// multiprocessor. Beside it, a block has seven pairs and a multiprocessor for itself; they go from
// record to record, and the next rows come while L is inverted.
//
// Shared memory of a pair, bytes:
//   0     .. 24575  q, k, g raw, then -kd, qd, kr
//   24576 .. 29183  T | M, d: the end of the record
//   29184 .. 29695  sums of squares [warp][k, q][g] for rows 8 r + g of blocks 0, 1
//   29696 .. 30207  slope * dt_bias [128] fp32
//   30208 .. 31359  free
// Later, from 29184: warp 1's half of L, whose end is in T | M, then blocks being inverted. In
// T | M: warp 0's half of M, before T and M.
//
// Barriers of a chunk (both warps of the pair), and what thread 0, which copies out, does before:
//   1  sums of squares are there       waits until the last T, M and d have been read
//   2  operands are there
//   3  halves of L and M are there
//   4  these have been read            waits until the operands have been read: rows may come
//   5  T and M are there
//
// Beside the recurrence, who waits for whom:
//   * This kernel waits for all kernels before it. Then each pair clears the flags of its own
//     records and fences, and only when all have done so does the block let the next kernel start,
//     whose blocks come once all blocks of this one have: none can read a flag of an earlier call.
//   * The flag of a record is set (release) by the thread that has queued its copies and waited for
//     their end. A block of the recurrence reads it (acquire) before it fetches the record; and its
//     first record's before it reads or writes anything else but the plan.
//   * This kernel never waits for the next one, so that any number of blocks of either may be
//     there. The recurrence ends after it (recurrence.cu), so what comes next need only wait for
//     the recurrence.
#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/launch_dependent.cuh"
#include "cuda/common/per_device.h"
#include "cuda/portable/forward/inverse.cuh"
#include "cuda/portable/forward/prepare_steps.cuh"
#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/bulk_linear.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/flag.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90_split/forward/config.h"
#include "cuda/sm90_split/forward/launch.h"
#include "cuda/sm90_split/forward/shared_memory.cuh"
#include "cuda/sm90_split/forward/work.cuh"

namespace flash_kda::cuda::sm90_split {
namespace {

using namespace portable;  // NOLINT: the steps; this file's own constants are written out

constexpr int kPairThreads = kWarp * kPrepareWarps;
constexpr int kPairsPerMultiprocessor = 7;
constexpr int kRegisters = 128;  // 14 warps, 4 to a quarter of a multiprocessor
constexpr int kSquaresAt = sm90_split::kRecordBytes;
constexpr int kBiasAt = kSquaresAt + kPrepareWarps * 2 * 8 * 16;
constexpr int kProductTiles = 6;  // of L or M, 16 bytes a lane each
constexpr int kTilesInScratch = kInverseBytes / (kWarp * 16);
static_assert((2 * kProductTiles - kTilesInScratch) * kWarp * 16 <= kPanelBytes);
constexpr int kPairBytes = kSquaresAt + kInverseBytes;
constexpr int kOperandBytes = sm90_split::kRecordTM;
static_assert(kBiasAt + kHeadDim * 4 <= kPairBytes && kRawRowBytes == kRowBytes);

__device__ __forceinline__ void pack_tile(const Tile& tile, uint32_t signs, uint32_t (&word)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) word[e] = ptx::pack_f16(tile[e][0], tile[e][1]) ^ signs;
}

// Puts operands into the record in shared memory: in place of this warp's raw tiles.
struct RecordWriter {
  uint32_t record;
  Lane at;

  __device__ __forceinline__ void tile(int panel, int block, int slice, const Tile& x,
                                       uint32_t signs) const {
    uint32_t word[4];
    pack_tile(x, signs, word);
    ptx::store_matrix4(tile_address(record + panel, block, slice, at.lane), word);
  }
  __device__ __forceinline__ void kd(int block, int slice, const Tile& x) const {
    tile(sm90_split::kRecordKd + at.warp * kHalfBytes, block, slice, x, 0x80008000U);
  }
  __device__ __forceinline__ void qd(int block, int slice, const Tile& x) const {
    tile(sm90_split::kRecordQd + at.warp * kHalfBytes, block, slice, x, 0);
  }
  __device__ __forceinline__ void kr(int block, int slice, const Tile& x) const {
    tile(sm90_split::kRecordKr + at.warp * kPanelBytes, block, slice, x, 0);
  }
  __device__ __forceinline__ void decay(int slice, const float4& d) const {
    const uint32_t to =
        record + sm90_split::kRecordDecay + (64 * at.warp + 16 * slice + 2 * at.c) * 4;
    ptx::store_shared2(to, d.x, d.y);
    ptx::store_shared2(to + 8 * 4, d.z, d.w);
  }
};

// T (first piece 0) or M (first piece 4) into the rows that they share, zeros above the diagonal.
__device__ __forceinline__ void store_lower_triangle(uint32_t tile, int first_piece,
                                                     const LowerTriangle& triangle, int lane) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const auto& d = triangle.diagonal[b];
    const uint32_t diagonal[4] = {d[0], d[1], 0, d[2]};
    ptx::store_matrix4(tile_address(tile, b, first_piece / 2 + b, lane), diagonal);
  }
  const auto& c = triangle.corner;
  const uint32_t corner[4] = {c[0], c[2], c[1], c[3]};
  ptx::store_matrix4(tile_address(tile, 1, first_piece / 2, lane), corner);
  const uint32_t zeros[4] = {};
  ptx::store_matrix4(tile_address(tile, 0, first_piece / 2 + 1, lane), zeros);
}

template <int kPairs>
struct Pair {
  int number;  // in the block
  uint32_t shared;
  Lane at;

  __device__ __forceinline__ void sync() const {
    if constexpr (kPairs == 1) {
      __syncthreads();
    } else {
      ptx::named_barrier_sync(1 + number, kPairThreads);
    }
  }
  // Its items: every step-th from the first.
  __device__ __forceinline__ uint32_t first() const { return number * gridDim.x + blockIdx.x; }
  __device__ __forceinline__ uint32_t step() const { return gridDim.x * kPairs; }
  __device__ __forceinline__ bool copies_out() const { return at.warp == 0 && at.lane == 0; }
};

// Puts a chunk's rows on their way, k and q before g.
template <int kPairs>
__device__ __forceinline__ void fetch_rows(const PrepareParams& p, const Chunk& chunk,
                                           const Pair<kPairs>& pair) {
  const Lane& at = pair.at;
  load_rows(p.k, chunk, at, pair.shared + sm90_split::kRecordKd + at.warp * kHalfBytes);
  load_rows(p.q, chunk, at, pair.shared + sm90_split::kRecordQd + at.warp * kHalfBytes);
  ptx::copy_async_commit();
  load_rows(p.g, chunk, at, pair.shared + sm90_split::kRecordKr + at.warp * kPanelBytes);
  ptx::copy_async_commit();
}

// The inputs of the slices of a chunk whose rows are on their way; returns when all are there.
template <int kPairs>
__device__ __forceinline__ void begin_slices(const PrepareParams& p, const Chunk& chunk,
                                             const Pair<kPairs>& pair, SliceInputs& in) {
  const Lane& at = pair.at;
  const uint32_t shared = pair.shared;
  in.raw_q = shared + sm90_split::kRecordQd + at.warp * kHalfBytes;
  in.raw_k = shared + sm90_split::kRecordKd + at.warp * kHalfBytes;
  in.raw_g = shared + sm90_split::kRecordKr + at.warp * kPanelBytes;
  in.bias = shared + kBiasAt;
  in.gate = load_gate(p, chunk.head);
  store_bias(p, in.gate, chunk.head, at, in.bias);
  in.tilt = chunk.tilt;
  triangle_of_ones(at.g, at.c, in.triangle);
  token_masks(chunk.rows, at.c, in.masks);

  ptx::copy_async_wait<1>();
  __syncwarp();
  const uint32_t squares = shared + kSquaresAt;
  store_squares(in.raw_k, in.raw_q, at, squares);
  ptx::copy_async_wait<0>();
  if (pair.copies_out()) ptx::wait_stores_read();
  pair.sync();
  load_norms(squares, 0, at, in.norm_k);
  load_norms(squares, 1, at, in.norm_q);
}

// Where a lane has its part of a tile of a half of L or M (0 ... 5): M's in T | M; L's in the
// scratch and what is left of T | M.
template <int kPairs>
__device__ __forceinline__ uint32_t half_at(const Pair<kPairs>& pair, bool of_l, int tile) {
  const uint32_t lane = pair.at.lane * 16;
  constexpr int kTile = kWarp * 16;
  if (!of_l) return pair.shared + kRecordTM + tile * kTile + lane;
  if (tile < kTilesInScratch) return pair.shared + kSquaresAt + tile * kTile + lane;
  return pair.shared + kRecordTM + (kProductTiles + tile - kTilesInScratch) * kTile + lane;
}

template <int kPairs>
__device__ __forceinline__ void store_half(const Pair<kPairs>& pair, bool of_l,
                                           const PairProducts& half) {
#pragma unroll
  for (int i = 0; i < kProductTiles; ++i) {
    ptx::store_shared4(half_at(pair, of_l, i), half.block[i / 2][i % 2]);
  }
}
template <int kPairs>
__device__ __forceinline__ void add_half(const Pair<kPairs>& pair, bool of_l, PairProducts& sum) {
#pragma unroll
  for (int i = 0; i < kProductTiles; ++i) {
    const float4 x = ptx::load_shared4(half_at(pair, of_l, i));
    float(&tile)[4] = sum.block[i / 2][i % 2];
    tile[0] += x.x;
    tile[1] += x.y;
    tile[2] += x.z;
    tile[3] += x.w;
  }
}

// Warp 0 makes T of L, warp 1 M.
template <int kPairs>
__device__ __forceinline__ void finish_triangles(float tilt, float beta, const Pair<kPairs>& pair,
                                                 PairProducts& own) {
  const Lane& at = pair.at;
  LowerTriangle triangle;
  if (at.warp == 0) {
    RowBeta row_beta;
    spread_beta(beta, at.g, row_beta);
    invert(own, row_beta, ptx::rcp_approx(tilt), pair.shared + kSquaresAt, at.lane, triangle);
    store_lower_triangle(pair.shared + kRecordTM, 0, triangle, at.lane);
  } else {
    scale_products(own, tilt);
    pack_triangle(own, at, triangle);
    store_lower_triangle(pair.shared + kRecordTM, 4, triangle, at.lane);
  }
}

__device__ __forceinline__ unsigned char* record_at(const PrepareParams& p, int32_t record) {
  return p.records + static_cast<int64_t>(record) * sm90_split::kRecordBytes;
}

// Says that a record is there, whose copies this thread has queued.
__device__ __forceinline__ void announce(const RecordParams& p, int32_t record) {
  ptx::wait_stores_written();
  ptx::fence_async_global();
  ptx::release_flag(p.ready + record, 1);
}

// Before the next kernel starts, whose blocks read the flags.
template <int kPairs>
__device__ __forceinline__ void clear_flags(const RecordParams& p, const Pair<kPairs>& pair) {
  const uint32_t stride = kPairThreads * pair.step();
  const uint32_t thread = threadIdx.x % kPairThreads;
  for (uint32_t item = pair.first() + thread * pair.step(); item < items_of(p); item += stride) {
    const Item it = item_of(p, item);
    if (static_cast<int32_t>(it.place) < p.prepare.window.slots) {
      p.ready[it.place * p.prepare.heads + it.head] = 0;
    }
  }
  __threadfence();
  __syncthreads();
}

// Prepares `work`, whose rows are on their way, and puts those of the next on theirs. `before`: the
// record to announce, if any.
template <int kPairs>
__device__ __forceinline__ Work prepare_chunk(const RecordParams& params, const Work& work,
                                              int32_t before, const Pair<kPairs>& pair) {
  const PrepareParams& p = params.prepare;
  const Lane& at = pair.at;
  const float beta = at.warp == 0 ? load_beta(p.beta, work.chunk, at.lane) : 0.0F;
  SliceInputs in;
  begin_slices(p, work.chunk, pair, in);
  const RecordWriter writer = {pair.shared, at};
  PairProducts l, m;
#pragma unroll 1
  for (int slice = 0; slice < kSlicesPerWarp; ++slice) {
    prepare_slice(in, slice, at, writer, l, m);
    if (kPairs > 1 && slice == 0 && before >= 0 && pair.copies_out()) announce(params, before);
  }
  ptx::fence_async_shared();
  pair.sync();
  if (pair.copies_out()) {
    ptx::store_bulk(record_at(p, work.record), pair.shared, kOperandBytes);
    ptx::commit_stores();
  }
  if (at.warp == 0) {
    store_half(pair, false, m);
  } else {
    store_half(pair, true, l);
  }
  pair.sync();
  PairProducts own;  // L in warp 0, M in warp 1
  if (at.warp == 0) {
    own = l;
    add_half(pair, true, own);
  } else {
    own = m;
    add_half(pair, false, own);
  }
  if (kPairs > 1 && pair.copies_out()) ptx::wait_stores_read();
  pair.sync();
  Work next;
  if constexpr (kPairs > 1) {
    next = find_work(params, work.item + pair.step(), pair.step());
    if (next.record >= 0) fetch_rows(p, next.chunk, pair);
  }
  finish_triangles(work.chunk.tilt, beta, pair, own);
  ptx::fence_async_shared();
  pair.sync();
  if (pair.copies_out()) {
    ptx::store_bulk(record_at(p, work.record) + kOperandBytes, pair.shared + kOperandBytes,
                    sm90_split::kRecordBytes - kOperandBytes);
    ptx::commit_stores();
  }
  return next;
}

// kPairs of a block.
template <int kPairs>
__global__ void __maxnreg__(kRegisters) prepare_kernel(const __grid_constant__ RecordParams p) {
  extern __shared__ __align__(1024) unsigned char prepare_shared[];
  ptx::wait_for_previous_kernels();
  const int thread = static_cast<int>(threadIdx.x);
  Pair<kPairs> pair;
  pair.number = __shfl_sync(0xffffffffU, thread / kPairThreads, 0);
  pair.shared = ptx::shared_address(prepare_shared) + pair.number * kPairBytes;
  pair.at.warp = __shfl_sync(0xffffffffU, thread / kWarp % kPrepareWarps, 0);
  pair.at.lane = thread % kWarp;
  pair.at.g = pair.at.lane >> 2;
  pair.at.c = pair.at.lane & 3;
  Work work = find_work(p, pair.first(), pair.step());
  if (work.record >= 0) fetch_rows(p.prepare, work.chunk, pair);
  if (p.ready != nullptr) clear_flags(p, pair);
  ptx::let_next_kernel_start();
  int32_t before = -1;
#pragma unroll 1
  while (work.record >= 0) {
    const int32_t record = work.record;
    work = prepare_chunk(p, work, before, pair);
    before = record;
  }
  if (!pair.copies_out()) return;
  if (before >= 0 && p.ready != nullptr) {
    announce(p, before);
  } else {
    ptx::wait_stores_read();
  }
}

template <int kPairs>
Status launch(int64_t most_blocks, const RecordParams& params, cudaStream_t stream) {
  static PerDevice prepared;
  constexpr int kBytes = kPairs * kPairBytes;
  FLASH_KDA_RETURN_IF_ERROR(
      prepared.once([] { return allow_shared(prepare_kernel<kPairs>, kBytes); }));
  const int64_t items = int64_t{params.pieces} * params.piece * params.prepare.heads;
  const auto blocks = static_cast<unsigned>(std::min(most_blocks, (items + kPairs - 1) / kPairs));
  return launch_dependent("cuda.sm90_split prepare", prepare_kernel<kPairs>, blocks,
                          kPairs * kPairThreads, kBytes, params, stream);
}

}  // namespace

const void* entry() { return reinterpret_cast<const void*>(prepare_kernel<1>); }

Status launch_records(RecordParams params, int64_t multiprocessors, cudaStream_t stream) {
  constexpr int64_t kUnbounded = int64_t{1} << 31;
  const portable::TilePlan& plan = params.prepare.plan;
  int64_t slots = params.prepare.window.slots;  // in use, as far as is known here
  if (plan.bounds == nullptr) {
    slots = std::min(
        slots, int64_t{plan.sequences} * plan.slots_per_sequence - params.prepare.window.begin);
  }
  params.pieces =
      static_cast<int32_t>((std::max<int64_t>(slots, 1) + params.piece - 1) / params.piece);
  params.by_heads = Divisor(params.prepare.heads);
  params.by_pieces = Divisor(params.pieces);
  params.by_sequence_slots = Divisor(plan.slots_per_sequence);
  return params.ready == nullptr ? launch<1>(kUnbounded, params, stream)
                                 : launch<kPairsPerMultiprocessor>(multiprocessors, params, stream);
}

}  // namespace flash_kda::cuda::sm90_split
