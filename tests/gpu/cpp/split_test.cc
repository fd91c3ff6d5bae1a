// What cuda.sm90_split alone has: windows, many segments, preparation beside the recurrence; its
// workspace and its choices.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cuda/portable/forward/sizes.h"
#include "cuda/sm90_split/forward/cost.h"
#include "cuda/sm90_split/forward/divisor.h"
#include "cuda/sm90_split/forward/layout.h"
#include "gpu/cpp/target.h"

namespace flash_kda::cuda::sm90_split {
namespace {

using testing::beside;
using testing::check_cuda;
using testing::DeviceCall;
using testing::divided;
using testing::Exact;
using testing::exact_forward;
using testing::ForwardInputs;
using testing::split_target;
using testing::Target;

using SplitForward = testing::GpuTest;
INSTANTIATE_TEST_SUITE_P(Split, SplitForward,
                         ::testing::Values(testing::whole_target("split", kForward)));

TEST_P(SplitForward, WindowsAndSegments) {
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{}, {0, 7, 7, 80, 84, 300}, {0, 0, 0, 290, 300}}) {
    ForwardInputs x(1, 300, 2, offsets);
    const Exact exact = exact_forward(x.args());
    for (int64_t slots : {1, 2, 3, 7}) {
      std::vector<Options> all(4);
      all[1].segment_chunks = 1;
      all[2].segment_chunks = 2;
      all[3] = beside();
      for (Options& options : all) {
        if (options.segment_chunks == 0) options.segment_chunks = kWhole;
        if (options.groups == 0) options.groups = 1 + static_cast<int>(slots % 2);
        options.record_budget = slots * 2 * kRecordBytes;
        expect_near(split_target("windows", options), x.args(), exact,
                    "windows of " + std::to_string(slots));
      }
    }
  }
}

TEST_P(SplitForward, ManySequences) {
  std::vector<int64_t> offsets = {0};
  for (int i = 0; i < 70; ++i) offsets.push_back(offsets.back() + (i * 37) % 90);
  ForwardInputs x(1, offsets.back(), 2, offsets);
  const Exact exact = exact_forward(x.args());
  for (const Target& target : testing::targets()) {
    if (target.impl == &kForward) expect_near(target, x.args(), exact, target.name);
  }
}

// Two streams at once, each call over a workspace full of flags and records that are not its own.
TEST_P(SplitForward, NoRaceBesidePreparation) {
  constexpr int kCalls = 300;
  const Target side_by_side = split_target("beside", beside());
  for (int64_t tokens : {70, 1500}) {
    ForwardInputs x[2] = {{2, tokens, 5, {}, 1}, {2, tokens, 5, {}, 2}};
    ForwardInputs first[2] = {x[0], x[1]};
    std::unique_ptr<DeviceCall> calls[2];
    cudaStream_t streams[2] = {};
    for (int i = 0; i < 2; ++i) {
      run(divided(kWhole, 1), first[i].args());
      check_cuda(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
      calls[i] = std::make_unique<DeviceCall>(x[i].args());
      queue(side_by_side, calls[i].get(), streams[i]);
    }
    const int64_t bytes = side_by_side.workspace_bytes(2 * tokens, 5, 2);
    for (int n = 0; n < kCalls; ++n) {
      for (int i = 0; i < 2; ++i) {
        if (n % 3 == 0) {
          check_cuda(cudaMemsetAsync(calls[i]->workspace(bytes), n % 2 + 1, bytes, streams[i]));
        }
        queue(side_by_side, calls[i].get(), streams[i]);
      }
      if (n % 10 != 9) continue;
      for (int i = 0; i < 2; ++i) {
        calls[i]->fetch();
        ASSERT_EQ(x[i].out, first[i].out) << n;
        ASSERT_EQ(x[i].final_state, first[i].final_state) << n;
      }
    }
    for (cudaStream_t stream : streams) check_cuda(cudaStreamDestroy(stream));
  }
}

TEST(SplitWorkspace, IsBounded) {
  EXPECT_LE(kForward.workspace_bytes(1 << 20, 64, 16), kRecordBudget + (64 << 20));
  EXPECT_LE(kForward.workspace_bytes(8192, 12, 1), 112 << 20);
}

TEST(SplitDivisor, DividesExactly) {
  constexpr uint32_t kMost = (uint32_t{1} << 31) - 1;
  for (uint32_t d : {1U, 2U, 3U, 5U, 7U, 12U, 48U, 64U, 96U, 641U, 65535U, 65537U, kMost / 2,
                     kMost / 2 + 2, kMost - 1, kMost}) {
    const Divisor divisor(d);
    for (uint64_t multiple = 0; multiple <= kMost;
         multiple += (kMost / d / 1000 + 1) * uint64_t{d}) {
      for (int64_t off : {-1, 0, 1}) {
        const int64_t n = static_cast<int64_t>(multiple) + off;
        if (n < 0 || n > kMost) continue;
        ASSERT_EQ(divisor.quotient(static_cast<uint32_t>(n)), n / d) << n << " / " << d;
      }
    }
    ASSERT_EQ(divisor.quotient(kMost), kMost / d) << d;
  }
}

// Segments where few pairs leave the device idle, none where many fill it.
TEST(SplitDivision, CutsLongSequencesOfFewHeads) {
  Work work;
  work.multiprocessors = 132;
  work.most_maps = kMostMaps;
  for (int64_t heads : {1, 8, 12}) {
    work.heads = work.pairs = heads;
    work.chunks = 2048;
    EXPECT_LT(choose_division(work).segment_chunks, 2048);
    work.chunks = 4;
    EXPECT_GT(choose_division(work).segment_chunks, 4);
  }
  // Between the two, chains leave multiprocessors that can prepare meanwhile.
  work.heads = work.pairs = 32;
  work.chunks = 256;
  EXPECT_GT(choose_division(work).preparing, 0);
  work.heads = work.pairs = 128;
  work.chunks = 256;
  EXPECT_GT(choose_division(work).segment_chunks, 256);
  EXPECT_EQ(choose_division(work).preparing, 0);
}

// As run_with counts them, which refuses a division with more.
TEST(SplitDivision, MapsFitTheWorkspace) {
  Work work;
  work.multiprocessors = 132;
  for (int64_t sequences = 1; sequences <= 70; ++sequences) {
    for (int64_t heads : {1, 2, 3, 4, 5, 8, 12, 16, 24, 40}) {
      for (int64_t tokens : {0, 1, 500, 2048, 8192, 10000, 65536, 131072}) {
        const Layout layout = make_layout(tokens * sequences, heads, sequences, kRecordBudget,
                                          kLeastSegment, 2 * kLeastSegment, kMostMaps);
        const int64_t in_window =
            portable::sequences_per_window(sequences, layout.slots_per_window);
        work.chunks = layout.slots_per_window / in_window;
        work.heads = heads;
        work.pairs = in_window * heads;
        work.most_maps = layout.most_maps;
        for (bool even : {false, true}) {
          work.even = even;
          const int64_t cuts = layout.slots_per_window / choose_division(work).segment_chunks;
          if (cuts == 0) continue;
          ASSERT_LE((in_window + cuts) * heads, layout.most_maps)
              << sequences << " sequences of " << tokens << ", heads " << heads;
        }
      }
    }
  }
}

// The search leaves out what can't be the least.
TEST(SplitDivision, IsTheLeastOfAll) {
  Work work;
  work.multiprocessors = 132;
  work.most_maps = int64_t{1} << 40;
  for (int64_t sequences : {1, 2, 5, 33}) {
    for (int64_t heads : {1, 2, 3, 4, 6, 8, 11, 12, 16, 24, 36, 64}) {
      for (int64_t chunks : {1, 8, 16, 47, 64, 79, 256, 313, 1024, 2048, 31250}) {
        for (bool even : {false, true}) {
          work.heads = heads;
          work.pairs = sequences * heads;
          work.chunks = chunks;
          work.even = even;
          double least = divide(work, 1, chunks, 2).microseconds;
          const int64_t most =
              std::min(chunks / kLeastSegment, work.multiprocessors / work.pairs + 1);
          for (int64_t n = 1; n <= std::max<int64_t>(most, 1); ++n) {
            const int64_t segment_chunks = ceil_divide(chunks, n);
            const int64_t segments = ceil_divide(chunks, segment_chunks);
            for (int groups : {1, 2}) {
              least = std::min(least, divide(work, segments, segment_chunks, groups).microseconds);
            }
          }
          if (sequences == 1 && fits_beside(work)) {
            least = std::min(least, divide_beside(work).microseconds);
          }
          ASSERT_EQ(choose_division(work).microseconds, least)
              << sequences << " sequences of " << chunks << " chunks, heads " << heads;
        }
      }
    }
  }
}

TEST(SplitDivision, NothingToDoCostsLittle) {
  Work work;
  work.multiprocessors = 132;
  work.most_maps = kMostMaps;
  EXPECT_LT(total_microseconds(work), 100.0);
  work.heads = work.pairs = 3;  // sequences without tokens
  EXPECT_LT(total_microseconds(work), 100.0);
}

}  // namespace
}  // namespace flash_kda::cuda::sm90_split
