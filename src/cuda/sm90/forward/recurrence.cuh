// The serial chain over the chunks of a sequence: one warpgroup holds 64 V rows of the state S in
// fp32 accumulators and feeds it, X and R to the tensor cores as register operands:
//
//   [X | O^T] = [V^T | 0] + S [kd; qd]^T     R = X T^T     S = S d + R kr     O^T += R M^T
//
// kd is stored negative. Operands are fp16: every row of S, X, R and V^T is held times a power of
// two of its own (rows.cuh), by which the output and the final state are divided.
//
// Two warpgroups, one per V half, fill each other's waits; S decays while S [kd; qd]^T runs.
// Nothing is in flight where the loop closes: the compiler would wait for everything there. 128
// registers hold S, its fp16 copy, X and O; the copies of X and R take the place of the one of S.
// Which order of these steps fits the registers without spills, and without products that the
// compiler runs one at a time (its notes C7510 to C7517), was tried out: look for both after every
// change.
#pragma once

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma_f16.cuh"
#include "cuda/sm90/forward/barriers.cuh"
#include "cuda/sm90/forward/schedule.cuh"
#include "cuda/sm90/forward/state.cuh"
#include "cuda/sm90_split/forward/rows.cuh"

namespace flash_kda::cuda::sm90 {

using sm90_split::kTokenRegisters;  // of X and O
using sm90_split::RawValues;

// Operand tiles of a stage as the tensor cores see them; step: 16 elements of the contraction.
__device__ __forceinline__ uint64_t row_operand(uint64_t stage, int step) {  // [kd; qd]
  return stage + ((kStageK + (step / 4) * kStageHalf + (step % 4) * 32) >> 4);
}
__device__ __forceinline__ uint64_t t_operand(uint64_t stage, int step) {
  return stage + ((kStageTM + step * 32) >> 4);
}
__device__ __forceinline__ uint64_t m_operand(uint64_t stage, int step) {
  return stage + ((kStageTM + kRowBytes / 2 + step * 32) >> 4);
}
__device__ __forceinline__ uint64_t update_operand(uint64_t stage, int step) {  // kr
  return stage + ((kStageG + step * 16 * kRowBytes) >> 4);
}

// Registers are scarce: what follows from the thread's number is worked out anew where it is used,
// and slots and parities of all rings from one count.
struct Chain {
  float S[kStateRegisters];
  float XO[2 * kTokenRegisters];     // X, then R; O
  sm90_split::StateOperand operand;  // S in fp16
  sm90_split::RowScale scale;        // of S from the chunk in hand on
  uint32_t shared;                   // shared memory of the CTA
  uint32_t count;                    // chunks of this CTA before the one in hand

  static __device__ __forceinline__ uint32_t lane() { return ptx::thread_index() & 31; }
  static __device__ __forceinline__ uint32_t half() { return ptx::thread_index() / kWarpgroup; }
  __device__ __forceinline__ Barriers barriers() const { return {shared + kSharedBarriers}; }
  __device__ __forceinline__ uint32_t stage() const {
    return shared + kSharedStages + count % kStages * kStageBytes;
  }
  // The stage as an operand: its tiles lie at constant distances. leading counts for kr only.
  __device__ __forceinline__ uint64_t matrices() const {
    return ptx::wgmma_matrix(stage(), kHalfTileBytes, 8 * kRowBytes);
  }
  // This lane's row and piece in the tile of a half of v or out (matrices: tokens 0-7 and 8-15 of
  // both groups of 8 V channels of the warp).
  static __device__ __forceinline__ uint32_t matrix_lane() {
    const uint32_t thread = ptx::thread_index();
    const uint32_t row = thread & 7;
    const uint32_t piece = 2 * (thread % kWarpgroup / 32) + ((thread >> 3) & 1);
    return (((thread >> 4) & 1) * 8 + row) * kRowBytes + ((piece ^ row) << 4);
  }

  // V^T. Tokens from `rows` on lie past the end of the sequence: 0.
  __device__ __forceinline__ void read_values(int32_t rows, RawValues& values) const {
    const int slot = count % kValueTiles;
    ptx::mbarrier_wait(barriers().value_full(slot), count / kValueTiles & 1);
    const uint32_t tile =
        shared + kSharedValues + slot * kTileBytes + half() * kHalfTileBytes + matrix_lane();
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) {
      uint32_t r[4];
      ptx::load_matrix4_transposed(r, tile + j * 16 * kRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * j + i] = r[i];
    }
    if (rows < kChunk) {
      const int column = 2 * (lane() & 3);
#pragma unroll
      for (int i = 0; i < kTokenRegisters / 2; ++i) {
        const int token = 8 * (i >> 1) + column;
        if (token >= rows) values[i] = 0;
        if (token + 1 >= rows) values[i] &= 0xffffU;
      }
    }
  }

  // Only after products were started that take X: the instruction that arrives overtakes reads of
  // shared memory that still wait for their turn behind loads of the state.
  __device__ __forceinline__ void release_values() {
    ptx::warp_arrive(barriers().value_free(count % kValueTiles));
  }

  // S and V^T become operand and accumulator, in units that fit both.
  __device__ __forceinline__ void take_rows(const RawValues& values) {
    uint32_t bits[2];
    sm90_split::pack_state(S, operand, bits);
    float most[2];
    sm90_split::value_maxima(values, most);
    if (sm90_split::some_row_unfit(bits, most, scale)) {
      constexpr float kNothingElse[kTokenRegisters] = {};
      float factor[2];
      sm90_split::fit_rows(S, kNothingElse, most, scale, factor);
      sm90_split::pack_state(S, operand, bits);
    }
    sm90_split::scale_values(values, scale, XO);
  }

  // [X | O] = [X | 0] + S [kd; qd]^T, left in flight.
  __device__ __forceinline__ void start_rows() {
    const uint64_t operands = matrices();
    ptx::hold(XO);
    ptx::wgmma_fence();
    // O begins with a product that takes no accumulators: zeros cost two instructions each. That
    // products of two shapes on the same accumulators come one after the other is what Hopper does;
    // PTX promises it for one shape (docs/hopper.md).
    const uint64_t kd = row_operand(operands, 0), qd = kd + (kHalfTileBytes >> 4);
    ptx::wgmma_f16_n32(XO, operand, kd, true);
    ptx::wgmma_f16_n32(XO + kTokenRegisters, operand, qd, false);
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step) {
      ptx::wgmma_f16_n64(XO, &operand[4 * step], row_operand(operands, step), true);
    }
    ptx::wgmma_commit();
  }

  // S *= d, in parts: a few registers of d at a time.
  __device__ __forceinline__ void decay() {
    const uint32_t d = stage() + kStageDecay + 8 * (lane() & 3);
    constexpr int kColumns = kStateRegisters / 4;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (i % 4 == 0) ptx::hold(S);
      const float2 factor = ptx::load_shared2(d + 32 * i);
      S[4 * i] *= factor.x;
      S[4 * i + 1] *= factor.y;
      S[4 * i + 2] *= factor.x;
      S[4 * i + 3] *= factor.y;
    }
    ptx::hold(S);
  }

  // R = X T^T, S += R kr, O += R M^T; the last two are left in flight.
  __device__ __forceinline__ void update() {
    const uint64_t operands = matrices();
    sm90_split::TokenOperand tokens;
    sm90_split::pack_tokens(XO, tokens);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      ptx::wgmma_f16_n32(XO, &tokens[4 * step], t_operand(operands, step), step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::hold(XO);
    sm90_split::pack_tokens(XO, tokens);
    ptx::hold(S);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      ptx::wgmma_f16_n128_transposed(S, &tokens[4 * step], update_operand(operands, step));
    }
    ptx::wgmma_commit();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      ptx::wgmma_f16_n32(XO + kTokenRegisters, &tokens[4 * step], m_operand(operands, step), true);
    }
    ptx::wgmma_commit();
  }

  // out of the chunk in hand goes to its tile; its stage is done with.
  __device__ __forceinline__ void write_output(float output_scale) {
    const float* O = XO + kTokenRegisters;
    const float factor[2] = {output_scale * scale.inverse[0], output_scale * scale.inverse[1]};
    const int slot = count % kOutputTiles;
    const uint32_t full = barriers().out_full(slot);
    ptx::mbarrier_wait(barriers().out_free(slot), (count / kOutputTiles & 1) ^ 1);
    // Not before: the copying warp has seen the slot's last phase when it has freed the tile.
    ptx::warp_arrive(barriers().drained(slot));
    const uint32_t tile =
        shared + kSharedOutputs + slot * kTileBytes + half() * kHalfTileBytes + matrix_lane();
#pragma unroll
    for (int j = 0; j < kChunk / 16; ++j) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r[i] =
            ptx::pack_bf16(O[8 * j + 2 * i] * factor[i & 1], O[8 * j + 2 * i + 1] * factor[i & 1]);
      }
      ptx::store_matrix4_transposed(tile + j * 16 * kRowBytes, r);
    }
    ptx::fence_async_shared();
    lanes_arrive(full);
  }

  // All chunks of a sequence of `length` > 0 tokens, from S to S.
  __device__ __forceinline__ void run(int32_t length, float output_scale) {
    do {
      RawValues values;
      read_values(length, values);
      take_rows(values);
      ptx::mbarrier_wait(barriers().full(count % kStages), count / kStages & 1);
      start_rows();
      release_values();
      decay();
      ptx::wgmma_wait<0>();
      ptx::hold(XO);
      update();
      ptx::wgmma_wait<0>();
      ptx::hold(S);
      ptx::hold(XO);
      write_output(output_scale);
      ++count;
      length -= kChunk;
    } while (length > 0);
  }
};

// The k-th item or, if that is empty, the first after it that is not. An empty sequence's state is
// passed on.
__device__ __forceinline__ bool next_sequence(const Params& params, const uint16_t* order,
                                              uint32_t& k, int32_t& length, uint32_t& matrix) {
  Item item;
#pragma unroll 1
  for (; nth_item(params, order, k, item); ++k) {
    matrix = static_cast<uint32_t>(item.sequence) * params.heads + item.head;
    length = item.length;
    if (length > 0) return true;
    if (params.final_state != nullptr) {
      pass_state(params.initial_state, params.initial_bf16, params.final_state, params.final_bf16,
                 matrix);
    }
  }
  return false;
}

__device__ __forceinline__ void chain_role(const Params& params, const uint16_t* order,
                                           uint32_t shared) {
  Chain chain;
  chain.shared = shared;
  chain.count = 0;
  uint32_t k = 0, matrix;
  int32_t length;
  void* out = nullptr;
  bool more = next_sequence(params, order, k, length, matrix);
#pragma unroll 1
  while (true) {
    const void* in =
        more ? state_place(params.initial_state, params.initial_bf16, matrix) : nullptr;
    exchange_states(chain.S, chain.scale.inverse, out, params.final_bf16, in, params.initial_bf16);
    if (!more) break;
    chain.scale = {};
    chain.run(length, params.scale);
    out = state_place(params.final_state, params.final_bf16, matrix);
    more = next_sequence(params, order, ++k, length, matrix);
  }
}

}  // namespace flash_kda::cuda::sm90
