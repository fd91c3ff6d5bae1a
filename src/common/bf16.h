// bfloat16 and float, one number at a time.
#pragma once

#include <cstdint>
#include <cstring>

#include "flash_kda/types.h"

namespace flash_kda {

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest even; a NaN stays a NaN.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>((bits >> 16) | 0x0040U);
  bits += 0x7fffU + ((bits >> 16) & 1U);
  return static_cast<uint16_t>(bits >> 16);
}

// Element `index` of memory of one of the two float types.
inline float load_float(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kBFloat16) return bf16_to_float(static_cast<const uint16_t*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

inline void store_float(void* data, DType dtype, int64_t index, float value) {
  if (dtype == DType::kBFloat16) {
    static_cast<uint16_t*>(data)[index] = float_to_bf16(value);
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

}  // namespace flash_kda
