#include "cuda/common/call_scope.h"

#include <string>

#include "cuda/common/offsets.h"

namespace flash_kda::cuda {

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
