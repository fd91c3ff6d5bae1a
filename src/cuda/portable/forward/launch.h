// The kernels of the portable forward, queued on a stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/portable/forward/params.h"
#include "flash_kda/status.h"

namespace flash_kda::cuda::portable {

// Fills the tables of a plan from cu_seqlens.
Status launch_plan(const PlanParams& params, cudaStream_t stream);

// Writes the records of a window.
Status launch_prepare(const PrepareParams& params, cudaStream_t stream);

// Consumes them, with row_parts (2 or 4) blocks to the V rows of a head. `sequences` bounds those
// that the window touches.
Status launch_recurrence(const RecurrenceParams& params, int row_parts, int32_t sequences,
                         cudaStream_t stream);

// A kernel, by which to ask whether a device can run this build.
const void* prepare_entry();

}  // namespace flash_kda::cuda::portable
