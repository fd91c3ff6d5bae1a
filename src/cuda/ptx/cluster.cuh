// Blocks of a cluster and each other's shared memory (compute capability 9.0).
#pragma once

#include <cstdint>
#include <cute/arch/cluster_sm90.hpp>

namespace flash_kda::cuda::ptx {

// The address of the same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, int rank) {
  return cute::set_block_rank(address, static_cast<uint32_t>(rank));
}

// All threads of the cluster; what they did before is seen after.
__device__ __forceinline__ void cluster_sync() { cute::cluster_sync(); }

// This thread's barriers are set up for the cluster, which a cluster_sync() then tells.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// At a barrier of a block of the cluster, by an address_in_block. It tells that what this thread
// has waited for is over, not what it wrote: release at the cluster's scope would wait for memory.
__device__ __forceinline__ void mbarrier_arrive_in_block(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// 16 bytes into the shared memory of a block of the cluster; they count towards `barrier` there.
__device__ __forceinline__ void store_async4(uint32_t to, const uint32_t (&v)[4],
                                             uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(barrier)
      : "memory");
}

}  // namespace flash_kda::cuda::ptx
