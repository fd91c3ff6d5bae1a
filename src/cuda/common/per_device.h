// Work that each device needs once, such as a kernel's attributes.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "cuda/common/check.h"
#include "flash_kda/status.h"

namespace flash_kda::cuda {

class PerDevice {
 public:
  // Runs `work` for the current device unless it has succeeded there before. Threads may run it
  // twice at the same time, so it must be repeatable; devices from 64 on get it every time.
  template <typename Work>
  Status once(Work work) {
    int device = 0;
    FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if ((done_.load(std::memory_order_acquire) & bit) != 0) return {};
    FLASH_KDA_RETURN_IF_ERROR(work());
    done_.fetch_or(bit, std::memory_order_release);
    return {};
  }

 private:
  std::atomic<uint64_t> done_{0};
};

}  // namespace flash_kda::cuda
