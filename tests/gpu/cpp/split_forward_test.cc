// cuda.sm90_split against the equations in double precision: whole sequences, segments and windows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>

#include "cpp/cpu_inputs.h"
#include "cuda/sm90_split/forward/cost.h"
#include "cuda/sm90_split/forward/divisor.h"
#include "cuda/sm90_split/forward/impl.h"
#include "gpu/cpp/device_call.h"
#include "ops/forward/impls.h"

namespace flash_kda::cuda::sm90_split {
namespace {

using testing::DeviceCall;
using testing::Exact;
using testing::exact_forward;
using testing::ForwardInputs;
using testing::output_error;
using testing::state_error;
using testing::StateBuffer;
using testing::StridedRows;

constexpr double kOutputTolerance = 2.5e-3;  // rounding to bf16 alone is about 1.7e-3
constexpr double kStateTolerance = 1e-3;
constexpr double kBf16StateTolerance = 2.5e-3;
// Keys that all but coincide: each update cancels most of the one before, and fp16 rounding adds
// up.
constexpr double kCollinearOutputTolerance = 8e-3;
constexpr double kCollinearStateTolerance = 1.6e-2;

constexpr int64_t kWhole = int64_t{1} << 30;  // chunks: no segments

Options divided(int64_t segment_chunks, int groups = 0) {
  Options options;
  options.segment_chunks = segment_chunks;
  options.groups = groups;
  return options;
}

// Whole, by halves, with preparation running beside the recurrence.
Options beside() {
  Options options = divided(kWhole, 1);
  options.beside = true;
  return options;
}

// Whole by halves and by heads, and segments, the shortest and an uneven one among them.
const std::vector<Options>& divisions() {
  static const std::vector<Options> all = {divided(kWhole, 1), divided(kWhole, 2), beside(),
                                           divided(1),         divided(3, 1),      divided(8, 2)};
  return all;
}

std::string text(const Options& options) {
  if (options.segment_chunks != kWhole) {
    return "segments of " + std::to_string(options.segment_chunks);
  }
  return "whole, " + std::to_string(options.groups) + (options.beside ? ", beside" : "");
}

class SplitForward : public ::testing::Test {
 protected:
  void SetUp() override {
    ForwardProblem problem;
    problem.device = {DeviceType::kCuda, 0};
    const Status status = kForward.accepts(problem);
    if (!status.ok()) GTEST_SKIP() << status.message();
  }

  // Runs and brings the results back into the host tensors of `args`.
  static void run(const ForwardArgs& args, const Options& options) {
    DeviceCall call(args);
    queue(&call, options);
    call.fetch();
    EXPECT_TRUE(call.guards_intact());
  }

  static void queue(DeviceCall* call, const Options& options) {
    ForwardProblem p;
    const Status legal = call->problem(&p);
    ASSERT_TRUE(legal.ok()) << legal.message();
    const int64_t bytes = workspace_bytes_with(options, p.tokens_total(), p.heads, p.sequences);
    const Status status = run_with(options, p, call->workspace(bytes), bytes);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  static void expect_accurate(const ForwardArgs& args, const std::string& what,
                              double output_tolerance = kOutputTolerance,
                              double state_tolerance = kStateTolerance,
                              const std::vector<Options>& all = divisions()) {
    const Exact exact = exact_forward(args);
    for (const Options& options : all) {
      run(args, options);
      const double output = output_error(args, exact);
      const double state = args.final_state.given() ? state_error(args, exact) : 0.0;
      EXPECT_LE(output, output_tolerance) << what << ", " << text(options);
      EXPECT_LE(state, state_tolerance) << what << ", " << text(options);
      if (std::getenv("FLASH_KDA_PRINT_ERRORS") != nullptr) {
        std::printf("%-36s %-16s out %.2e  state %.2e\n", what.c_str(), text(options).c_str(),
                    output, state);
      }
    }
  }
};

TEST_F(SplitForward, MatchesTheEquationsOnHardInputs) {
  for (const testing::InputKind& kind : testing::input_kinds()) {
    ForwardInputs x(1, kind.tokens, kind.heads);
    kind.fill(&x);
    const std::string name = kind.name;
    const bool collinear =
        name.find("key") != std::string::npos || name.find("cosine") != std::string::npos;
    expect_accurate(x.args(), name, collinear ? kCollinearOutputTolerance : kOutputTolerance,
                    collinear ? kCollinearStateTolerance : kStateTolerance,
                    {divided(kWhole, 1), beside(), divided(8, 2)});
  }
}

TEST_F(SplitForward, ValuesOfAnyMagnitude) {
  for (float magnitude : {1e-30F, 1e-20F, 1e-6F, 1e4F, 1e20F, 1e30F}) {
    ForwardInputs x(1, 200, 2);
    for (uint16_t& v : x.v) v = float_to_bf16(bf16_to_float(v) * magnitude);
    for (float& s : x.initial_state) s *= magnitude;
    expect_accurate(x.args(), "v * " + std::to_string(magnitude));
  }
}

// Rows whose magnitude moves by many orders along the sequence, each in its own way, and rows that
// are zero for long.
TEST_F(SplitForward, ValuesThatChangeMagnitude) {
  ForwardInputs x(1, 512, 1);
  for (size_t i = 0; i < x.v.size(); ++i) {
    const double token = static_cast<double>(i / kHeadDim);
    const double channel = static_cast<double>(i % kHeadDim);
    const double power = 12.0 * std::sin(token / 40.0 + channel);
    x.v[i] = float_to_bf16(static_cast<float>(bf16_to_float(x.v[i]) * std::exp2(power)));
  }
  expect_accurate(x.args(), "v of moving magnitude");
  x.initial_state.assign(x.initial_state.size(), 0.0F);
  for (size_t i = 0; i < x.v.size(); ++i) {
    x.v[i] = i < x.v.size() / 2 ? uint16_t{0} : float_to_bf16(bf16_to_float(x.v[i]) * 1e20F);
  }
  expect_accurate(x.args(), "zeros, then large v");
}

TEST_F(SplitForward, TailsAndBatches) {
  for (int64_t tokens : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130, 260}) {
    ForwardInputs x(2, tokens, 3, {}, static_cast<uint32_t>(tokens));
    expect_accurate(x.args(), "2 x " + std::to_string(tokens) + " x 3");
  }
}

TEST_F(SplitForward, SequencesOfAnyLengths) {
  std::vector<int64_t> many = {0};
  for (int i = 0; i < 70; ++i) many.push_back(many.back() + (i * 37) % 90);
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 5, 70},
                                              {0, 0, 5, 5, 5, 21, 21},
                                              {0, 33, 34, 66, 66, 131},
                                              {0, 1, 2, 3, 4, 5, 6, 7, 40},
                                              {0, 300, 300, 310, 700},
                                              many}) {
    ForwardInputs x(1, offsets.back(), 2, offsets);
    expect_accurate(x.args(), "varlen to " + std::to_string(offsets.back()));
  }
}

TEST_F(SplitForward, WindowsAndSegments) {
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{}, {0, 7, 7, 80, 84, 300}, {0, 0, 0, 290, 300}}) {
    ForwardInputs x(1, 300, 2, offsets);
    std::vector<Options> all;
    for (int64_t slots : {1, 2, 3, 7}) {
      for (int64_t chunks : {kWhole, int64_t{1}, int64_t{2}}) {
        all.push_back(divided(chunks, 1 + static_cast<int>(slots % 2)));
        all.back().record_budget = slots * 2 * kRecordBytes;
      }
      all.push_back(beside());
      all.back().record_budget = slots * 2 * kRecordBytes;
    }
    expect_accurate(x.args(), "windows", kOutputTolerance, kStateTolerance, all);
  }
}

TEST_F(SplitForward, StateTypesAreIndependent) {
  for (DType initial : {DType::kOther, DType::kBFloat16, DType::kFloat32}) {
    for (DType final : {DType::kOther, DType::kBFloat16, DType::kFloat32}) {
      ForwardInputs x(1, 175, 2, {0, 40, 40, 175});
      StateBuffer from(x, initial), to(x, final);
      from.fill(x.initial_state);
      ForwardArgs args = x.args();
      args.initial_state = from.ref();
      args.final_state = to.ref();
      expect_accurate(args, "states", kOutputTolerance,
                      final == DType::kFloat32 ? kStateTolerance : kBf16StateTolerance);
    }
  }
}

TEST_F(SplitForward, EmptySequencesPassTheStateOn) {
  for (const Options& options : divisions()) {
    ForwardInputs x(1, 20, 2, {0, 0, 20, 20});
    const std::vector<float> before = x.initial_state;
    run(x.args(), options);
    const size_t size = 2 * kHeadDim * kHeadDim;
    for (size_t i = 0; i < size; ++i) {
      ASSERT_EQ(x.final_state[i], before[i]);
      ASSERT_EQ(x.final_state[2 * size + i], before[2 * size + i]);
    }
    ForwardArgs args = x.args();
    args.initial_state = {};
    run(args, options);
    for (size_t i = 0; i < size; ++i) ASSERT_EQ(x.final_state[i], 0.0F);
  }
}

TEST_F(SplitForward, NoTokens) {
  ForwardInputs x(2, 0, 2);
  run(x.args(), {});
  EXPECT_EQ(x.final_state, x.initial_state);
}

TEST_F(SplitForward, StateInPlace) {
  for (const Options& options : divisions()) {
    ForwardInputs x(2, 100, 2);
    ForwardArgs args = x.args();
    args.final_state = args.initial_state;
    expect_accurate(args, "state in place", kOutputTolerance, kStateTolerance, {options});
  }
}

TEST_F(SplitForward, StridesAndTypes) {
  ForwardInputs x(2, 170, 2);
  ForwardArgs args = x.args();
  const ForwardArgs dense = args;
  StridedRows q(dense.q, 8, 16), k(dense.k, 256, 0), v(dense.v, 24, 8), g(dense.g, 0, 64),
      out(dense.out, 128, 32);
  args.q = q.ref();
  args.k = k.ref();
  args.v = v.ref();
  args.g = g.ref();
  args.out = out.ref();
  std::vector<uint16_t> a_log(2, float_to_bf16(0.5F)), bias(256, float_to_bf16(0.5F));
  args.A_log = dense_tensor(a_log.data(), DType::kBFloat16, {2});
  args.dt_bias = dense_tensor(bias.data(), DType::kBFloat16, {256});
  const Exact exact = exact_forward(dense);
  for (const Options& options : divisions()) {
    run(args, options);
    EXPECT_LE(output_error(args, exact), kOutputTolerance);
    EXPECT_LE(state_error(args, exact), kStateTolerance);
    EXPECT_TRUE(out.gaps_untouched());
  }
}

TEST_F(SplitForward, RowsOfNoSequenceStayAsTheyAre) {
  ForwardInputs x(1, 128, 2, {0, 40, 100});
  expect_accurate(x.args(), "rows past the last sequence");
  for (size_t i = 100 * 2 * kHeadDim; i < x.out.size(); ++i) {
    ASSERT_EQ(x.out[i], ForwardInputs::kPoison);
  }
}

TEST_F(SplitForward, NanStaysInItsSequence) {
  for (const Options& options : divisions()) {
    ForwardInputs clean(1, 140, 2, {0, 73, 140});
    ForwardInputs x = clean;
    run(clean.args(), options);
    const size_t row = 2 * kHeadDim, state = 2 * kHeadDim * kHeadDim;
    for (size_t i = 73 * row; i < 140 * row; ++i) {
      x.q[i] = x.k[i] = x.v[i] = x.g[i] = ForwardInputs::kPoison;
    }
    for (size_t i = 2 * 73; i < 2 * 140; ++i) x.beta[i] = ForwardInputs::kPoison;
    for (size_t i = state; i < 2 * state; ++i) x.initial_state[i] = NAN;
    run(x.args(), options);
    for (size_t i = 0; i < 73 * row; ++i) ASSERT_EQ(x.out[i], clean.out[i]) << text(options);
    for (size_t i = 0; i < state; ++i) ASSERT_EQ(x.final_state[i], clean.final_state[i]);
  }
}

// Offsets that no host has checked must not lead outside the tensors.
TEST_F(SplitForward, MalformedOffsetsAreMemorySafe) {
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 90, 10, 96},
                                              {-5, 40, 1000000, 96},
                                              {50, 20, -7, 300},
                                              {int64_t{1} << 40, -(int64_t{1} << 40), 5, 96}}) {
    for (const Options& options : divisions()) {
      ForwardInputs x(1, 96, 2, {0, 30, 60, 96});
      DeviceCall call(x.args());
      testing::check_cuda(
          cudaMemcpy(call.args().cu_seqlens.data, offsets.data(), 32, cudaMemcpyHostToDevice));
      queue(&call, options);
      call.fetch();
      EXPECT_TRUE(call.guards_intact());
    }
  }
}

TEST_F(SplitForward, BitwiseRepeatable) {
  for (const Options& options : divisions()) {
    ForwardInputs x(1, 700, 2, {0, 300, 300, 310, 700});
    run(x.args(), options);
    for (int i = 0; i < 10; ++i) {
      ForwardInputs again(1, 700, 2, {0, 300, 300, 310, 700});
      run(again.args(), options);
      ASSERT_EQ(again.out, x.out) << text(options);
      ASSERT_EQ(again.final_state, x.final_state) << text(options);
    }
  }
}

// Two streams at once, each call over a workspace full of flags and records that are not its own.
TEST_F(SplitForward, NoRaceBesidePreparation) {
  constexpr int kCalls = 300;
  for (int64_t tokens : {70, 1500}) {
    ForwardInputs x[2] = {{2, tokens, 5, {}, 1}, {2, tokens, 5, {}, 2}};
    ForwardInputs first[2] = {x[0], x[1]};
    std::unique_ptr<DeviceCall> calls[2];
    cudaStream_t streams[2] = {};
    for (int i = 0; i < 2; ++i) {
      run(first[i].args(), divided(kWhole, 1));
      testing::check_cuda(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
      calls[i] = std::make_unique<DeviceCall>(x[i].args());
      calls[i]->args().stream = streams[i];
      queue(calls[i].get(), beside());
    }
    const int64_t bytes = workspace_bytes_with(beside(), 2 * tokens, 5, 2);
    for (int n = 0; n < kCalls; ++n) {
      for (int i = 0; i < 2; ++i) {
        if (n % 3 == 0) {
          testing::check_cuda(
              cudaMemsetAsync(calls[i]->workspace(bytes), n % 2 + 1, bytes, streams[i]));
        }
        queue(calls[i].get(), beside());
      }
      if (n % 10 != 9) continue;
      for (int i = 0; i < 2; ++i) {
        calls[i]->fetch();
        ASSERT_EQ(x[i].out, first[i].out) << n;
        ASSERT_EQ(x[i].final_state, first[i].final_state) << n;
      }
    }
    for (cudaStream_t stream : streams) testing::check_cuda(cudaStreamDestroy(stream));
  }
}

TEST(SplitWorkspace, GrowsWithEveryArgument) {
  for (int64_t tokens = 0; tokens < 300; tokens += 7) {
    for (int64_t heads : {1, 2, 3, 50, 96, 36000, 37000}) {
      for (int64_t sequences : {1, 2, 5, 40, 1000}) {
        const int64_t bytes = kForward.workspace_bytes(tokens, heads, sequences);
        EXPECT_LE(bytes, kForward.workspace_bytes(tokens + 1, heads, sequences));
        EXPECT_LE(bytes, kForward.workspace_bytes(tokens, heads + 1, sequences));
        EXPECT_LE(bytes, kForward.workspace_bytes(tokens, heads, sequences + 1));
      }
    }
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

}  // namespace
}  // namespace flash_kda::cuda::sm90_split
