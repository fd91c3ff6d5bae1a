// A forward call on the GPU with the arguments of a call in host memory: every tensor is mirrored
// between guard zones, which nothing may write.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/describe.h"
#include "flash_kda/forward.h"
#include "ops/forward/problem.h"
#include "ops/forward/validate.h"

namespace flash_kda::testing {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory between two guard zones.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t bytes) : bytes_(bytes) {
    check_cuda(cudaMalloc(&base_, bytes + 2 * kGuard));
    check_cuda(cudaMemset(base_, kPattern, bytes + 2 * kGuard));
  }
  ~GuardedMemory() { (void)cudaFree(base_); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  void* data() const { return static_cast<unsigned char*>(base_) + kGuard; }
  size_t bytes() const { return bytes_; }
  bool intact() const {
    std::vector<unsigned char> guard(kGuard);
    for (size_t offset : {size_t{0}, kGuard + bytes_}) {
      check_cuda(cudaMemcpy(guard.data(), static_cast<unsigned char*>(base_) + offset, kGuard,
                            cudaMemcpyDeviceToHost));
      for (unsigned char byte : guard) {
        if (byte != kPattern) return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr unsigned char kPattern = 0xa5;
  void* base_ = nullptr;
  size_t bytes_;
};

class DeviceCall {
 public:
  // The host tensors must outlive the call; fetch() writes to them.
  explicit DeviceCall(const ForwardArgs& host) : args_(host) {
    for (TensorRef* tensor :
         {&args_.q, &args_.k, &args_.v, &args_.g, &args_.beta, &args_.out, &args_.A_log,
          &args_.dt_bias, &args_.initial_state, &args_.final_state, &args_.cu_seqlens}) {
      mirror(tensor);
    }
    upload();
  }

  const ForwardArgs& args() const { return args_; }
  ForwardArgs& args() { return args_; }

  Status problem(ForwardProblem* p) const { return validate(args_, p); }

  // Memory of this size, poisoned at the first request and kept while the size stays.
  void* workspace(int64_t bytes) {
    if (workspace_ == nullptr || workspace_->bytes() != static_cast<size_t>(bytes)) {
      workspace_ = std::make_unique<GuardedMemory>(static_cast<size_t>(bytes));
      check_cuda(cudaMemset(workspace_->data(), 0xff, workspace_->bytes()));
    }
    return workspace_->data();
  }

  void upload() {
    for (auto& [host, memory] : memories_) {
      check_cuda(cudaMemcpy(memory->data(), host, memory->bytes(), cudaMemcpyHostToDevice));
    }
  }

  // Waits, and copies everything back to the host tensors.
  void fetch() {
    check_cuda(cudaDeviceSynchronize());
    for (auto& [host, memory] : memories_) {
      check_cuda(cudaMemcpy(host, memory->data(), memory->bytes(), cudaMemcpyDeviceToHost));
    }
  }

  bool guards_intact() const {
    for (const auto& [host, memory] : memories_) {
      if (!memory->intact()) return false;
    }
    return workspace_ == nullptr || workspace_->intact();
  }

 private:
  void mirror(TensorRef* tensor) {
    if (!tensor->given()) return;
    tensor->device = {DeviceType::kCuda, 0};
    int64_t last = 0;  // element offset of the last element
    for (int axis = 0; axis < tensor->rank; ++axis) {
      if (tensor->shape[axis] == 0) return;
      last += (tensor->shape[axis] - 1) * tensor->stride[axis];
    }
    const auto bytes = static_cast<size_t>((last + 1) * dtype_size(tensor->dtype));
    auto& memory = memories_[tensor->data];  // tensors that share memory share the mirror
    if (memory == nullptr) memory = std::make_unique<GuardedMemory>(bytes);
    tensor->data = memory->data();
  }

  ForwardArgs args_;
  std::map<void*, std::unique_ptr<GuardedMemory>> memories_;
  std::unique_ptr<GuardedMemory> workspace_;
};

}  // namespace flash_kda::testing
