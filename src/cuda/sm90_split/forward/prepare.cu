// Prepare: from the raw q, k, g and beta of one chunk and head to its record (config.h).
//
// The steps and their division are portable's (prepare_steps.cuh): a block of two warps, each of
// them 64 channels. Raw rows lie in shared memory as the tensor cores want the results, so that
// operands take the place of what they are made of, and the whole record leaves in one copy.
//
// Shared memory, bytes:
//   0     .. 29183  q, k, g raw, then the record
//   29184 .. 29695  sums of squares [warp][k, q][g] for rows 8 r + g of blocks 0, 1
//   29696 .. 30207  slope * dt_bias [128] fp32
//   30208 .. 32255  free
// In the end, from 29184: warp 1's half of L, then blocks being inverted. In T | M: warp 0's half
// of M, before T and M.
//
// Barriers (both warps): after the sums of squares; after the slices; after the halves of L and M
// are written; after they have been read; before the record leaves.
#include "cuda/common/check.h"
#include "cuda/portable/forward/inverse.cuh"
#include "cuda/portable/forward/prepare_steps.cuh"
#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/bulk_linear.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90_split/forward/config.h"
#include "cuda/sm90_split/forward/launch.h"
#include "cuda/sm90_split/forward/launch_dependent.cuh"

namespace flash_kda::cuda::sm90_split {
namespace {

using namespace portable;  // NOLINT: the steps; this file's own constants are written out

constexpr int kPrepareThreads = kWarp * kPrepareWarps;
constexpr int kBlocksPerMultiprocessor = 7;
constexpr int kSquaresAt = sm90_split::kRecordBytes;
constexpr int kBiasAt = kSquaresAt + kPrepareWarps * 2 * 8 * 16;
constexpr int kProductBytes = 6 * kWarp * 16;
constexpr int kPrepareBytes = kSquaresAt + kProductBytes;
static_assert(kBiasAt + kHeadDim * 4 <= kPrepareBytes && kInverseBytes <= kProductBytes);
static_assert(kProductBytes <= kPanelBytes && kRawRowBytes == kRowBytes);

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

// The inputs of the slices, once the rows are on their way; returns when all rows are there.
__device__ __forceinline__ void begin_slices(const PrepareParams& p, const Chunk& chunk,
                                             const Lane& at, uint32_t shared, SliceInputs& in) {
  in.raw_q = shared + sm90_split::kRecordQd + at.warp * kHalfBytes;
  in.raw_k = shared + sm90_split::kRecordKd + at.warp * kHalfBytes;
  in.raw_g = shared + sm90_split::kRecordKr + at.warp * kPanelBytes;
  in.bias = shared + kBiasAt;
  load_rows(p.k, chunk, at, in.raw_k);
  load_rows(p.q, chunk, at, in.raw_q);
  ptx::copy_async_commit();
  load_rows(p.g, chunk, at, in.raw_g);
  ptx::copy_async_commit();
  in.gate = load_gate(p, chunk.head);
  store_bias(p, in.gate, chunk.head, at, in.bias);
  in.tilt = chunk.tilt;
  triangle_of_ones(at.g, at.c, in.triangle);
  token_masks(chunk.rows, at.c, in.masks);

  ptx::copy_async_wait<1>();
  __syncwarp();
  const uint32_t squares = shared + kSquaresAt;
  float sums_k[4], sums_q[4];
  sum_squares(in.raw_k, at, sums_k);
  sum_squares(in.raw_q, at, sums_q);
  if (at.c == at.g >> 1) {
    ptx::store_shared4(squares + ((2 * at.warp) * 8 + at.g) * 16, sums_k);
    ptx::store_shared4(squares + ((2 * at.warp + 1) * 8 + at.g) * 16, sums_q);
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  load_norms(squares, 0, at, in.norm_k);
  load_norms(squares, 1, at, in.norm_q);
}

// Joins the warps' halves of L and M; warp 0 makes T, warp 1 M.
__device__ __forceinline__ void finish_triangles(const Chunk& chunk, const Lane& at, float beta,
                                                 uint32_t shared, PairProducts& l,
                                                 PairProducts& m) {
  const uint32_t half_of_l = shared + kSquaresAt;
  const uint32_t triangles = shared + kRecordTM;
  __syncthreads();
  if (at.warp == 0) {
    store_products(triangles, m, at.lane);
  } else {
    store_products(half_of_l, l, at.lane);
  }
  __syncthreads();
  if (at.warp == 0) {
    add_products(half_of_l, l, at.lane);
  } else {
    add_products(triangles, m, at.lane);
  }
  __syncthreads();
  LowerTriangle triangle;
  if (at.warp == 0) {
    RowBeta row_beta;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_beta[b][r] = __shfl_sync(0xffffffffU, beta, 16 * b + 8 * r + at.g);
      }
    }
    invert(l, row_beta, ptx::rcp_approx(chunk.tilt), half_of_l, at.lane, triangle);
    store_lower_triangle(triangles, 0, triangle, at.lane);
  } else {
    scale_products(m, chunk.tilt);
    pack_triangle(m, at, triangle);
    store_lower_triangle(triangles, 4, triangle, at.lane);
  }
}

__device__ __forceinline__ void prepare_chunk(const PrepareParams& p, const Chunk& chunk,
                                              unsigned char* record, uint32_t shared) {
  Lane at;
  at.warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarp, 0);
  at.lane = static_cast<int>(threadIdx.x) % kWarp;
  at.g = at.lane >> 2;
  at.c = at.lane & 3;
  SliceInputs in;
  const float beta = at.warp == 0 ? load_beta(p.beta, chunk, at.lane) : 0.0F;
  begin_slices(p, chunk, at, shared, in);
  const RecordWriter writer = {shared, at};
  PairProducts l, m;
#pragma unroll 1
  for (int slice = 0; slice < kSlicesPerWarp; ++slice) prepare_slice(in, slice, at, writer, l, m);
  finish_triangles(chunk, at, beta, shared, l, m);
  ptx::fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::store_bulk(record, shared, sm90_split::kRecordBytes);
    ptx::commit_stores();
    ptx::wait_stores_read();
  }
}

__global__ void __launch_bounds__(kPrepareThreads, kBlocksPerMultiprocessor)
    prepare_kernel(const __grid_constant__ PrepareParams p) {
  extern __shared__ __align__(1024) unsigned char prepare_shared[];
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  const int index = static_cast<int>(blockIdx.x);
  const int32_t slot = p.window.begin + index / p.heads;
  if (slot >= p.plan.total_slots()) return;
  const SequenceSlots span = p.plan.span(p.plan.sequence_of(slot));
  Chunk chunk;
  const int64_t first = static_cast<int64_t>(slot - span.first_slot) * kChunk;
  if (first >= span.length) return;  // an empty sequence
  chunk.batch = span.batch;
  chunk.token = span.begin + first;
  chunk.head = index % p.heads;
  chunk.tilt = chunk_tilt(static_cast<uint32_t>(slot - span.first_slot));
  chunk.rows = static_cast<int>(min(span.length - first, static_cast<int64_t>(kChunk)));
  prepare_chunk(p, chunk, p.records + static_cast<int64_t>(index) * sm90_split::kRecordBytes,
                ptx::shared_address(prepare_shared));
}

}  // namespace

const void* entry() { return reinterpret_cast<const void*>(prepare_kernel); }

Status launch_records(const PrepareParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.window.slots * params.heads);
  return launch_dependent(prepare_kernel, blocks, kPrepareThreads, kPrepareBytes, params, stream);
}

}  // namespace flash_kda::cuda::sm90_split
