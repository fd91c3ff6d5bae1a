// How a kernel starts before the one in front of it has ended (compute capability 9.0 and newer;
// nothing on older devices, whose kernels start one after the other).
#pragma once

namespace flash_kda::cuda::ptx {

// Until the kernels that this launch depends on have ended and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may take their places once all blocks are here or have ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flash_kda::cuda::ptx
