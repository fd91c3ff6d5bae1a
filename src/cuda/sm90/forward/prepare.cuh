// Preparation of a chunk by a pair of warps: the raw tiles of a stage become the chain's operands.
// Each warp has all 32 tokens of 64 channels, so that nothing crosses warps per channel; only sums
// over channels do: two norms per token, which are there before, and L and M, of which each warp
// leaves its part.
//
// The chunk is two blocks b of 16 tokens. With G the cumulative sum of w inside a block, P = 2^G
// and Q = 2^-G stay within 2^+-115.5 at any decay, and e_b = 2^(total of block b):
//
//   kd_0 = -k P_0          kd_1 = -k P_1 e_0       (qd = q P alike)      d = e_0 e_1
//   kr_0 = k Q_0 e_0 e_1   kr_1 = k Q_1 e_1
//   L_00 = k P_0 . k Q_0   L_10 = k P_1 . k Q_0 e_0   L_11 = k P_1 . k Q_1   (M alike, rows q P)
//
// The products for L and M take bf16, which has the range of P and Q. What the chain gets (kd, qd,
// kr, T, M) is at most 2 and goes in as fp16; kr and M are multiplied by the chunk's tilt, T is
// divided by it. The norms of k carry its sign: k is negative all along, and the tilt makes up for
// it in kr and M.
//
// Work goes by tiles of 16 tokens x 16 channels (a block of a slice), in the fragments of mma.cuh.
// Three steps of three tiles run interleaved, from chunk to chunk too: gate of the tile after next,
// powers of the next, products of this one.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward/config.h"

namespace flash_kda::cuda::sm90 {

inline constexpr int kSlices = kHalf / 16;  // of a warp
inline constexpr int kBlockBytes = kBlock * kRowBytes;

// What a lane knows for a whole launch. g = lane / 4, c = lane % 4.
struct PrepareLane {
  int lane, g, c, warp;  // warp of the pair: its channel half
  uint32_t a_order;      // the lane's row and piece for matrices in A order: rows 0-7, 8-15 of
                         // the first 8 channels, then of the last 8
  uint32_t b_order;      // in B order: both channel groups of rows 0-7, then of rows 8-15
  uint32_t triangle[4];  // lower triangle of ones, fp16, an A fragment
  uint32_t scratch;      // shared addresses: of the pair's scratch,
  uint32_t bias;         // of this warp's dt_bias
};

__device__ __forceinline__ PrepareLane prepare_lane(int thread, uint32_t shared) {
  PrepareLane self;
  self.lane = thread & 31;
  self.warp = __shfl_sync(~0U, (thread >> 5) & 1, 0);
  self.g = self.lane >> 2;
  self.c = self.lane & 3;
  const int row = self.lane & 7;
  const int first = (self.lane >> 3) & 1;
  const int second = self.lane >> 4;
  self.a_order = (row + 8 * first) * kRowBytes + ((second ^ row) << 4);
  self.b_order = (row + 8 * second) * kRowBytes + ((first ^ row) << 4);
  constexpr uint32_t kOne = 0x3C00;
  const uint32_t both = kOne | kOne << 16;
  const uint32_t lower =
      (2 * self.c <= self.g ? kOne : 0) | (2 * self.c + 1 <= self.g ? kOne << 16 : 0);
  // Zeros that the compiler can't see through keep equal registers apart, as the product needs
  // them, which saves moving them there every time.
  const uint32_t values[4] = {lower, both, 0, lower};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    self.triangle[i] =
        values[i] ^ ptx::load_shared_opaque(shared + kSharedZeros + 4 * ((self.lane + i) & 3));
  }
  self.scratch = shared + kSharedScratch + thread / 64 * kScratchBytes;
  self.bias = shared + kSharedStages + thread / 32 * kStageBytes + kStageBias;
  return self;
}

// The gate of a head: w = half_bound (1 + tanh(g gate_scale + bias)), which is
// lower_bound log2(e) sigmoid(exp(A_log) (g + dt_bias)).
struct HeadGate {
  float gate_scale, half_bound;
};

// One tile in flight.
struct Tile {
  uint32_t w[4];     // log2 decays, fp16, B fragments of both channel groups
  float P[8], Q[8];  // 2^G, 2^-G in A order
  uint32_t k[4], q[4];
};

// The partial sums of a warp. Blocks 00, 10, 11; two accumulators of 8 columns each.
struct Products {
  float L[3][2][4], M[3][2][4];
  float e0[2][2], e1[2][2];  // block totals of the slice, by channel group
  float kQe[8];              // k Q_0 e_0, fp32, and as B fragments
  uint32_t kQe_bf16[4];
};

// Where a chunk lies, for a lane of this warp: the first tile of its channels. The tiles of the
// other slices differ in bits that are 0 here but for the lane's piece.
struct Place {
  uint32_t k;      // k in A order, q behind it
  uint32_t g, kr;  // g in A order, kr, which takes its place, in B order
  __device__ __forceinline__ void set(const PrepareLane& self, uint32_t stage) {
    k = stage + kStageK + self.warp * kStageHalf + self.a_order;
    g = stage + kStageG + self.warp * kHalfTileBytes + self.a_order;
    kr = stage + kStageG + self.warp * kHalfTileBytes + self.b_order;
  }
  static __device__ __forceinline__ uint32_t at(uint32_t place, int slice) {
    return place ^ (slice << 5);
  }
};

struct Preparation {
  const PrepareLane& self;
  HeadGate gate_constants;  // of the slice ahead
  float tilt;               // tilt.cuh
  float shift[2];           // the biases of the slice ahead, by channel group
  uint32_t stage;           // shared address
  Place here, ahead;        // of the chunk in hand; of the slice after the one in hand
  Tile tile[2];
  Products sum;
  float k_norm[2][2], q_norm[2][2];  // -1/|k|, 1/|q|: [block][row g, g + 8]

  static constexpr uint32_t kToQ = kStageQ - kStageK;

  template <int kB>
  __device__ __forceinline__ void gate(int slice) {
    uint32_t raw[4];
    ptx::load_matrix4_transposed(raw, Place::at(ahead.g, slice) + kB * kBlockBytes);
    if (kB == 0) {
      const uint32_t bias = self.bias + 4 * self.g + 64 * slice;
      shift[0] = ptx::load_shared(bias);
      shift[1] = ptx::load_shared(bias + 32);
    }
    const float a = gate_constants.gate_scale, w = gate_constants.half_bound;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = fmaf(ptx::low_bf16(raw[i]), a, shift[i >> 1]);
      const float y = fmaf(ptx::high_bf16(raw[i]), a, shift[i >> 1]);
      tile[kB].w[i] =
          ptx::pack_f16(fmaf(ptx::tanh_approx(x), w, w), fmaf(ptx::tanh_approx(y), w, w));
    }
  }

  // Cumulative sums by a product with the triangle of ones.
  template <int kB>
  __device__ __forceinline__ void powers() {
    Tile& t = tile[kB];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float G[4];
      ptx::mma_f16_zero(G, self.triangle, t.w[2 * h], t.w[2 * h + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        t.P[4 * h + i] = ptx::exp2_approx(G[i]);
        t.Q[4 * h + i] = ptx::exp2_approx(-G[i]);
      }
    }
  }

  template <int kB>
  __device__ __forceinline__ void read_keys(uint32_t place) {
    ptx::load_matrix4(tile[kB].q, place + kToQ + kB * kBlockBytes);
    ptx::load_matrix4(tile[kB].k, place + kB * kBlockBytes);
  }

  // Row 15 of a block's P is the block's total.
  template <int kB>
  __device__ __forceinline__ void totals(float (&e)[2][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      e[h][0] = __shfl_sync(~0U, tile[kB].P[4 * h + 2], 28 + self.c);
      e[h][1] = __shfl_sync(~0U, tile[kB].P[4 * h + 3], 28 + self.c);
    }
  }

  // d of the slice's channels; from here on e1 is tilted, for kr.
  __device__ __forceinline__ void finish_totals(int slice) {
    const uint32_t d = stage + kStageDecay + 4 * (self.warp * kHalf + 16 * slice + 2 * self.c);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ptx::store_shared2_if(self.g == 0, d + 32 * h, sum.e0[h][0] * sum.e1[h][0],
                            sum.e0[h][1] * sum.e1[h][1]);
      sum.e1[h][0] *= -tilt;
      sum.e1[h][1] *= -tilt;
    }
  }

  // k P, q P in A order and k Q in B order, of one tile, before and after rounding.
  struct Operands {
    float kP[8], qP[8], kQ[8];
    uint32_t kP_bf16[4], qP_bf16[4], kQ_bf16[4];
  };
  template <int kB>
  __device__ __forceinline__ void operands(Operands& o) {
    const Tile& t = tile[kB];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int j = 2 * h + r;
        const float k0 = ptx::low_bf16(t.k[j]) * k_norm[kB][r];
        const float k1 = ptx::high_bf16(t.k[j]) * k_norm[kB][r];
        const float q0 = ptx::low_bf16(t.q[j]) * q_norm[kB][r];
        const float q1 = ptx::high_bf16(t.q[j]) * q_norm[kB][r];
        o.kP[2 * j] = k0 * t.P[2 * j];
        o.kP[2 * j + 1] = k1 * t.P[2 * j + 1];
        o.qP[2 * j] = q0 * t.P[2 * j];
        o.qP[2 * j + 1] = q1 * t.P[2 * j + 1];
        o.kQ[2 * j] = k0 * t.Q[2 * j];
        o.kQ[2 * j + 1] = k1 * t.Q[2 * j + 1];
        o.kP_bf16[j] = ptx::pack_bf16(o.kP[2 * j], o.kP[2 * j + 1]);
        o.qP_bf16[j] = ptx::pack_bf16(o.qP[2 * j], o.qP[2 * j + 1]);
        o.kQ_bf16[2 * r + h] = ptx::pack_bf16(o.kQ[2 * j], o.kQ[2 * j + 1]);
      }
    }
  }

  // Blocks [block] of L and M += this slice's share.
  __device__ __forceinline__ void accumulate(int block, const Operands& rows,
                                             const uint32_t (&columns)[4]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::mma_bf16(sum.L[block][n], rows.kP_bf16, columns[2 * n], columns[2 * n + 1]);
      ptx::mma_bf16(sum.M[block][n], rows.qP_bf16, columns[2 * n], columns[2 * n + 1]);
    }
  }

  // Operands of the chain, fp16. With factors by channel in A order: element pair j = 2 h + r has
  // those of channel group h.
  static __device__ __forceinline__ uint32_t scaled(const float* x, int j, const float (&e)[2][2]) {
    return ptx::pack_f16(x[2 * j] * e[j >> 1][0], x[2 * j + 1] * e[j >> 1][1]);
  }
  __device__ __forceinline__ void first_block(int slice) {
    Operands o;
    operands<0>(o);
    totals<0>(sum.e0);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum.kQe[2 * j] = o.kQ[2 * j] * sum.e0[j >> 1][0];
      sum.kQe[2 * j + 1] = o.kQ[2 * j + 1] * sum.e0[j >> 1][1];
      sum.kQe_bf16[2 * (j & 1) + (j >> 1)] = ptx::pack_bf16(sum.kQe[2 * j], sum.kQe[2 * j + 1]);
    }
    accumulate(0, o, o.kQ_bf16);
    uint32_t kd[4], qd[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      kd[j] = ptx::pack_f16(o.kP[2 * j], o.kP[2 * j + 1]);
      qd[j] = ptx::pack_f16(o.qP[2 * j], o.qP[2 * j + 1]);
    }
    ptx::store_matrix4(Place::at(here.k, slice), kd);
    ptx::store_matrix4(Place::at(here.k, slice) + kToQ, qd);
    totals<1>(sum.e1);
    finish_totals(slice);
    uint32_t kr[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) kr[2 * (j & 1) + (j >> 1)] = scaled(sum.kQe, j, sum.e1);
    ptx::store_matrix4(Place::at(here.kr, slice), kr);
  }

  __device__ __forceinline__ void second_block(int slice) {
    Operands o;
    operands<1>(o);
    accumulate(1, o, sum.kQe_bf16);
    accumulate(2, o, o.kQ_bf16);
    uint32_t kd[4], qd[4], kr[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      kd[j] = scaled(o.kP, j, sum.e0);
      qd[j] = scaled(o.qP, j, sum.e0);
      kr[2 * (j & 1) + (j >> 1)] = scaled(o.kQ, j, sum.e1);
    }
    ptx::store_matrix4(Place::at(here.k, slice) + kBlockBytes, kd);
    ptx::store_matrix4(Place::at(here.k, slice) + kToQ + kBlockBytes, qd);
    ptx::store_matrix4(Place::at(here.kr, slice) + kBlockBytes, kr);
  }

  __device__ __forceinline__ void read_norms() {
    const uint32_t at = stage + kStageNorms + self.g * 16;
    const float4 k = ptx::load_shared4(at), q = ptx::load_shared4(at + 128);
    k_norm[0][0] = k.x, k_norm[0][1] = k.y, k_norm[1][0] = k.z, k_norm[1][1] = k.w;
    q_norm[0][0] = q.x, q_norm[0][1] = q.y, q_norm[1][0] = q.z, q_norm[1][1] = q.w;
  }

  // The first tiles of the slice ahead, as slice() leaves them.
  __device__ __forceinline__ void start() {
    gate<0>(0);
    gate<1>(0);
    read_keys<0>(ahead.k);
    powers<0>();
  }

  __device__ __forceinline__ void slice(int s) {
    const int next = (s + 1) % kSlices;
    gate<0>(next);
    read_keys<1>(Place::at(here.k, s));
    powers<1>();
    first_block(s);
    gate<1>(next);
    read_keys<0>(Place::at(ahead.k, next));
    powers<0>();
    second_block(s);
  }

  // The chunk in hand: kd, qd, kr and d come into the stage, this warp's part of L and M into
  // `sum`. turn: called before the last slice, to put `ahead` and the gate's constants to the next
  // chunk.
  template <typename Turn>
  __device__ __forceinline__ void run(Turn turn) {
    here = ahead;
    read_norms();
#pragma unroll
    for (int block = 0; block < 3; ++block) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum.L[block][i >> 2][i & 3] = sum.M[block][i >> 2][i & 3] = 0.0F;
    }
    constexpr int kLast = kSlices - 1;
    // A loop: less code to fetch. The turn at its end, so that the slices run straight on.
    int s = 0;
#pragma unroll 1
    while (true) {
      slice(s);
      if (s == kLast) break;
      ++s;
      if (s == kLast) turn();
    }
  }
};

}  // namespace flash_kda::cuda::sm90
