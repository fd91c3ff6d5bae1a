// Register budgets of warpgroups, and special registers read anew at each use.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

// threadIdx.x, without keeping it in a register.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Moves registers between the warpgroups of a CTA; all warps of a warpgroup together.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_kda::cuda::ptx
