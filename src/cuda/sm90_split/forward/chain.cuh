// The serial chain of a segment's chunks, by one warpgroup for its 64 rows (rows.cuh). The state
// stays in accumulators; its fp16 copy, X and R are register operands; the rest of a chunk comes
// from a stage, which holds its record:
//
//   X = V^T - S kd^T      R = X T^T      O^T = S qd^T + R M^T      S <- S d + R kr
//
// While the tensor cores work, the warps look at the next values, store the last chunk's O and
// fetch v. Nothing is in flight where the loop closes, S decays before X starts, and S and O are
// made and used within one turn of the loop: otherwise the compiler adds waits.
#pragma once

#include <cstdint>

#include "cuda/portable/forward/plan.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/ptx/wgmma_f16.cuh"
#include "cuda/sm90_split/forward/params.h"
#include "cuda/sm90_split/forward/rows.cuh"

namespace flash_kda::cuda::sm90_split {

// The ring of stages: barriers full[stage] (the producer's arrival and the record's bytes) and
// empty[stage] (an arrival of each chain warp).
struct Ring {
  uint32_t stages, barriers;
  int count;

  __device__ __forceinline__ uint32_t stage(int slot) const { return stages + slot * kStageBytes; }
  __device__ __forceinline__ uint32_t full(int slot) const {
    return barriers + slot * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t empty(int slot) const { return full(count + slot); }
};

// A slot of the ring and the parity of its phase, moving on together.
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int count) {
    if (++slot == count) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Operands in a stage, as matrices of the tensor cores; step: 16 elements of the contraction.
__device__ __forceinline__ uint64_t stage_matrix(uint32_t stage) {
  return ptx::wgmma_matrix(stage, kPanelBytes, 8 * kRowBytes);  // the panel distance is kr's
}
__device__ __forceinline__ uint64_t channel_step(uint64_t stage, int step) {  // [-kd; qd]
  return stage + ((kRecordKd + (step / 4) * kHalfBytes + (step % 4) * 32) >> 4);
}
__device__ __forceinline__ uint64_t t_step(uint64_t stage, int step) {
  return stage + ((kRecordTM + step * 32) >> 4);
}
__device__ __forceinline__ uint64_t m_step(uint64_t stage, int step) {
  return stage + ((kRecordTM + kRowBytes / 2 + step * 32) >> 4);
}
__device__ __forceinline__ uint64_t update_step(uint64_t stage, int step) {
  return stage + ((kRecordKr + step * 16 * kRowBytes) >> 4);
}

// S <- S d.
__device__ __forceinline__ void decay_state(uint32_t stage, int lane, StateRows& state) {
  const uint32_t d = stage + kRecordDecay + 8 * (lane & 3);
#pragma unroll
  for (int i = 0; i < kStateRegisters / 4; ++i) {
    if (i % 4 == 0) ptx::hold(state);
    const float2 factor = ptx::load_shared2(d + 32 * i);
    state[4 * i] *= factor.x;
    state[4 * i + 1] *= factor.y;
    state[4 * i + 2] *= factor.x;
    state[4 * i + 3] *= factor.y;
  }
}

// A warp's tile of v or out, [32 tokens][16 V rows] bf16: 32 bytes a token, whose halves change
// places every four tokens, so that 8x8 matrices are read and written free of conflicts.
__device__ __forceinline__ int value_offset(int token, int half) {
  return token * 32 + ((half ^ ((token >> 2) & 1)) << 4);
}
// What this lane gives to load_matrix4 or store_matrix4 for tokens 16 b ... .
__device__ __forceinline__ uint32_t value_matrix(uint32_t tile, int b, int lane) {
  return tile + value_offset(16 * b + (lane & 7) + 8 * (lane >> 4), (lane >> 3) & 1);
}

// 16 bytes to global memory in the lanes that want it, without a branch.
__device__ __forceinline__ void store_global_if(bool wanted, void* to, const uint4& x) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<int>(wanted)),
      "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}

// The tokens of v and out that belong to a warp: 16 V rows of a sequence and head.
struct WarpTokens {
  const uint16_t* v = nullptr;  // at the sequence's first token and the lane's 8 rows
  uint16_t* out = nullptr;
  int64_t v_stride = 0, out_stride = 0;  // from token to token
  int64_t length = 0;                    // of the sequence; v counts as zeros from there on
  int32_t begin = 0;                     // first chunk, before which nothing is written
  uint32_t tiles = 0;                    // kValueStages tiles of v, then one of out
  int lane = 0;

  __device__ __forceinline__ uint32_t tile(int32_t chunk) const {
    return tiles + static_cast<uint32_t>(chunk) % kValueStages * kValueTileBytes;
  }

  // Queues this lane's share of the copies of a chunk's v; zeros where the sequence has ended.
  __device__ __forceinline__ void fetch(int32_t chunk) const {
    const int64_t first = static_cast<int64_t>(chunk) * kChunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 16 * i + (lane >> 1);
      const bool exists = first + token < length;
      ptx::copy_async16_or_zero(tile(chunk) + value_offset(token, lane & 1),
                                v + (exists ? first + token : 0) * v_stride, exists);
    }
  }

  __device__ __forceinline__ void read(int32_t chunk, RawValues& values) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t x[4];
      ptx::load_matrix4_transposed(x, value_matrix(tile(chunk), b, lane));
#pragma unroll
      for (int e = 0; e < 4; ++e) values[4 * b + e] = x[e];
    }
  }

  __device__ __forceinline__ uint32_t out_tile() const {
    return tiles + kValueStages * kValueTileBytes;
  }

  // Rounds O^T (kTokenRegisters floats) and turns it round in the tile of out; a warp's barrier
  // before it says that the tile has been read.
  __device__ __forceinline__ void put(const float* o, const float (&factor)[2]) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] =
            ptx::pack_bf16(o[8 * b + 2 * e] * factor[e & 1], o[8 * b + 2 * e + 1] * factor[e & 1]);
      }
      ptx::store_matrix4_transposed(value_matrix(out_tile(), b, lane), x);
    }
  }

  // Writes the tile's rows of tokens that exist.
  __device__ __forceinline__ void write(int32_t chunk) const {
    __syncwarp();
    const int64_t first = static_cast<int64_t>(chunk) * kChunk;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 16 * i + (lane >> 1);
      const uint4 x = ptx::load_shared_words4(out_tile() + value_offset(token, lane & 1));
      store_global_if(chunk >= begin && first + token < length, out + (first + token) * out_stride,
                      x);
    }
    __syncwarp();
  }
};

// 0, in one instruction: the compiler takes two, through a uniform register.
__device__ __forceinline__ float zero() {
  float x;
  asm volatile("mov.b32 %0, 0;" : "=f"(x));
  return x;
}

// One warpgroup's rows on their way through a segment. A chunk is read (X, R and the state's part
// of O), then the state is updated and O completed.
template <bool kOutput>
struct Chain {
  StateRows state;           // S before the chunk; read() multiplies it by d
  RowScale scale;            // of S from the next update on
  TokenOperand r, r_update;  // R in the units of O and of S, which differ where rows were fitted
  float xo[(kOutput ? 2 : 1) * kTokenRegisters];  // X, then R; O
  RawValues values;                               // of the next chunk to read
  float out_factor[2] = {};

  __device__ __forceinline__ float* o() { return xo + kTokenRegisters; }

  // Waits for the first values and fits the rows; S is there. R is zeros.
  __device__ __forceinline__ void begin(const WarpTokens& tokens) {
#pragma unroll
    for (int i = 0; i < kValueStages - 1; ++i) {
      tokens.fetch(tokens.begin + i);
      ptx::copy_async_commit();
    }
    ptx::copy_async_wait<kValueStages - 2>();
    __syncwarp();
    tokens.read(tokens.begin, values);
    float value_most[2];
    value_maxima(values, value_most);
#pragma unroll
    for (int i = 0; i < (kOutput ? 2 : 1) * kTokenRegisters; ++i) xo[i] = 0.0F;
#pragma unroll
    for (int i = 0; i < kTokenRegisters / 2; ++i) r[i] = r_update[i] = 0;
    float factor[2];
    fit_rows(state, xo, value_most, scale, factor);
  }

  // X = V^T - S kd^T and O^T = S qd^T start, with V^T and zeros in place.
  __device__ __forceinline__ void start_reading(const StateOperand& operand, uint64_t matrix) {
    ptx::hold(xo);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      if constexpr (kOutput) {
        ptx::wgmma_f16_n64(xo, &operand[4 * step], channel_step(matrix, step), true);
      } else {
        ptx::wgmma_f16_n32(xo, &operand[4 * step], channel_step(matrix, step), true);
      }
    }
    ptx::wgmma_commit();
  }

  // A chunk in `stage`; writes O of the chunk before. No branches before the last wait, and no
  // operand is made while a product is under way, or the compiler waits at once.
  __device__ __forceinline__ void read(const WarpTokens& tokens, int32_t chunk, float out_scale,
                                       uint32_t stage, uint32_t full, uint32_t parity) {
    const uint64_t matrix = stage_matrix(stage);
    StateOperand operand;
    uint32_t bits[2];
    pack_state(state, operand, bits);
    scale_values(values, scale, xo);
#pragma unroll
    for (int i = kTokenRegisters; i < (kOutput ? 2 : 1) * kTokenRegisters; ++i) xo[i] = zero();
    ptx::mbarrier_wait(full, parity);
    decay_state(stage, tokens.lane, state);
    start_reading(operand, matrix);
    ptx::copy_async_wait<kValueStages - 3>();
    __syncwarp();
    tokens.read(chunk + 1, values);
    float value_most[2];
    value_maxima(values, value_most);
    const bool unfit = some_row_unfit(bits, value_most, scale);
    if constexpr (kOutput) tokens.write(chunk - 1);
    ptx::wgmma_wait<0>();
    ptx::hold(xo);

    TokenOperand x_operand;
    pack_tokens(xo, x_operand);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      ptx::wgmma_f16_n32(xo, &x_operand[4 * step], t_step(matrix, step), step > 0);
    }
    ptx::wgmma_commit();
    tokens.fetch(chunk + kValueStages - 1);
    ptx::copy_async_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(xo);
    pack_tokens(xo, r);
#pragma unroll
    for (int i = 0; i < kTokenRegisters / 2; ++i) r_update[i] = r[i];
    out_factor[0] = out_scale * scale.inverse[0];
    out_factor[1] = out_scale * scale.inverse[1];
    if (unfit) refit(value_most);
  }

  // Gives S and R new units. |S + R kr| <= |S| + 64 max |R|.
  __device__ __forceinline__ void refit(const float (&value_most)[2]) {
    float factor[2];
    fit_rows(state, xo, value_most, scale, factor);
    float scaled[kTokenRegisters];
#pragma unroll
    for (int i = 0; i < kTokenRegisters; ++i) scaled[i] = xo[i] * factor[(i >> 1) & 1];
    pack_tokens(scaled, r_update);
  }

  // S += R kr, O += R M^T, and O goes to the tile of out. The stage is then free.
  __device__ __forceinline__ void update(const WarpTokens& tokens, uint32_t stage) {
    const uint64_t matrix = stage_matrix(stage);
    ptx::hold(state);
    if constexpr (kOutput) ptx::hold(xo);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      ptx::wgmma_f16_n128_transposed(state, &r_update[4 * step], update_step(matrix, step));
    }
    if constexpr (kOutput) {
#pragma unroll
      for (int step = 0; step < kChunk / 16; ++step) {
        ptx::wgmma_f16_n32(o(), &r[4 * step], m_step(matrix, step), true);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(state);
    if constexpr (kOutput) {
      ptx::hold(xo);
      tokens.put(o(), out_factor);
    }
  }
};

// Runs chunks tokens.begin ... end - 1 from chain.state to chain.state. The first turn of the loop
// updates with an R of zeros, so that there is one copy of its code.
template <bool kOutput>
__device__ __forceinline__ void run_chain(Chain<kOutput>& chain, const WarpTokens& tokens,
                                          int32_t end, const Ring& ring, float out_scale) {
  chain.begin(tokens);
  ptx::mbarrier_wait(ring.full(0), 0);
  Cursor cursor;
  int before = 0;
#pragma unroll 1
  for (int32_t chunk = tokens.begin; chunk < end; ++chunk) {
    chain.update(tokens, ring.stage(before));
    if (chunk > tokens.begin) ptx::warp_arrive(ring.empty(before));
    chain.read(tokens, chunk, out_scale, ring.stage(cursor.slot), ring.full(cursor.slot),
               cursor.parity);
    before = cursor.slot;
    cursor.advance(ring.count);
  }
  chain.update(tokens, ring.stage(before));
  if constexpr (kOutput) tokens.write(end - 1);
}

}  // namespace flash_kda::cuda::sm90_split
