// The tilt of a chunk: a number from [1, 2) that differs from chunk to chunk of a sequence. kr and
// M are multiplied by it, T is divided by it, so it cancels. Where keys and values repeat with the
// chunks, the roundings of kr would repeat too, and add up over the sequence in directions that no
// later update corrects.
#pragma once

#include <cstdint>

namespace flash_kda::cuda {

__device__ __forceinline__ float chunk_tilt(uint32_t chunk) {
  constexpr uint32_t kGoldenRatio = 0x9e3779b1U;
  constexpr uint32_t kOne = 0x3f800000U;  // fp32
  return __uint_as_float(kOne | (chunk * kGoldenRatio) >> 9);
}

}  // namespace flash_kda::cuda
