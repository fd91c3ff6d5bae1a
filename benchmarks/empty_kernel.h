// A kernel that does nothing, as the measure of what a launch takes.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_kda {

cudaError_t launch_empty_kernel();

}  // namespace flash_kda
