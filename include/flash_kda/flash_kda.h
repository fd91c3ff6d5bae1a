// The whole public C++ API.
#pragma once

#include "flash_kda/backends.h"
#include "flash_kda/forward.h"
#include "flash_kda/status.h"
#include "flash_kda/types.h"
