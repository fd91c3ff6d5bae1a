// What every run of a CUDA implementation begins with.
#pragma once

#include <cstdint>

#include "cuda/common/device.h"
#include "flash_kda/status.h"
#include "ops/forward/problem.h"

namespace flash_kda::cuda {

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
