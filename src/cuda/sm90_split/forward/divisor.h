// Division by a number that the host knows, in two instructions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_kda::cuda::sm90_split {

// n / d for n below 2^31, 0 < d < 2^31, as (n m >> 32) >> s. With s = ceil(log2 d) - 1 and
// m = 2^(32 + s) / d rounded up, m fits 32 bits; rounding adds less than n / 2^(32 + s) < 1 / d to
// the quotient, too little to reach the next integer.
struct Divisor {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;  // 0: the divisor is 1
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t d) : divisor(d) {
    if (d <= 1) return;
    while ((uint64_t{2} << shift) < d) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + d - 1) / d);
  }

  __host__ __device__ uint32_t quotient(uint32_t n) const {
    if (multiplier == 0) return n;
    return static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) >> shift;
  }
};

}  // namespace flash_kda::cuda::sm90_split
