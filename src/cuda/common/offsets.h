// The contents of cu_seqlens on a CUDA device. Kernels clamp them; no launch waits for them.
#pragma once

#include "flash_kda/status.h"
#include "ops/forward/problem.h"

namespace flash_kda::cuda {

// The environment variable that asks for cu_seqlens to be checked ("1"), for debugging: it costs a
// copy to the host and a wait for the stream.
inline constexpr const char* kCheckEnv = "FLASH_KDA_CHECK";

// Where it is set, kInvalidValue for offsets that are not legal. Does nothing while the stream is
// being captured. The problem's device must be current.
Status check_offsets_if_asked(const ForwardProblem& problem);

}  // namespace flash_kda::cuda
