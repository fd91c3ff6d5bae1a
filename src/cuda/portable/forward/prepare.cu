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
#include "cuda/portable/forward/gate.cuh"
#include "cuda/portable/forward/inverse.cuh"
#include "cuda/portable/forward/launch.h"
#include "cuda/portable/forward/numbers.cuh"
#include "cuda/portable/forward/params.h"
#include "cuda/portable/forward/products.cuh"
#include "cuda/portable/forward/record.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "ops/forward/spec.h"

namespace flash_kda::cuda::portable {
namespace {

constexpr int kThreads = kWarp * kPrepareWarps;
constexpr int kBlocksPerMultiprocessor = 8;  // what 128 registers a thread allow
constexpr int kRawRowBytes = 128;
constexpr int kRawBytes = kChunk * kRawRowBytes;  // one tensor, one warp's channels
constexpr int kRawQ = 0;
constexpr int kRawK = kRawQ + kPrepareWarps * kRawBytes;
constexpr int kRawG = kRawK + kPrepareWarps * kRawBytes;
constexpr int kSquares = kRawG + kPrepareWarps * kRawBytes;
constexpr int kBias = kSquares + kPrepareWarps * 2 * 8 * 16;
constexpr int kSharedBytes = kBias + kHeadDim * 4;
static_assert(kInverseBytes <= kRawBytes && 6 * kWarp * 16 <= kRawBytes);

// What a warp works on.
struct Chunk {
  int64_t batch, token;
  int head;
  int rows;    // tokens that exist
  float tilt;  // see record.cuh
};

// From [1, 2), different for each chunk of a sequence.
__device__ __forceinline__ float chunk_tilt(uint32_t chunk) {
  constexpr uint32_t kGoldenRatio = 0x9e3779b1U;
  constexpr uint32_t kOne = 0x3f800000U;  // fp32
  return __uint_as_float(kOne | (chunk * kGoldenRatio) >> 9);
}

struct Lane {
  int warp, lane, g, c;
};

// This warp's 64 channels of the chunk's rows; rows that do not exist become zeros.
__device__ __forceinline__ void load_rows(const Rows& rows, const Chunk& chunk, const Lane& at,
                                          uint32_t to) {
  const int column = at.lane & 7;
  const auto* source = static_cast<const uint16_t*>(rows.data) + chunk.batch * rows.batch_stride +
                       chunk.token * rows.token_stride + chunk.head * kHeadDim + 64 * at.warp +
                       8 * column;
#pragma unroll
  for (int i = 0; i < kChunk / 4; ++i) {
    const int row = 4 * i + (at.lane >> 3);
    const bool exists = row < chunk.rows;
    ptx::copy_async16_or_zero(to + row * kRawRowBytes + ((column ^ (row & 7)) << 4),
                              source + (exists ? row : 0) * rows.token_stride, exists);
  }
}

// Address that this lane gives to load_matrix4 for the tile (block, slice of this warp).
__device__ __forceinline__ uint32_t tile_address(uint32_t raw, int block, int slice, int lane) {
  const int row = lane & 15;
  return raw + (16 * block + row) * kRawRowBytes + (((2 * slice + (lane >> 4)) ^ (row & 7)) << 4);
}

// Sums of squares over this warp's channels: the diagonal of X X^T, for rows 8 r + g of block b at
// [2 b + r]. Valid in the lanes with c = g / 2 only.
__device__ __forceinline__ void sum_squares(uint32_t raw, const Lane& at, float (&sums)[4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    float low[4] = {}, high[4] = {};  // columns 0 ... 7 and 8 ... 15 of the product
#pragma unroll
    for (int s = 0; s < kSlicesPerWarp; ++s) {
      uint32_t x[4];
      ptx::load_matrix4(x, tile_address(raw, b, s, at.lane));
      ptx::mma_bf16(low, x, x[0], x[2]);
      ptx::mma_bf16(high, x, x[1], x[3]);
    }
    sums[2 * b] = at.g & 1 ? low[1] : low[0];
    sums[2 * b + 1] = at.g & 1 ? high[3] : high[2];
  }
}

// 1 / norm of rows 8 r + g of block b, from both warps' sums of squares.
using RowNorms = float[kBlocks][2];
__device__ __forceinline__ void load_norms(uint32_t squares, int which, const Lane& at,
                                           RowNorms& norms) {
  const float4 a = ptx::load_shared4(squares + (which * 8 + at.g) * 16);
  const float4 b = ptx::load_shared4(squares + ((2 + which) * 8 + at.g) * 16);
  norms[0][0] = ptx::rsqrt_approx(a.x + b.x + kNormEpsilon);
  norms[0][1] = ptx::rsqrt_approx(a.y + b.y + kNormEpsilon);
  norms[1][0] = ptx::rsqrt_approx(a.z + b.z + kNormEpsilon);
  norms[1][1] = ptx::rsqrt_approx(a.w + b.w + kNormEpsilon);
}

__device__ __forceinline__ Gate load_gate(const PrepareParams& p, int head) {
  const float a_log =
      p.A_log.data == nullptr ? 0.0F : load_number(p.A_log.data, p.A_log.dtype, head);
  return {-kLog2e * ptx::exp2_approx(a_log * kLog2e), p.inverse_bound};
}

// slope * dt_bias of this warp's channels.
__device__ __forceinline__ void store_bias(const PrepareParams& p, const Gate& gate, int head,
                                           const Lane& at, uint32_t to) {
  const int channel = 64 * at.warp + 2 * at.lane;
  float2 bias = make_float2(0.0F, 0.0F);
  if (p.dt_bias.data != nullptr) {
    const int64_t index = static_cast<int64_t>(head) * kHeadDim + channel;
    bias.x = load_number(p.dt_bias.data, p.dt_bias.dtype, index);
    bias.y = load_number(p.dt_bias.data, p.dt_bias.dtype, index + 1);
  }
  ptx::store_shared2(to + channel * 4, gate.slope * bias.x, gate.slope * bias.y);
}

// beta of the chunk's token `lane`; 0 where there is none.
__device__ __forceinline__ float load_beta(const Logits& beta, const Chunk& chunk, int lane) {
  if (lane >= chunk.rows) return 0.0F;
  const float logit =
      load_number(beta.data, beta.dtype,
                  chunk.batch * beta.batch_stride + (chunk.token + lane) * beta.token_stride +
                      chunk.head * beta.head_stride);
  return ptx::rcp_approx(1.0F + ptx::exp2_approx(-kLog2e * logit));
}

// Masks for gate words: tokens that do not exist decay nothing. [b][r], tokens 8 r + 2c, + 1.
using TokenMasks = uint32_t[kBlocks][2];
__device__ __forceinline__ void token_masks(int rows, int c, TokenMasks& masks) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = 16 * b + 8 * r + 2 * c;
      masks[b][r] = (token < rows ? 0xffffU : 0) | (token + 1 < rows ? 0xffff0000U : 0);
    }
  }
}

struct SliceInputs {
  uint32_t raw_q, raw_k, raw_g;  // this warp's tiles
  uint32_t bias;                 // of channel 0
  Gate gate;
  uint32_t triangle[4];
  TokenMasks masks;
  RowNorms norm_q, norm_k;
  float tilt;
};

__device__ __forceinline__ void slice_decays(const SliceInputs& in, int block, int slice,
                                             const Lane& at, Tile& power, Tile& inverse) {
  uint32_t w[4];
  ptx::load_matrix4_transposed(w, tile_address(in.raw_g, block, slice, at.lane));
  const uint32_t bias = in.bias + (64 * at.warp + 16 * slice + at.g) * 4;
  const float bias_of_h[2] = {ptx::load_shared(bias), ptx::load_shared(bias + 8 * 4)};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    w[e] = gate_pair(in.gate, w[e], bias_of_h[e >> 1]) & in.masks[block][e & 1];
  }
  decay_powers(in.triangle, w, power, inverse);
}

__device__ __forceinline__ void load_normalized(uint32_t raw, int block, int slice, int lane,
                                                const float (&norm)[2], Tile& tile) {
  uint32_t words[4];
  ptx::load_matrix4(words, tile_address(raw, block, slice, lane));
  normalize_tile(words, norm, tile);
}

// 16 channels: their tiles of kd, qd, kr and d to the record, their part of the products to l, m.
__device__ __forceinline__ void prepare_slice(const SliceInputs& in, int slice, const Lane& at,
                                              unsigned char* record, PairProducts& l,
                                              PairProducts& m) {
  const int channels = kSlicesPerWarp * at.warp + slice;
  Tile power[kBlocks], inverse[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) slice_decays(in, b, slice, at, power[b], inverse[b]);
  ChannelFactor decay[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) block_decay(power[b], at.c, decay[b]);

  Tile k, q, left_k, left_q, right0, right1;
  load_normalized(in.raw_k, 0, slice, at.lane, in.norm_k[0], k);
  load_normalized(in.raw_q, 0, slice, at.lane, in.norm_q[0], q);
  multiply(k, power[0], left_k);
  multiply(q, power[0], left_q);
  multiply(k, inverse[0], right0);
  store_negative_tile(record + kRecordKd + tile_offset(0, channels, at.lane), left_k);
  store_tile(record + kRecordQd + tile_offset(0, channels, at.lane), left_q);
  add_product(l.block[kBlock00], left_k, right0);
  add_product(m.block[kBlock00], left_q, right0);
  scale_channels(right0, decay[0]);

  load_normalized(in.raw_k, 1, slice, at.lane, in.norm_k[1], k);
  load_normalized(in.raw_q, 1, slice, at.lane, in.norm_q[1], q);
  multiply(k, power[1], left_k);
  multiply(q, power[1], left_q);
  multiply(k, inverse[1], right1);
  add_product(l.block[kBlock10], left_k, right0);
  add_product(m.block[kBlock10], left_q, right0);
  add_product(l.block[kBlock11], left_k, right1);
  add_product(m.block[kBlock11], left_q, right1);
  scale_channels(left_k, decay[0]);
  scale_channels(left_q, decay[0]);
  ChannelFactor tilted_decay;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) tilted_decay[h][i] = decay[1][h][i] * in.tilt;
  }
  scale_channels(right0, tilted_decay);
  scale_channels(right1, tilted_decay);
  store_negative_tile(record + kRecordKd + tile_offset(1, channels, at.lane), left_k);
  store_tile(record + kRecordQd + tile_offset(1, channels, at.lane), left_q);
  store_transposed_tile(record + kRecordKr + tile_offset(0, channels, at.lane), right0);
  store_transposed_tile(record + kRecordKr + tile_offset(1, channels, at.lane), right1);
  if (at.g == 0) {
    *reinterpret_cast<float4*>(record + kRecordDecay + decay_offset(channels, at.c)) =
        make_float4(decay[0][0][0] * decay[1][0][0], decay[0][0][1] * decay[1][0][1],
                    decay[0][1][0] * decay[1][1][0], decay[0][1][1] * decay[1][1][1]);
  }
}

__device__ __forceinline__ void store_products(uint32_t to, const PairProducts& products,
                                               int lane) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      ptx::store_shared4(to + ((2 * b + t) * kWarp + lane) * 16, products.block[b][t]);
    }
  }
}

__device__ __forceinline__ void add_products(uint32_t from, PairProducts& products, int lane) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float4 x = ptx::load_shared4(from + ((2 * b + t) * kWarp + lane) * 16);
      products.block[b][t][0] += x.x;
      products.block[b][t][1] += x.y;
      products.block[b][t][2] += x.z;
      products.block[b][t][3] += x.w;
    }
  }
}

__device__ __forceinline__ void scale_products(PairProducts& products, float factor) {
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products.block[b][t][i] *= factor;
    }
  }
}

// M's lower triangle in fp16; what lies above may be huge and is left out by selection.
__device__ __forceinline__ void pack_triangle(const PairProducts& m, const Lane& at,
                                              LowerTriangle& triangle) {
  const bool first = 2 * at.c <= at.g;
  const bool second = 2 * at.c + 1 <= at.g;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const BlockProduct& d = m.block[b == 0 ? kBlock00 : kBlock11];
    triangle.diagonal[b][0] = ptx::pack_f16(first ? d[0][0] : 0.0F, second ? d[0][1] : 0.0F);
    triangle.diagonal[b][1] = ptx::pack_f16(d[0][2], d[0][3]);
    triangle.diagonal[b][2] = ptx::pack_f16(first ? d[1][2] : 0.0F, second ? d[1][3] : 0.0F);
  }
  const BlockProduct& corner = m.block[kBlock10];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      triangle.corner[2 * r + h] = ptx::pack_f16(corner[h][2 * r], corner[h][2 * r + 1]);
    }
  }
}

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

  PairProducts l, m;
#pragma unroll 1
  for (int slice = 0; slice < kSlicesPerWarp; ++slice) {
    prepare_slice(in, slice, at, record, l, m);
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
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_beta[b][r] = __shfl_sync(0xffffffffU, beta, 16 * b + 8 * r + at.g);
      }
    }
    invert(l, row_beta, ptx::rcp_approx(chunk.tilt), in.raw_q, at.lane, triangle);
    store_triangle(record + kRecordT, triangle, at.lane);
  } else {
    add_products(other_half, m, at.lane);
    scale_products(m, chunk.tilt);
    pack_triangle(m, at, triangle);
    store_triangle(record + kRecordM, triangle, at.lane);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
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
