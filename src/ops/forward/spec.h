// The constants of the operation, each once. A chunk length belongs to an implementation and
// stands in its own config.h.
#pragma once

#include <cstdint>

#include "flash_kda/forward.h"

namespace flash_kda {

inline constexpr float kNormEpsilon = 1e-6F;    // under the root of the l2 norms of q and k
inline constexpr double kMinLowerBound = -5.0;  // a token decays a channel by e^-5 at most
inline constexpr int kBlock = 16;               // tokens over which 2^(-decay) may be formed
inline constexpr int64_t kStateSize = int64_t{kHeadDim} * kHeadDim;  // numbers in a head's state

}  // namespace flash_kda
