// What this build holds and what this machine offers.
#pragma once

#include <string>
#include <vector>

#include "flash_kda/export.h"

namespace flash_kda {

// Names of all implementations in this build, in order of preference.
FLASH_KDA_API std::vector<std::string> implementation_names();

// CUDA architectures compiled in, as "80", "90a", "100a"; empty for a CPU-only build.
FLASH_KDA_API std::vector<std::string> built_cuda_archs();

// The library's version, "major.minor.patch".
FLASH_KDA_API const char* version();

// The environment variable that forces one implementation by its name.
inline constexpr const char* kForceEnv = "FLASH_KDA_FORCE_IMPL";

}  // namespace flash_kda
