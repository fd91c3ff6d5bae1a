// Asynchronous copies of 16 bytes from global to shared memory, in groups per thread.
#pragma once

#include <cstdint>

namespace flash_kda::cuda::ptx {

__device__ __forceinline__ void copy_async16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source)
               : "memory");
}

// The same, or 16 zero bytes; then `source` is not read and may lie outside of the tensor.
__device__ __forceinline__ void copy_async16_or_zero(uint32_t destination, const void* source,
                                                     bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most kPending of this thread's latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_kda::cuda::ptx
