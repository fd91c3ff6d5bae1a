// The state of a sequence and head between global memory [V, K] and the accumulators of a chain
// warpgroup. Lane (g = lane / 4, c = lane % 4) of warp w holds rows 16 w + g + 8 r of the half and
// columns 8 i + 2 c + e in S[4 i + 2 r + e].
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/registers.cuh"
#include "cuda/sm90/forward/config.h"

namespace flash_kda::cuda::sm90 {

inline constexpr int kStateRegisters = kHalf * kHeadDim / kWarpgroup;
inline constexpr int64_t kStateElements = int64_t{kHeadDim} * kHeadDim;

// Where a lane's elements start in [N * H, V, K]: its first row and column.
__device__ __forceinline__ int64_t state_offset(uint32_t matrix) {
  const uint32_t thread = ptx::thread_index();  // 16 rows of V per warp, both halves
  const uint32_t row = 16 * (thread / 32) + (thread % 32 >> 2);
  return matrix * kStateElements + (row * kHeadDim + 2 * (thread & 3));
}

// state: null for zeros.
__device__ __forceinline__ void load_state(float (&S)[kStateRegisters], const void* state,
                                           bool bf16, int64_t offset) {
  if (state == nullptr) {
#pragma unroll
    for (int i = 0; i < kStateRegisters; ++i) S[i] = 0.0F;
  } else if (bf16) {
    const uint16_t* from = static_cast<const uint16_t*>(state) + offset;
#pragma unroll
    for (int i = 0; i < kStateRegisters / 2; ++i) {
      const uint32_t pair =
          *reinterpret_cast<const uint32_t*>(from + 8 * (i >> 1) + 8 * kHeadDim * (i & 1));
      S[2 * i] = ptx::low_bf16(pair);
      S[2 * i + 1] = ptx::high_bf16(pair);
    }
  } else {
    const float* from = static_cast<const float*>(state) + offset;
#pragma unroll
    for (int i = 0; i < kStateRegisters / 2; ++i) {
      const float2 pair =
          *reinterpret_cast<const float2*>(from + 8 * (i >> 1) + 8 * kHeadDim * (i & 1));
      S[2 * i] = pair.x;
      S[2 * i + 1] = pair.y;
    }
  }
}

// factor: of the lane's rows g and g + 8.
__device__ __forceinline__ void store_state(const float (&S)[kStateRegisters],
                                            const float (&factor)[2], void* state, bool bf16,
                                            int64_t offset) {
  if (bf16) {
    uint16_t* to = static_cast<uint16_t*>(state) + offset;
#pragma unroll
    for (int i = 0; i < kStateRegisters / 2; ++i) {
      *reinterpret_cast<uint32_t*>(to + 8 * (i >> 1) + 8 * kHeadDim * (i & 1)) =
          ptx::pack_bf16(S[2 * i] * factor[i & 1], S[2 * i + 1] * factor[i & 1]);
    }
  } else {
    float* to = static_cast<float*>(state) + offset;
#pragma unroll
    for (int i = 0; i < kStateRegisters / 2; ++i) {
      *reinterpret_cast<float2*>(to + 8 * (i >> 1) + 8 * kHeadDim * (i & 1)) =
          make_float2(S[2 * i] * factor[i & 1], S[2 * i + 1] * factor[i & 1]);
    }
  }
}

// An empty sequence's state, bit for bit, by all chain threads.
__device__ __forceinline__ void copy_state(const void* from, void* to, bool bf16, uint32_t matrix) {
  const int64_t words = kStateElements * (bf16 ? 2 : 4) / static_cast<int64_t>(sizeof(uint4));
  const uint4* source = static_cast<const uint4*>(from) + matrix * words;
  uint4* target = static_cast<uint4*>(to) + matrix * words;
#pragma unroll 1
  for (uint32_t i = ptx::thread_index(); i < words; i += kChainThreads) target[i] = source[i];
}

}  // namespace flash_kda::cuda::sm90
