// A warpgroup's 64 rows of the state in registers, and a power of two per row that keeps the row
// inside fp16's range: S, X, R and v of a row are held times `unit`, exactly, and results are
// divided by it. Rows never meet, so nothing else changes.
//
// Lane (g = lane / 4, c = lane % 4) of warp w holds rows 16 w + g + 8 r: of the state columns
// 8 i + 2 c + e in S[4 i + 2 r + e], of X, R and O (kTokenRegisters floats) tokens 8 i + 2 c + e
// likewise.
//
// A row that leaves its band is fitted in the chunk in which that is seen, before its update. That
// is in time: with |S| < 2 in each of 128 columns and |v| < 128, |S row| is below 23 and after the
// chunk below 23 + sqrt(32) 128, and |X|, |R| below |v| + |S row|, far inside fp16's range.
#pragma once

#include <cstdint>

#include "cuda/common/numbers.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/minmax.cuh"
#include "cuda/sm90_split/forward/config.h"
#include "cuda/sm90_split/forward/params.h"

namespace flash_kda::cuda::sm90_split {

inline constexpr int kStateRegisters = kGroupRows * kHeadDim / kWarpgroup;
inline constexpr int kTokenRegisters = kGroupRows * kChunk / kWarpgroup;
using StateRows = float[kStateRegisters];
using StateOperand = uint32_t[kStateRegisters / 2];  // fp16
using TokenOperand = uint32_t[kTokenRegisters / 2];
using RawValues = uint32_t[kTokenRegisters / 2];  // bf16, tokens 8 i + 2 c, + 1 in [2 i + r]

struct RowScale {
  float unit[2] = {1.0F, 1.0F};
  float inverse[2] = {1.0F, 1.0F};  // 1 / unit, exactly
};

inline constexpr float kLargestUnit = 0x1p100F;
inline constexpr float kSmallestUnit = 0x1p-126F;
inline constexpr float kValueLimit = 128.0F;
inline constexpr float kFaint = 0x1p-7F;                  // numbers below would lose bits
inline constexpr uint32_t kStateLimitBits = 0x40004000U;  // set in fp16 from 2 on
inline constexpr uint32_t kFaintBits = 0x60006000U;       // clear below 2^-7

// Index of (row g, channel 2c) of `row` .. in a matrix [V, K].
__device__ __forceinline__ int matrix_index(int row, int lane) {
  return (row + (lane >> 2)) * kHeadDim + 2 * (lane & 3);
}

__device__ __forceinline__ void load_rows(const Dense& from, int64_t index, StateRows& state) {
#pragma unroll
  for (int i = 0; i < kStateRegisters / 2; ++i) {
    const float2 x = load_pair(from, index + 8 * (i >> 1) + 8 * kHeadDim * (i & 1));
    state[2 * i] = x.x;
    state[2 * i + 1] = x.y;
  }
}

__device__ __forceinline__ void store_rows(const Dense& to, int64_t index, const StateRows& state,
                                           const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kStateRegisters / 2; ++i) {
    store_pair(to, index + 8 * (i >> 1) + 8 * kHeadDim * (i & 1), state[2 * i] * factor[i & 1],
               state[2 * i + 1] * factor[i & 1]);
  }
}

// Rows `row` ... of a Phi, for the merge.
__device__ __forceinline__ void store_phi(float* phi, int row, int lane, const StateRows& state,
                                          const float (&factor)[2]) {
  const int g = lane >> 2;
#pragma unroll
  for (int i = 0; i < kStateRegisters / 2; ++i) {
    const int x = 4 * (i >> 1) + (i & 1);  // of row g; two on: row g + 8
    const int reader = 4 * (2 * (lane & 3) + (i & 1)) + (g >> 1);
    *reinterpret_cast<float2*>(phi + phi_index(row / 16, i >> 1, reader) + 2 * (g & 1)) =
        make_float2(state[x] * factor[0], state[x + 2] * factor[1]);
  }
}

__device__ __forceinline__ void constant_rows(StateRows& state, float value) {
#pragma unroll
  for (int i = 0; i < kStateRegisters; ++i) state[i] = value;
}

// Rows `row` ... of the identity.
__device__ __forceinline__ void identity_rows(int row, int lane, StateRows& state) {
#pragma unroll
  for (int i = 0; i < kStateRegisters; ++i) {
    const int column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
    state[i] = column == row + (lane >> 2) + 8 * ((i >> 1) & 1) ? 1.0F : 0.0F;
  }
}

// S in fp16; bits: of all numbers of rows g and g + 8, united.
__device__ __forceinline__ void pack_state(const StateRows& state, StateOperand& operand,
                                           uint32_t (&bits)[2]) {
  bits[0] = bits[1] = 0;
#pragma unroll
  for (int i = 0; i < kStateRegisters / 2; ++i) {
    operand[i] = ptx::pack_f16(state[2 * i], state[2 * i + 1]);
    bits[i & 1] |= operand[i];
  }
}

__device__ __forceinline__ void pack_tokens(const float* x, TokenOperand& operand) {
#pragma unroll
  for (int i = 0; i < kTokenRegisters / 2; ++i) {
    operand[i] = ptx::pack_f16(x[2 * i], x[2 * i + 1]);
  }
}

__device__ __forceinline__ void scale_values(const RawValues& values, const RowScale& scale,
                                             float* x) {
#pragma unroll
  for (int i = 0; i < kTokenRegisters / 2; ++i) {
    x[2 * i] = ptx::low_bf16(values[i]) * scale.unit[i & 1];
    x[2 * i + 1] = ptx::high_bf16(values[i]) * scale.unit[i & 1];
  }
}

// The largest |v| of rows g and g + 8 among this lane's tokens.
__device__ __forceinline__ void value_maxima(const RawValues& values, float (&most)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t pair = 0;
#pragma unroll
    for (int i = r; i < kTokenRegisters / 2; i += 2) {
      pair = ptx::max_bf16x2(pair, values[i] & 0x7fff7fffU);
    }
    most[r] = fmaxf(ptx::low_bf16(pair), ptx::high_bf16(pair));
  }
}

// Whether all four lanes of some row have their bit set.
__device__ __forceinline__ bool some_whole_row(uint32_t lanes) {
  lanes &= lanes >> 1;
  return (lanes & (lanes >> 2) & 0x11111111U) != 0;
}

// Whether some row of the warp has left its band: S by the bits of its fp16 form, or the values to
// come. All lanes get the same answer.
__device__ __forceinline__ bool some_row_unfit(const uint32_t (&state_bits)[2],
                                               const float (&value_most)[2],
                                               const RowScale& scale) {
  uint32_t hot = 0;
  uint32_t faint[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float most = value_most[r] * scale.unit[r];
    hot |= state_bits[r] & kStateLimitBits;
    hot |= static_cast<uint32_t>(most >= kValueLimit);
    faint[r] = __ballot_sync(0xffffffffU, (state_bits[r] & kFaintBits) == 0 & most < kFaint &
                                              scale.unit[r] < kLargestUnit);
  }
  return __any_sync(0xffffffffU, hot != 0) | some_whole_row(faint[0]) | some_whole_row(faint[1]);
}

// The factor that brings numbers of largest magnitude `most` into [1/2, 1).
__device__ __forceinline__ float fitting_factor(float most) {
  constexpr uint32_t kOneExponent = 127;
  const uint32_t exponent = __float_as_uint(most) >> 23;
  if (exponent == 0) return kLargestUnit;  // a row of zeros
  if (exponent == 0xff) return 1.0F;       // infinite or no number: nothing to save
  const uint32_t factor = 2 * kOneExponent - 1 - min(exponent, 2 * kOneExponent - 2);
  return __uint_as_float(factor << 23);
}

// 1 / x for a power of two between 2^-126 and 2^126, exactly.
__device__ __forceinline__ float inverse_power(float x) {
  constexpr uint32_t kSumOfBits = 254U << 23;
  return __uint_as_float(kSumOfBits - __float_as_uint(x));
}

// Fits all rows of the warp to their state, R and the largest of the values to come. `factor`: the
// new units by the old ones.
__device__ __forceinline__ void fit_rows(StateRows& state, const float* x,
                                         const float (&value_most)[2], RowScale& scale,
                                         float (&factor)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = 0.0F;
    float values = value_most[r];
#pragma unroll
    for (int i = 2 * r; i < kStateRegisters; i += 4) {
      most = fmaxf(most, fmaxf(fabsf(state[i]), fabsf(state[i + 1])));
    }
#pragma unroll
    for (int i = 2 * r; i < kTokenRegisters; i += 4) {
      most = fmaxf(most, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
    }
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffU, most, lanes));
      values = fmaxf(values, __shfl_xor_sync(0xffffffffU, values, lanes));
    }
    // Apart, because values times the old unit may be infinite.
    const float wanted = fminf(scale.unit[r] * fitting_factor(most), fitting_factor(values));
    const float unit = fminf(fmaxf(wanted, kSmallestUnit), kLargestUnit);
    factor[r] = unit * scale.inverse[r];
    scale.unit[r] = unit;
    scale.inverse[r] = inverse_power(unit);
#pragma unroll
    for (int i = 2 * r; i < kStateRegisters; i += 4) {
      state[i] *= factor[r];
      state[i + 1] *= factor[r];
    }
  }
}

}  // namespace flash_kda::cuda::sm90_split
