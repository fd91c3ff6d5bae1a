// Prepare: from the raw q, k, g and beta of one chunk and head to its record (record.cuh).
//
// A block of two warps to a chunk and head; warp w owns all 32 tokens of channels 64 w ... 64 w +
// 63, so that sums along the tokens never leave a warp. Only sums over channels cross: the norms of
// the rows, and the halves of L and M, of which warp 0 finishes L (to T) and warp 1 finishes M.
// Several blocks share a multiprocessor; their loads and latencies hide behind each other.
//
// Shared memory, bytes:
//   0     .. 24575  raw q, k, g: [tensor][warp][32 tokens][128 bytes], 16-byte columns ^ (row % 8)
//                   later: outgoing halves of L or M in k, blocks being inverted in q of warp 0
//   24576 .. 25087  sums of squares [warp][k, q][g] for rows 8 r + g of blocks 0, 1
//   25088 .. 25599  slope * dt_bias [128] fp32
//
// Barriers (both warps): after the sums of squares; after the halves of L and M.
#include "cuda/common/check.h"
#include "cuda/portable/forward/inverse.cuh"
#include "cuda/portable/forward/launch.h"
#include "cuda/portable/forward/params.h"
#include "cuda/portable/forward/prepare_steps.cuh"
#include "cuda/portable/forward/record.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"

namespace flash_kda::cuda::portable {
namespace {

constexpr int kThreads = kWarp * kPrepareWarps;
constexpr int kPrepareBlocks = 8;                 // on a multiprocessor: 128 registers a thread
constexpr int kRawBytes = kChunk * kRawRowBytes;  // one tensor, one warp's channels
constexpr int kRawQ = 0;
constexpr int kRawK = kRawQ + kPrepareWarps * kRawBytes;
constexpr int kRawG = kRawK + kPrepareWarps * kRawBytes;
constexpr int kSquares = kRawG + kPrepareWarps * kRawBytes;
constexpr int kBias = kSquares + kPrepareWarps * 2 * 8 * 16;
constexpr int kSharedBytes = kBias + kHeadDim * 4;
static_assert(kInverseBytes <= kRawBytes && 6 * kWarp * 16 <= kRawBytes);

// Writes operands to the record in global memory: each lane 16 bytes, in fragment order.
struct RecordWriter {
  unsigned char* record;
  Lane at;

  __device__ __forceinline__ unsigned char* tile(int matrix, int block, int slice) const {
    return record + matrix + tile_offset(block, kSlicesPerWarp * at.warp + slice, at.lane);
  }
  __device__ __forceinline__ void kd(int block, int slice, const Tile& x) const {
    store_negative_tile(tile(kRecordKd, block, slice), x);
  }
  __device__ __forceinline__ void qd(int block, int slice, const Tile& x) const {
    store_tile(tile(kRecordQd, block, slice), x);
  }
  __device__ __forceinline__ void kr(int block, int slice, const Tile& x) const {
    store_transposed_tile(tile(kRecordKr, block, slice), x);
  }
  __device__ __forceinline__ void decay(int slice, const float4& d) const {
    *reinterpret_cast<float4*>(record + kRecordDecay +
                               decay_offset(kSlicesPerWarp * at.warp + slice, at.c)) = d;
  }
};

__device__ __forceinline__ void store_triangle(unsigned char* to, const LowerTriangle& triangle,
                                               int lane) {
  const auto& d = triangle.diagonal;
  store_vector(to + kTriangleQuad + lane * 16, d[0][0], d[0][1], d[0][2], d[1][0]);
  store_vector(to + kTriangleCorner + lane * 16, triangle.corner[0], triangle.corner[1],
               triangle.corner[2], triangle.corner[3]);
  *reinterpret_cast<uint2*>(to + kTrianglePair + lane * 8) = make_uint2(d[1][1], d[1][2]);
}

__device__ __forceinline__ void prepare_chunk(const PrepareParams& p, const Chunk& chunk,
                                              unsigned char* record, uint32_t shared) {
  Lane at;
  at.warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarp, 0);
  at.lane = static_cast<int>(threadIdx.x) % kWarp;
  at.g = at.lane >> 2;
  at.c = at.lane & 3;

  SliceInputs in;
  in.raw_q = shared + kRawQ + at.warp * kRawBytes;
  in.raw_k = shared + kRawK + at.warp * kRawBytes;
  in.raw_g = shared + kRawG + at.warp * kRawBytes;
  in.bias = shared + kBias;
  load_rows(p.k, chunk, at, in.raw_k);
  load_rows(p.q, chunk, at, in.raw_q);
  ptx::copy_async_commit();
  load_rows(p.g, chunk, at, in.raw_g);
  ptx::copy_async_commit();

  in.gate = load_gate(p, chunk.head);
  store_bias(p, in.gate, chunk.head, at, in.bias);
  const float beta = at.warp == 0 ? load_beta(p.beta, chunk, at.lane) : 0.0F;
  in.tilt = chunk.tilt;
  triangle_of_ones(at.g, at.c, in.triangle);
  token_masks(chunk.rows, at.c, in.masks);

  ptx::copy_async_wait<1>();
  __syncwarp();
  const uint32_t squares = shared + kSquares;
  store_squares(in.raw_k, in.raw_q, at, squares);
  ptx::copy_async_wait<0>();
  __syncthreads();
  load_norms(squares, 0, at, in.norm_k);
  load_norms(squares, 1, at, in.norm_q);

  const RecordWriter writer = {record, at};
  PairProducts l, m;
#pragma unroll 1
  for (int slice = 0; slice < kSlicesPerWarp; ++slice) {
    prepare_slice(in, slice, at, writer, l, m);
  }

  // A warp's own raw tiles are no longer needed.
  __syncwarp();
  if (at.warp == 0) {
    store_products(in.raw_k, m, at.lane);
  } else {
    store_products(in.raw_k, l, at.lane);
  }
  __syncthreads();
  const uint32_t other_half = shared + kRawK + (1 - at.warp) * kRawBytes;
  LowerTriangle triangle;
  if (at.warp == 0) {
    add_products(other_half, l, at.lane);
    RowBeta row_beta;
    spread_beta(beta, at.g, row_beta);
    invert(l, row_beta, ptx::rcp_approx(chunk.tilt), in.raw_q, at.lane, triangle);
    store_triangle(record + kRecordT, triangle, at.lane);
  } else {
    add_products(other_half, m, at.lane);
    scale_products(m, chunk.tilt);
    pack_triangle(m, at, triangle);
    store_triangle(record + kRecordM, triangle, at.lane);
  }
}

__global__ void __launch_bounds__(kThreads, kPrepareBlocks)
    prepare_kernel(const __grid_constant__ PrepareParams p) {
  extern __shared__ __align__(128) unsigned char prepare_shared[];
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
  prepare_chunk(p, chunk, p.records + static_cast<int64_t>(index) * kRecordBytes,
                ptx::shared_address(prepare_shared));
}

}  // namespace

const void* prepare_entry() { return reinterpret_cast<const void*>(prepare_kernel); }

Status launch_prepare(const PrepareParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.window.slots * params.heads);
  prepare_kernel<<<blocks, kThreads, kSharedBytes, stream>>>(params);
  return launch_status("prepare_kernel launch");
}

}  // namespace flash_kda::cuda::portable
