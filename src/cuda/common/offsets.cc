#include "cuda/common/offsets.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string_view>
#include <vector>

#include "cuda/common/check.h"
#include "ops/forward/validate.h"

namespace flash_kda::cuda {

Status check_offsets_if_asked(const ForwardProblem& problem) {
  const char* asked = std::getenv(kCheckEnv);
  if (asked == nullptr || std::string_view(asked) != "1" || !problem.cu_seqlens) return {};
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return {};

  const size_t width = problem.cu_seqlens.dtype == DType::kInt32 ? 4 : 8;
  std::vector<unsigned char> host(static_cast<size_t>(problem.sequences + 1) * width);
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(host.data(), problem.cu_seqlens.data, host.size(),
                                                 cudaMemcpyDeviceToHost, stream));
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  ForwardProblem copy = problem;
  copy.cu_seqlens.data = host.data();
  return check_offsets(copy);
}

}  // namespace flash_kda::cuda
