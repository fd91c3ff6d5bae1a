// What calls of several CUDA implementations begin with.
#pragma once

#include <cstdint>

#include "cuda/common/device.h"
#include "flash_kda/status.h"
#include "ops/forward/problem.h"

namespace flash_kda::cuda {

// What no CUDA implementation can run: tensors elsewhere, and more heads than kernels can number
// the channels of, in 32 bits.
Status check_problem(const ForwardProblem& problem);

// For an implementation of compute capability 9.0 alone: why it can't run on a problem's device.
// `kernel`: one of its __global__ functions, null in a build without 90a.
Status check_hopper(const ForwardProblem& problem, const void* kernel);

// Makes the device of a problem current, and at the end the one that was.
class CallScope {
 public:
  // kInvalidValue for a workspace of fewer bytes than needed and, where they are checked
  // (offsets.h), for offsets that are not legal.
  Status enter(const ForwardProblem& problem, int64_t workspace_bytes, int64_t needed);

  const DeviceProperties& device() const { return *device_; }

 private:
  DeviceGuard guard_;
  const DeviceProperties* device_ = nullptr;
};

}  // namespace flash_kda::cuda
