// Which chunks of a sequence come to the fused kernel as records, made by multiprocessors that have
// no sequence of their own (docs/hopper.md): `share` of every 32, evenly spread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_kda::cuda::sm90 {

inline constexpr uint32_t kShareUnit = 32;
// At least every third chunk is the kernel's own: its roles meet the barriers of a stage often
// enough to tell the phases apart (barriers.cuh).
inline constexpr uint32_t kMostShare = 21;

// Records among the first `chunks` chunks; chunks below 2^27.
__host__ __device__ constexpr uint32_t records_before(uint32_t chunks, uint32_t share) {
  return chunks * share / kShareUnit;
}
__host__ __device__ constexpr bool is_record(uint32_t chunk, uint32_t share) {
  return records_before(chunk + 1, share) != records_before(chunk, share);
}
// The chunk of the n-th record; share above 0.
__host__ __device__ constexpr uint32_t record_chunk(uint32_t n, uint32_t share) {
  return ((n + 1) * kShareUnit + share - 1) / share - 1;
}

}  // namespace flash_kda::cuda::sm90
