// A power of two for each V row, which keeps the row inside fp16's range: the state S and the
// values v of a row are held times `unit`, exactly, and results are divided by it.
//
// All of S, X and R in the same row scale alike, so nothing else changes. A row is fitted again
// only when it leaves a wide band, and what is done to it depends on that row alone.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::portable {

// S of 16 rows: channels 8 j + 2c, + 1 of row g at [j][0, 1], of row g + 8 at [j][2, 3].
using RowState = float[16][4];
// [16 rows, 32 tokens] likewise: tokens 8 t + 2c, + 1.
using RowTokens = float[4][4];

struct RowScale {
  float unit[2] = {1.0F, 1.0F};  // of rows g and g + 8
};

// 1 / unit, exactly: the exponent mirrored.
__device__ __forceinline__ float inverse_unit(float unit) {
  return __uint_as_float(0x7f000000U - __float_as_uint(unit));
}

inline constexpr float kLargestUnit = 0x1p100F;
inline constexpr float kSmallestUnit = 0x1p-126F;

// The band: |S| < 2 and |v| < 128, since an X or R of such rows stays far inside fp16's range; and
// one of them at least 2^-7, since smaller numbers would lose bits.
inline constexpr float kValueLimit = 128.0F;
inline constexpr float kFaint = 0x1p-7F;
inline constexpr uint32_t kStateLimitBits = 0x40004000U;  // set in fp16 from 2 on
inline constexpr uint32_t kFaintBits = 0x60006000U;       // clear below 2^-7

// The largest magnitude of each row among this lane's columns.
template <int kTiles>
__device__ __forceinline__ void row_maxima(const float (&x)[kTiles][4], float (&most)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    most[r] = 0.0F;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      most[r] = fmaxf(most[r], fmaxf(fabsf(x[j][2 * r]), fabsf(x[j][2 * r + 1])));
    }
  }
}

// What a lane knows of its rows g and g + 8. S is that of one chunk ago, noted when it was last
// made fp16: even so it stays below 2^14, for each token adds at most the largest |v| to a row.
struct RowExtent {
  uint32_t state_bits[2];  // of all its S in fp16, united
  float value_most[2];     // largest |v|
};

// Whether all four lanes of some row have their bit set.
__device__ __forceinline__ bool some_whole_row(uint32_t lanes) {
  lanes &= lanes >> 1;
  return (lanes & (lanes >> 2) & 0x11111111U) != 0;
}

// Whether some row of the warp may have left its band. All lanes get the same answer; it errs
// towards yes where faint lanes of different rows stand beside each other.
__device__ __forceinline__ bool some_row_unfit(const RowExtent& extent, const RowScale& scale) {
  bool hot = false;
  bool faint = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t bits = extent.state_bits[r];
    const float most = extent.value_most[r];
    hot = hot || (bits & kStateLimitBits) != 0 || most >= kValueLimit;
    faint = faint || ((bits & kFaintBits) == 0 && most < kFaint && scale.unit[r] < kLargestUnit);
  }
  constexpr uint32_t kAll = 0xffffffffU;
  return __any_sync(kAll, hot) || some_whole_row(__ballot_sync(kAll, faint));
}

// A second fit is for values that were infinite in the units of a row of zeros or of tiny numbers.
inline constexpr int kMostFits = 2;

// The factor that brings a row of largest magnitude `most` into [1/2, 1).
__device__ __forceinline__ float fitting_factor(float most) {
  constexpr uint32_t kOneExponent = 127;
  constexpr uint32_t kInfinity = 0x7f800000;
  const uint32_t exponent = __float_as_uint(most) >> 23;
  if (exponent == 0) return kLargestUnit;  // a row of zeros
  if (__float_as_uint(most) == kInfinity)
    return 1.0F / kLargestUnit;       // perhaps in these units only
  if (exponent == 0xff) return 1.0F;  // no number: nothing to save
  const uint32_t factor = 2 * kOneExponent - 1 - min(exponent, 2 * kOneExponent - 2);
  return __uint_as_float(factor << 23);
}

// Fits the rows that have left their band, or all if `all`. Values are to be loaded anew.
__device__ __forceinline__ void fit_rows(RowState& state, const RowExtent& extent, RowScale& scale,
                                         bool all) {
  float state_most[2];
  row_maxima(state, state_most);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t bits = extent.state_bits[r];
    float value_most = extent.value_most[r];
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      constexpr uint32_t kAll = 0xffffffffU;
      bits |= __shfl_xor_sync(kAll, bits, lanes);
      value_most = fmaxf(value_most, __shfl_xor_sync(kAll, value_most, lanes));
      state_most[r] = fmaxf(state_most[r], __shfl_xor_sync(kAll, state_most[r], lanes));
    }
    // Of this row alone: what else is in the warp must not show in the result.
    const bool hot = (bits & kStateLimitBits) != 0 || value_most >= kValueLimit;
    const bool faint =
        (bits & kFaintBits) == 0 && value_most < kFaint && scale.unit[r] < kLargestUnit;
    if (!(all || hot || faint)) continue;
    const float wanted = scale.unit[r] * fitting_factor(fmaxf(state_most[r], value_most));
    const float unit = fminf(fmaxf(wanted, kSmallestUnit), kLargestUnit);
    const float factor = unit * inverse_unit(scale.unit[r]);
    scale.unit[r] = unit;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      state[j][2 * r] *= factor;
      state[j][2 * r + 1] *= factor;
    }
  }
}

}  // namespace flash_kda::cuda::portable
