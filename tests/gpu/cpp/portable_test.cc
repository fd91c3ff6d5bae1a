// What cuda.portable alone has: its divisions of the work, and its workspace.
#include <gtest/gtest.h>

#include <vector>

#include "gpu/cpp/target.h"

namespace flash_kda::cuda::portable {
namespace {

using testing::ForwardInputs;
using testing::move_magnitudes;
using testing::portable_target;

using PortableDivision = testing::GpuTest;
INSTANTIATE_TEST_SUITE_P(Portable, PortableDivision,
                         ::testing::Values(testing::whole_target("portable", kForward)));

// Windows and parts of a head divide the work and must not show in the results.
TEST_P(PortableDivision, ResultsDoNotDependOnTheDivision) {
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{}, {0, 7, 7, 80, 84, 300}, {0, 0, 0, 290, 300}}) {
    ForwardInputs whole(1, 300, 2, offsets);
    move_magnitudes(&whole);
    run(whole.args());
    for (int parts : {2, 4}) {
      for (int64_t slots : {1, 2, 3, 7, 100}) {
        ForwardInputs x(1, 300, 2, offsets);
        move_magnitudes(&x);
        Options options;
        options.row_parts = parts;
        options.record_budget = slots * 2 * 27648;
        run(portable_target("divided", options), x.args());
        ASSERT_EQ(x.out, whole.out) << parts << " parts, windows of " << slots;
        ASSERT_EQ(x.final_state, whole.final_state) << parts << " parts, windows of " << slots;
      }
    }
  }
}

TEST(PortableWorkspace, StaysWithinUpstreamAndTheBudget) {
  const auto upstream = [](int64_t t, int64_t h, int64_t n) {
    return h * ((t + 15) / 16 + n) * 13824;
  };
  EXPECT_LE(kForward.workspace_bytes(8192, 96, 1), upstream(8192, 96, 1));
  EXPECT_LE(kForward.workspace_bytes(65536, 8, 1), upstream(65536, 8, 1));
  EXPECT_LE(kForward.workspace_bytes(256 * 128, 96, 256), upstream(256 * 128, 96, 256));
  EXPECT_LE(kForward.workspace_bytes(1 << 20, 12, 1), upstream(1 << 20, 12, 1));
  EXPECT_LE(kForward.workspace_bytes(1 << 20, 64, 16), kRecordBudget + (64 << 20));
}

}  // namespace
}  // namespace flash_kda::cuda::portable
