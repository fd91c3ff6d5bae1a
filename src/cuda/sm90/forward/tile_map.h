// Tensor maps of the rows of a problem, for the copy engine.
#pragma once

#include <cuda.h>

#include "flash_kda/status.h"
#include "ops/forward/problem.h"

namespace flash_kda::cuda::sm90 {

// Whether a map can express these rows; the reason why not, naming the argument.
Status check_mappable(const char* argument, const ForwardProblem& problem, const Rows& rows);

// [B, T, H, 128] bf16 as (64 channels, T, 2 channel halves, H, B); a tile is kChunk tokens of one
// half, 128-byte rows in the 128-byte swizzle.
Status make_tile_map(const ForwardProblem& problem, const Rows& rows, CUtensorMap* map);

}  // namespace flash_kda::cuda::sm90
