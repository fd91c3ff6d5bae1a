// Copies by the tensor-map engine (compute capability 9.0), tiles of rank 5.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_kda::cuda::ptx {

// Global to shared; the bytes count towards `barrier`. Elements outside the tensor arrive as 0.
__device__ __forceinline__ void load_tile(uint32_t destination, const CUtensorMap& map,
                                          const int32_t (&at)[5], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
      : "memory");
}

// Shared to global, in the issuing thread's current group. Nothing is written outside the tensor.
__device__ __forceinline__ void store_tile(const CUtensorMap& map, const int32_t (&at)[5],
                                           uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(&map),
      "r"(source), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
      : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the stores of all groups have read their shared memory, or have been written.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace flash_kda::cuda::ptx
