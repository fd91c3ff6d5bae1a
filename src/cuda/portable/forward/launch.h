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

// Consumes them. `sequences` bounds those that the window touches.
Status launch_recurrence(const RecurrenceParams& params, int32_t sequences, cudaStream_t stream);

// Shared memory of a block of the recurrence that has one of `row_parts` parts of a head.
int recurrence_shared_bytes(int row_parts);

// A kernel, by which to ask whether a device can run this build.
const void* prepare_entry();

}  // namespace flash_kda::cuda::portable
