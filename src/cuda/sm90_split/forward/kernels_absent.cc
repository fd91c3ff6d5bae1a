// Stands in for the kernels in a build without the architecture 90a.
#include "cuda/sm90_split/forward/launch.h"

namespace flash_kda::cuda::sm90_split {
namespace {

Status absent() {
  return Status::unsupported("not in this build, which lacks the architecture 90a");
}

}  // namespace

const void* entry() { return nullptr; }
Status launch_records(RecordParams, int64_t, cudaStream_t) { return absent(); }
Status launch_maps(const SplitParams&, cudaStream_t) { return absent(); }
Status launch_merge(const SplitParams&, int32_t, cudaStream_t) { return absent(); }
Status launch_recurrence(const SplitParams&, int, cudaStream_t) { return absent(); }

}  // namespace flash_kda::cuda::sm90_split
