// Flags in global memory by which one kernel tells another, running beside it, that data are there.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

// What this thread did or has seen done in global memory comes before the flag...
__device__ __forceinline__ void release_flag(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// ... for the thread that reads it so, and for what it does from then on.
__device__ __forceinline__ uint32_t acquire_flag(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Between ordinary accesses to global memory and those of the copy engine, either way.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flash_kda::cuda::ptx
