// The kernels of the split forward, queued on a stream of the current device. Each may start while
// the one before it ends, and waits for it before it touches memory, or for flags.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90_split/forward/params.h"
#include "flash_kda/status.h"

namespace flash_kda::cuda::sm90_split {

// Writes the records of a window: of `params`, prepare, ready and piece. With flags (ready) it
// takes so many multiprocessors, and the next kernel may run on the others meanwhile.
Status launch_records(RecordParams params, int64_t multiprocessors, cudaStream_t stream);

// Where sequences are cut: the states after the first segments and the maps of the others but the
// last; then, from them, the states in between. `sequences` bounds those that the window touches.
Status launch_maps(const SplitParams& params, cudaStream_t stream);
Status launch_merge(const SplitParams& params, int32_t sequences, cudaStream_t stream);

// All segments with output, from the states before them. `groups`: warpgroups of a
// block, 1 or 2; each has half of the V rows.
Status launch_recurrence(const SplitParams& params, int groups, cudaStream_t stream);

// A kernel, by which to ask whether a device can run this build; null where the build lacks 90a.
const void* entry();

}  // namespace flash_kda::cuda::sm90_split
