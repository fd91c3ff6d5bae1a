// From the caller's arguments to a legal problem, or the reason why they are not legal.
#pragma once

#include "ops/forward/problem.h"

namespace flash_kda {

// Checks every argument's dtype, shape, strides, device and value, and that nothing that is written
// overlaps an input or another output. Offsets in cu_seqlens are read only where they lie in host
// memory; data of other tensors never.
Status validate(const ForwardArgs& args, ForwardProblem* problem);

// That tensors with elements have memory. Apart from validate, because planning needs none.
Status check_memory(const ForwardArgs& args);

// The offsets of a problem with cu_seqlens in host memory: from 0, never decreasing, at most T.
Status check_offsets(const ForwardProblem& problem);

}  // namespace flash_kda
