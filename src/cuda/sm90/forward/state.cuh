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
inline constexpr int kStateParts = 4;  // in which a state goes and comes

// Where a lane's elements start in [N * H, V, K]: its first row and column.
__device__ __forceinline__ int64_t state_offset(uint32_t matrix) {
  const uint32_t thread = ptx::thread_index();  // 16 rows of V per warp, both halves
  const uint32_t row = 16 * (thread / 32) + (thread % 32 >> 2);
  return matrix * kStateElements + (row * kHeadDim + 2 * (thread & 3));
}
// From there to the lane's pair S[2 i], S[2 i + 1].
__device__ __forceinline__ constexpr int pair_offset(int i) {
  return 8 * (i >> 1) + 8 * kHeadDim * (i & 1);
}

// Part of a state, from where the lane's elements start. A pair of bf16 stays in one register as
// it comes: converting it would wait for it.
template <int kPart>
__device__ __forceinline__ void load_state_part(float (&S)[kStateRegisters], const void* state,
                                                bool bf16) {
  constexpr int kPartPairs = kStateRegisters / 2 / kStateParts, kFirst = kPart * kPartPairs;
#pragma unroll
  for (int i = kFirst; i < kFirst + kPartPairs; ++i) {
    if (bf16) {
      S[2 * i] = __uint_as_float(
          *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(state) + pair_offset(i)));
    } else {
      const float2 pair =
          *reinterpret_cast<const float2*>(static_cast<const float*>(state) + pair_offset(i));
      S[2 * i] = pair.x;
      S[2 * i + 1] = pair.y;
    }
  }
}
// factor: of the lane's rows g and g + 8.
template <int kPart>
__device__ __forceinline__ void store_state_part(const float (&S)[kStateRegisters],
                                                 const float (&factor)[2], void* state, bool bf16) {
  constexpr int kPartPairs = kStateRegisters / 2 / kStateParts, kFirst = kPart * kPartPairs;
#pragma unroll
  for (int i = kFirst; i < kFirst + kPartPairs; ++i) {
    const float x = S[2 * i] * factor[i & 1], y = S[2 * i + 1] * factor[i & 1];
    if (bf16) {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(state) + pair_offset(i)) =
          ptx::pack_bf16(x, y);
    } else {
      *reinterpret_cast<float2*>(static_cast<float*>(state) + pair_offset(i)) = make_float2(x, y);
    }
  }
}

// Where the lane's elements of a matrix start in the states of a call; null for none.
__device__ __forceinline__ void* state_place(const void* states, bool bf16, uint32_t matrix) {
  if (states == nullptr) return nullptr;
  return static_cast<uint8_t*>(const_cast<void*>(states)) + state_offset(matrix) * (bf16 ? 2 : 4);
}

// Parts from kPart on.
template <int kPart = 0>
__device__ __forceinline__ void exchange_parts(float (&S)[kStateRegisters],
                                               const float (&factor)[2], void* out, bool out_bf16,
                                               const void* in, bool in_bf16) {
  if (out != nullptr) {
    if (out_bf16) {
      store_state_part<kPart>(S, factor, out, true);
    } else {
      store_state_part<kPart>(S, factor, out, false);
    }
  }
  if (in != nullptr) {
    if (in_bf16) {
      load_state_part<kPart>(S, in, true);
    } else {
      load_state_part<kPart>(S, in, false);
    }
  }
  if constexpr (kPart + 1 < kStateParts) {
    exchange_parts<kPart + 1>(S, factor, out, out_bf16, in, in_bf16);
  }
}
// A state goes from S to `out` (unless null), the next comes from `in` (null: zeros), part by part:
// the next is asked for before the last part has gone.
__device__ __forceinline__ void exchange_states(float (&S)[kStateRegisters],
                                                const float (&factor)[2], void* out, bool out_bf16,
                                                const void* in, bool in_bf16) {
  exchange_parts(S, factor, out, out_bf16, in, in_bf16);
  if (in == nullptr) {
#pragma unroll
    for (int i = 0; i < kStateRegisters; ++i) S[i] = 0.0F;
  } else if (in_bf16) {
#pragma unroll
    for (int i = 0; i < kStateRegisters / 2; ++i) {
      const uint32_t pair = __float_as_uint(S[2 * i]);
      S[2 * i] = ptx::low_bf16(pair);
      S[2 * i + 1] = ptx::high_bf16(pair);
    }
  }
}

// An empty sequence's state by all chain threads, bit for bit where the types are the same. from:
// null for zeros.
__device__ __forceinline__ void pass_state(const void* from, bool from_bf16, void* to, bool to_bf16,
                                           uint32_t matrix) {
  constexpr uint32_t kPartPairs = kStateElements / 2;
  const int64_t first = static_cast<int64_t>(matrix) * kPartPairs;
  const uint32_t* source = static_cast<const uint32_t*>(from) + first * (from_bf16 ? 1 : 2);
  uint32_t* target = static_cast<uint32_t*>(to) + first * (to_bf16 ? 1 : 2);
#pragma unroll 1
  for (uint32_t i = ptx::thread_index(); i < kPartPairs; i += kChainThreads) {
    uint32_t x = 0, y = 0;
    if (from != nullptr && from_bf16) {
      x = source[i] << 16;
      y = source[i] & 0xffff0000U;
    } else if (from != nullptr) {
      x = source[2 * i];
      y = source[2 * i + 1];
    }
    if (!to_bf16) {
      target[2 * i] = x;
      target[2 * i + 1] = y;
    } else if (from_bf16) {
      target[i] = x >> 16 | y;
    } else {
      target[i] = ptx::pack_bf16(__uint_as_float(x), __uint_as_float(y));
    }
  }
}

}  // namespace flash_kda::cuda::sm90
