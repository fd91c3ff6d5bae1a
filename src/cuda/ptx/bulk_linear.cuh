// Copies of contiguous bytes by the copy engine (compute capability 9.0).
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

// Global to shared; the bytes (a multiple of 16) count towards `barrier`.
__device__ __forceinline__ void load_bulk(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same into this place of every block of the cluster that has its bit in `blocks`; the bytes
// count towards the barrier in the same place as `barrier` there.
__device__ __forceinline__ void load_bulk_multicast(uint32_t destination, const void* source,
                                                    uint32_t bytes, uint32_t barrier,
                                                    uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1], %2, [%3], %4;" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}

// Shared to global, in the issuing thread's current group.
__device__ __forceinline__ void store_bulk(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

}  // namespace flash_kda::cuda::ptx
