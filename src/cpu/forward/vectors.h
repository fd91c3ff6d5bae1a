// Arithmetic that compilers turn into vector instructions: loops of these functions have no
// branches and no calls.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/forward/isa.h"
#include "flash_kda/forward.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

inline constexpr float kLog2E = 1.44269504088896341F;

inline float to_float(uint16_t bf16) {
  return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16);
}

// Rounds to nearest even; a NaN stays a NaN.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
  const uint32_t quiet = bits | 0x00400000U;
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return static_cast<uint16_t>((is_nan ? quiet : rounded) >> 16);
}

// 2^r - 1 for r in [-1/2, 1/2]; 2^r has a relative error of 1e-8 before it is rounded.
inline float exp2_minus_one(float r) {
  float p = 1.54614478e-4F;
  p = p * r + 1.33908668e-3F;
  p = p * r + 9.61805694e-3F;
  p = p * r + 5.55035695e-2F;
  p = p * r + 2.40226507e-1F;
  p = p * r + 6.93147182e-1F;
  return p * r;
}

// Adding it rounds a float below 2^22 to an integer, which then stands in the low bits.
inline constexpr float kRounder = 12582912.0F;  // 1.5 * 2^23

// 2^n where rounded = kRounder + n, for n in [-126, 127].
inline float exp2_integer(float rounded) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(rounded) << 23) + 0x3f800000U);
}

// 2^x for x in [-126, 127]. NaN for NaN.
inline float exp2_in_range(float x) {
  const float rounded = x + kRounder;
  return (exp2_minus_one(x - (rounded - kRounder)) + 1.0F) * exp2_integer(rounded);
}

// 2^x for x <= 0, with the relative accuracy of a float for 1 - 2^x too: slow decays are near 1.
// At least 2^-126.
inline double exp2_wide(float x) {
  x = x < -126.0F ? -126.0F : x;
  const float rounded = x + kRounder;
  const float power = exp2_integer(rounded);
  return static_cast<double>(power) +
         static_cast<double>(power * exp2_minus_one(x - (rounded - kRounder)));
}

// e^x for x in [-87, 87], which x is clamped to. ln 2 is subtracted in two parts, the first of so
// few bits that its product with n is exact.
inline float exp_clamped(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = x > 87.0F ? 87.0F : x;
  const float rounded = x * kLog2E + kRounder;
  const float n = rounded - kRounder;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  return (exp2_minus_one(r * kLog2E) + 1.0F) * exp2_integer(rounded);
}

inline void load_row(const uint16_t* __restrict row, float* __restrict values, int count) {
  for (int c = 0; c < count; ++c) values[c] = to_float(row[c]);
}

// `count` numbers of memory of one of the two float types, from element `first` on.
inline void load_values(const void* data, DType dtype, int64_t first, float* __restrict values,
                        int count) {
  if (dtype == DType::kBFloat16) {
    load_row(static_cast<const uint16_t*>(data) + first, values, count);
  } else {
    const float* source = static_cast<const float*>(data) + first;
    for (int c = 0; c < count; ++c) values[c] = source[c];
  }
}

inline void store_values(void* data, DType dtype, int64_t first, const float* __restrict values,
                         int count) {
  if (dtype == DType::kBFloat16) {
    uint16_t* target = static_cast<uint16_t*>(data) + first;
    for (int c = 0; c < count; ++c) target[c] = to_bf16(values[c]);
  } else {
    float* target = static_cast<float*>(data) + first;
    for (int c = 0; c < count; ++c) target[c] = values[c];
  }
}

inline float sum_of_squares(const float* x) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int c = 0; c < kHeadDim; ++c) sum += x[c] * x[c];
  return sum;
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
