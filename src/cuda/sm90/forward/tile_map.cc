#include "cuda/sm90/forward/tile_map.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/common/check.h"
#include "cuda/sm90/forward/config.h"

namespace flash_kda::cuda::sm90 {
namespace {

constexpr int64_t kElementBytes = 2;
constexpr int64_t kStrideLimit = int64_t{1} << 40;  // bytes, of the copy engine
constexpr int64_t kAnyStride = 256;                 // bytes; of an axis of extent 1

// The driver's function, found at run time: the library loads where there is no driver.
Status find_encoder(decltype(&cuTensorMapEncodeTiled)* encoder) {
  static void* found = nullptr;
  if (found == nullptr) {
    cudaDriverEntryPointQueryResult result;
    void* function = nullptr;
    FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || function == nullptr) {
      return Status::runtime("the CUDA driver has no cuTensorMapEncodeTiled");
    }
    found = function;
  }
  *encoder = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  return {};
}

Status check_stride(const char* argument, const char* axis, int64_t extent, int64_t stride) {
  if (extent <= 1) return {};
  if (stride > 0 && stride < kStrideLimit / kElementBytes) return {};
  return Status::unsupported(std::string(argument) + ": expected a " + axis +
                             " stride of 1 to 2^39 - 1 elements, got " + std::to_string(stride));
}

cuuint64_t stride_bytes(int64_t extent, int64_t stride) {
  return static_cast<cuuint64_t>(extent <= 1 ? kAnyStride : stride * kElementBytes);
}

}  // namespace

Status check_mappable(const char* argument, const ForwardProblem& problem, const Rows& rows) {
  if (problem.tokens == 0) return {};
  FLASH_KDA_RETURN_IF_ERROR(check_stride(argument, "token", problem.tokens, rows.token_stride));
  return check_stride(argument, "batch", problem.batch, rows.batch_stride);
}

Status make_tile_map(const ForwardProblem& problem, const Rows& rows, CUtensorMap* map) {
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  FLASH_KDA_RETURN_IF_ERROR(find_encoder(&encode));
  const cuuint64_t extent[5] = {kHalf, static_cast<cuuint64_t>(problem.tokens), kHalves,
                                static_cast<cuuint64_t>(problem.heads),
                                static_cast<cuuint64_t>(problem.batch)};
  const cuuint64_t stride[4] = {stride_bytes(problem.tokens, rows.token_stride),
                                kHalf * kElementBytes, kHeadDim * kElementBytes,
                                stride_bytes(problem.batch, rows.batch_stride)};
  const cuuint32_t tile[5] = {kHalf, kChunk, 1, 1, 1};
  const cuuint32_t step[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, rows.data, extent, stride, tile, step,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return Status::runtime("cuTensorMapEncodeTiled: error " + std::to_string(result));
}

}  // namespace flash_kda::cuda::sm90
