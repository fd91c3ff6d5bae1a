// cuda.portable against the equations in double precision, and what it promises beyond numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "cpp/cpu_inputs.h"
#include "cuda/portable/forward/impl.h"
#include "gpu/cpp/device_call.h"
#include "ops/forward/impls.h"

namespace flash_kda::cuda::portable {
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

class PortableForward : public ::testing::Test {
 protected:
  void SetUp() override {
    ForwardProblem problem;
    problem.device = {DeviceType::kCuda, 0};
    const Status status = kForward.accepts(problem);
    if (!status.ok()) GTEST_SKIP() << status.message();
  }

  // Runs and brings the results back into the host tensors of `args`.
  static void run(const ForwardArgs& args, const Options& options = {}) {
    DeviceCall call(args);
    queue(&call, options);
    call.fetch();
    EXPECT_TRUE(call.guards_intact());
  }

  static void queue(DeviceCall* call, const Options& options = {}) {
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
                              const Options& options = {}) {
    const Exact exact = exact_forward(args);  // before the run: states may share memory
    run(args, options);
    const double output = output_error(args, exact);
    const double state = args.final_state.given() ? state_error(args, exact) : 0.0;
    EXPECT_LE(output, output_tolerance) << what;
    EXPECT_LE(state, state_tolerance) << what;
    if (std::getenv("FLASH_KDA_PRINT_ERRORS") != nullptr) {
      std::printf("%-36s out %.2e  state %.2e\n", what.c_str(), output, state);
    }
  }
};

TEST_F(PortableForward, MatchesTheEquationsOnHardInputs) {
  for (const testing::InputKind& kind : testing::input_kinds()) {
    ForwardInputs x(1, kind.tokens, kind.heads);
    kind.fill(&x);
    const std::string name = kind.name;
    const bool collinear =
        name.find("key") != std::string::npos || name.find("cosine") != std::string::npos;
    expect_accurate(x.args(), name, collinear ? kCollinearOutputTolerance : kOutputTolerance,
                    collinear ? kCollinearStateTolerance : kStateTolerance);
  }
}

TEST_F(PortableForward, ValuesOfAnyMagnitude) {
  for (float magnitude : {1e-30F, 1e-20F, 1e-6F, 1e4F, 1e20F, 1e30F}) {
    ForwardInputs x(1, 200, 2);
    for (uint16_t& v : x.v) v = float_to_bf16(bf16_to_float(v) * magnitude);
    for (float& s : x.initial_state) s *= magnitude;
    expect_accurate(x.args(), "v * " + std::to_string(magnitude));
  }
}

// Rows whose magnitude moves by many orders along the sequence, each in its own way.
void move_magnitudes(ForwardInputs* x) {
  for (size_t i = 0; i < x->v.size(); ++i) {
    const double token = static_cast<double>(i / kHeadDim) / static_cast<double>(x->heads);
    const double channel = static_cast<double>(i % kHeadDim);
    const double power = 12.0 * std::sin(token / 40.0 + channel);
    x->v[i] = float_to_bf16(static_cast<float>(bf16_to_float(x->v[i]) * std::exp2(power)));
  }
}

TEST_F(PortableForward, ValuesThatChangeMagnitude) {
  ForwardInputs x(1, 512, 1);
  move_magnitudes(&x);
  expect_accurate(x.args(), "v of moving magnitude");
}

TEST_F(PortableForward, LargeValuesAfterZeros) {
  ForwardInputs x(1, 256, 1);
  std::fill(x.initial_state.begin(), x.initial_state.end(), 0.0F);
  for (size_t i = 0; i < x.v.size(); ++i) {
    x.v[i] = i < x.v.size() / 2 ? uint16_t{0} : float_to_bf16(bf16_to_float(x.v[i]) * 1e20F);
  }
  expect_accurate(x.args(), "zeros, then large v");
}

TEST_F(PortableForward, TailsAndBatches) {
  for (int64_t tokens : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130}) {
    ForwardInputs x(2, tokens, 3, {}, static_cast<uint32_t>(tokens));
    expect_accurate(x.args(), "2 x " + std::to_string(tokens) + " x 3");
  }
}

TEST_F(PortableForward, SequencesOfAnyLengths) {
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 5, 70},
                                              {0, 0, 5, 5, 5, 21, 21},
                                              {0, 33, 34, 66, 66, 131},
                                              {0, 1, 2, 3, 4, 5, 6, 7, 40}}) {
    ForwardInputs x(1, offsets.back(), 2, offsets);
    expect_accurate(x.args(), "varlen to " + std::to_string(offsets.back()));
  }
}

TEST_F(PortableForward, StateTypesAreIndependent) {
  for (DType initial : {DType::kOther, DType::kBFloat16, DType::kFloat32}) {
    for (DType final : {DType::kOther, DType::kBFloat16, DType::kFloat32}) {
      ForwardInputs x(1, 75, 2, {0, 40, 40, 75});
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

TEST_F(PortableForward, EmptySequencesPassTheStateOn) {
  ForwardInputs x(1, 20, 2, {0, 0, 20, 20});
  const std::vector<float> before = x.initial_state;
  run(x.args());
  const size_t size = 2 * kHeadDim * kHeadDim;
  for (size_t i = 0; i < size; ++i) {
    ASSERT_EQ(x.final_state[i], before[i]);
    ASSERT_EQ(x.final_state[2 * size + i], before[2 * size + i]);
  }
  ForwardArgs args = x.args();
  args.initial_state = {};
  run(args);
  for (size_t i = 0; i < size; ++i) ASSERT_EQ(x.final_state[i], 0.0F);
}

TEST_F(PortableForward, NoTokens) {
  ForwardInputs x(2, 0, 2);
  run(x.args());
  EXPECT_EQ(x.final_state, x.initial_state);
}

TEST_F(PortableForward, StateInPlace) {
  ForwardInputs x(2, 100, 2);
  ForwardArgs args = x.args();
  args.final_state = args.initial_state;
  expect_accurate(args, "state in place");
}

TEST_F(PortableForward, StridesAndTypes) {
  ForwardInputs x(2, 70, 2);
  ForwardArgs args = x.args();
  const ForwardArgs dense = args;
  StridedRows q(dense.q, 8, 16), k(dense.k, 256, 0), v(dense.v, 24, 8), g(dense.g, 0, 64),
      out(dense.out, 128, 32);
  args.q = q.ref();
  args.k = k.ref();
  args.v = v.ref();
  args.g = g.ref();
  args.out = out.ref();
  std::vector<float> beta(x.beta.size() * 3);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        beta[static_cast<size_t>((h * 2 + b) * 210 + t * 3)] =
            bf16_to_float(x.beta[static_cast<size_t>((b * 70 + t) * 2 + h)]);
      }
    }
  }
  args.beta = dense_tensor(beta.data(), DType::kFloat32, {2, 70, 2});
  args.beta.stride[0] = 210;
  args.beta.stride[1] = 3;
  args.beta.stride[2] = 420;
  std::vector<uint16_t> a_log(2, float_to_bf16(0.5F)), bias(256, float_to_bf16(0.5F));
  args.A_log = dense_tensor(a_log.data(), DType::kBFloat16, {2});
  args.dt_bias = dense_tensor(bias.data(), DType::kBFloat16, {256});
  const Exact exact = exact_forward(dense);
  run(args);
  EXPECT_LE(output_error(args, exact), kOutputTolerance);
  EXPECT_LE(state_error(args, exact), kStateTolerance);
  EXPECT_TRUE(out.gaps_untouched());
}

TEST_F(PortableForward, MissingParametersAreZeros) {
  ForwardInputs x(1, 40, 2);
  ForwardArgs args = x.args();
  args.A_log = {};
  args.dt_bias = {};
  expect_accurate(args, "no A_log, no dt_bias");
}

TEST_F(PortableForward, BetaLogitsAtTheEnds) {
  ForwardInputs x(1, 64, 1);
  const float ends[] = {INFINITY, -INFINITY, 60.0F, -60.0F};
  for (size_t i = 0; i < x.beta.size(); ++i) x.beta[i] = float_to_bf16(ends[i % 4]);
  expect_accurate(x.args(), "beta logits of +-infinity and +-60");
}

TEST_F(PortableForward, RowsOfNoSequenceStayAsTheyAre) {
  ForwardInputs x(1, 128, 2, {0, 40, 100});
  expect_accurate(x.args(), "rows past the last sequence");
  for (size_t i = 100 * 2 * kHeadDim; i < x.out.size(); ++i) {
    ASSERT_EQ(x.out[i], ForwardInputs::kPoison);
  }
}

TEST_F(PortableForward, NanStaysInItsSequence) {
  ForwardInputs clean(1, 40, 2, {0, 13, 40});
  ForwardInputs x = clean;
  run(clean.args());
  const size_t row = 2 * kHeadDim, state = 2 * kHeadDim * kHeadDim;
  for (size_t i = 13 * row; i < 40 * row; ++i) {
    x.q[i] = x.k[i] = x.v[i] = x.g[i] = ForwardInputs::kPoison;
  }
  for (size_t i = 26; i < 80; ++i) x.beta[i] = ForwardInputs::kPoison;
  for (size_t i = state; i < 2 * state; ++i) x.initial_state[i] = NAN;
  run(x.args());
  for (size_t i = 0; i < 13 * row; ++i) ASSERT_EQ(x.out[i], clean.out[i]);
  for (size_t i = 0; i < state; ++i) ASSERT_EQ(x.final_state[i], clean.final_state[i]);
}

// Offsets that no host has checked must not lead outside the tensors.
TEST_F(PortableForward, MalformedOffsetsAreMemorySafe) {
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 90, 10, 96},
                                              {-5, 40, 1000000, 96},
                                              {50, 20, -7, 300},
                                              {int64_t{1} << 40, -(int64_t{1} << 40), 5, 96}}) {
    ForwardInputs x(1, 96, 2, {0, 30, 60, 96});
    ForwardArgs args = x.args();
    DeviceCall call(args);
    testing::check_cuda(
        cudaMemcpy(call.args().cu_seqlens.data, offsets.data(), 32, cudaMemcpyHostToDevice));
    queue(&call);
    call.fetch();
    EXPECT_TRUE(call.guards_intact());
  }
}

TEST_F(PortableForward, CheckedOffsetsAreAnError) {
  ForwardInputs x(1, 96, 1, {0, 30, 96});
  DeviceCall call(x.args());
  const int64_t offsets[] = {0, 97, 96};
  testing::check_cuda(
      cudaMemcpy(call.args().cu_seqlens.data, offsets, sizeof offsets, cudaMemcpyHostToDevice));
  ForwardProblem p;
  ASSERT_TRUE(call.problem(&p).ok());
  const int64_t bytes = kForward.workspace_bytes(96, 1, 2);
  setenv("FLASH_KDA_CHECK", "1", 1);
  const Status status = kForward.run(p, call.workspace(bytes), bytes);
  unsetenv("FLASH_KDA_CHECK");
  EXPECT_EQ(status.code(), StatusCode::kInvalidValue);
  EXPECT_NE(status.message().find("cu_seqlens"), std::string::npos) << status.message();
}

// Windows and parts of a head divide the work and must not show in the results.
TEST_F(PortableForward, ResultsDoNotDependOnTheDivision) {
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
        run(x.args(), options);
        ASSERT_EQ(x.out, whole.out) << parts << " parts, windows of " << slots;
        ASSERT_EQ(x.final_state, whole.final_state) << parts << " parts, windows of " << slots;
      }
    }
  }
}

TEST(PortableWorkspace, GrowsWithEveryArgument) {
  for (int64_t tokens = 0; tokens < 300; tokens += 7) {
    for (int64_t heads : {1, 2, 3, 50, 96, 39000, 40000}) {
      for (int64_t sequences : {1, 2, 5, 40, 1000}) {
        const int64_t bytes = kForward.workspace_bytes(tokens, heads, sequences);
        EXPECT_LE(bytes, kForward.workspace_bytes(tokens + 1, heads, sequences));
        EXPECT_LE(bytes, kForward.workspace_bytes(tokens, heads + 1, sequences));
        EXPECT_LE(bytes, kForward.workspace_bytes(tokens, heads, sequences + 1));
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
