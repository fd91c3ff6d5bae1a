#include "cuda/common/call_scope.h"

#include <limits>
#include <string>

#include "cuda/common/offsets.h"
#include "ops/forward/spec.h"

namespace flash_kda::cuda {

Status check_problem(const ForwardProblem& problem) {
  if (problem.device.type != DeviceType::kCuda) {
    return Status::unsupported("runs on CUDA tensors only");
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / kHeadDim;
  if (problem.heads <= kMost) return {};
  return Status::unsupported("heads: expected at most " + std::to_string(kMost) + ", got " +
                             std::to_string(problem.heads));
}

Status check_hopper(const ForwardProblem& problem, const void* kernel) {
  constexpr int kCapability = 90;
  FLASH_KDA_RETURN_IF_ERROR(check_problem(problem));
  const DeviceProperties* device = nullptr;
  FLASH_KDA_RETURN_IF_ERROR(device_properties(problem.device.index, &device));
  if (device->capability() != kCapability) {
    return Status::unsupported("expected a device of compute capability 9.0, got " +
                               device_text(problem.device.index, *device));
  }
  if (kernel == nullptr) {
    return Status::unsupported("not in this build, which lacks the architecture 90a");
  }
  return check_built_for(problem.device.index, kernel);
}

Status CallScope::enter(const ForwardProblem& problem, int64_t workspace_bytes, int64_t needed) {
  if (workspace_bytes < needed) {
    return Status::invalid_value("workspace: expected at least " + std::to_string(needed) +
                                 " bytes, got " + std::to_string(workspace_bytes));
  }
  FLASH_KDA_RETURN_IF_ERROR(device_properties(problem.device.index, &device_));
  FLASH_KDA_RETURN_IF_ERROR(guard_.enter(problem.device.index));
  return check_offsets_if_asked(problem);
}

}  // namespace flash_kda::cuda
