// Copies of contiguous bytes by the copy engine (compute capability 9.0), and how a kernel starts
// before the one in front of it has ended.
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

// Shared to global, in the issuing thread's current group.
__device__ __forceinline__ void store_bulk(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// Until the kernels that this launch depends on have ended and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel's blocks may take their places once all blocks are here or have ended.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace flash_kda::cuda::ptx
