// Why a device can't be used. Most of it needs none.
#include "cuda/common/device.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "ops/forward/impls.h"
#include "ops/forward/spec.h"

namespace flash_kda::cuda {
namespace {

std::string reason(int device) {
  const DeviceProperties* properties = nullptr;
  const Status status = device_properties(device, &properties);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  return status.message();
}

void expect_words(const std::string& text, std::initializer_list<const char*> words) {
  for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
}

TEST(Device, ADriverThatIsTooOldOrMissingIsNamedWithVersions) {
  int count = 0, found = 0;
  if (cudaGetDeviceCount(&count) != cudaErrorInsufficientDriver) {
    GTEST_SKIP() << "the driver is new enough, or there is no device";
  }
  ASSERT_EQ(cudaDriverGetVersion(&found), cudaSuccess);
  const std::string version =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  const std::string expected = "expected a driver for CUDA " + version + ", found ";
  expect_words(reason(0), {"no usable CUDA driver or device", expected.c_str()});
  if (found == 0) expect_words(reason(0), {"found none"});
}

TEST(Device, MoreHeadsThanChannelNumbersHaveBitsForAreRefused) {
  ForwardProblem problem;
  problem.device = {DeviceType::kCuda, 0};
  problem.heads = (int64_t{1} << 31) / kHeadDim;
  for (const ForwardImpl* impl :
       {&recurrent::kForward, &sm90::kForward, &sm90_split::kForward, &portable::kForward}) {
    const Status status = impl->accepts(problem);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    expect_words(status.message(), {"heads", "expected at most 16777215", "got 16777216"});
  }
}

TEST(Device, AnIndexThatIsNotThereIsNamed) {
  expect_words(reason(-1), {"cuda:-1", "expected an index below 64"});
  expect_words(reason(64), {"cuda:64", "expected an index below 64"});
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) GTEST_SKIP() << "no CUDA device";
  expect_words(reason(63), {"cuda:63", "visible devices"});
}

}  // namespace
}  // namespace flash_kda::cuda
