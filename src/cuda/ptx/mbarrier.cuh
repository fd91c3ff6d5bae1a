// Barriers in shared memory (by 32-bit address), named barriers, and the fence between ordinary
// accesses and those of the tensor cores and the copy engine.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

inline constexpr uint32_t kMbarrierBytes = 8;

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and the phase also waits for `bytes` of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns when the phase of this parity is complete. A waiter must not skip a phase: parity can't
// tell phases two apart. The hint (ns) lets the hardware put the thread to sleep for long instead
// of asking again and again beside busy warps.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  constexpr uint32_t kSuspendHint = 1000000;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier),
      "r"(parity), "r"(kSuspendHint)
      : "memory");
}

// True in one lane of the warp, whose lanes are all here (compute capability 9.0).
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// All `threads` of those that name this barrier.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// This thread's ordinary writes to shared memory come before later accesses by the tensor cores
// and the copy engine that a barrier orders after it.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One lane of the warp, after what all its lanes did.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  __syncwarp();
  if (elect_one()) mbarrier_arrive(barrier);
}

}  // namespace flash_kda::cuda::ptx
