// The CPU implementation, as compiled for every instruction set that this machine has, against the
// equations in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "cpp/cpu_inputs.h"
#include "cpu/forward/kernels.h"

namespace flash_kda::cpu {
namespace {

using testing::Exact;
using testing::exact_forward;
using testing::ForwardInputs;
using testing::output_error;
using testing::state_error;

constexpr double kOutputTolerance = 3e-3;  // rounding to bf16 alone is about 1.7e-3
constexpr double kStateTolerance = 1e-5;

void set_threads(int count) {
#ifdef _OPENMP
  omp_set_num_threads(count);
#else
  static_cast<void>(count);
#endif
}

void run_forward(const Kernels& kernels, const ForwardArgs& args) {
  ForwardProblem problem;
  const Status legal = validate(args, &problem);
  ASSERT_TRUE(legal.ok()) << legal.message();
  const Status status = run_with(kernels, problem);
  ASSERT_TRUE(status.ok()) << status.message();
}

void compare(const Kernels& kernels, const ForwardArgs& args, const Exact& exact,
             const std::string& what, double state_tolerance) {
  const double output = output_error(args, exact);
  EXPECT_LE(output, kOutputTolerance) << kernels.isa << ", " << what;
  if (!args.final_state.given()) return;
  const double state = state_error(args, exact);
  EXPECT_LE(state, state_tolerance) << kernels.isa << ", " << what;
  if (std::getenv("FLASH_KDA_PRINT_ERRORS") != nullptr) {
    std::printf("%-9s %-34s out %.2e  state %.2e\n", kernels.isa, what.c_str(), output, state);
  }
}

class CpuForward : public ::testing::TestWithParam<const Kernels*> {
 protected:
  void SetUp() override { set_threads(2); }

  void run(const ForwardArgs& args) { run_forward(*GetParam(), args); }

  // Runs and compares every row that belongs to a sequence, and the final state.
  void expect_accurate(const ForwardArgs& args, const std::string& what,
                       double state_tolerance = kStateTolerance) {
    const Exact exact = exact_forward(args);  // before the run: states may share memory
    run(args);
    compare(*GetParam(), args, exact, what, state_tolerance);
  }
};

class CpuInputKinds : public ::testing::TestWithParam<testing::InputKind> {};

TEST_P(CpuInputKinds, OnEveryInstructionSet) {
  const testing::InputKind& kind = GetParam();
  ForwardInputs inputs(1, kind.tokens, kind.heads);
  kind.fill(&inputs);
  const ForwardArgs args = inputs.args();
  const Exact exact = exact_forward(args);
  set_threads(2);
  for (const Kernels* kernels : usable_kernels()) {
    run_forward(*kernels, args);
    compare(*kernels, args, exact, kind.name, kStateTolerance);
  }
}

INSTANTIATE_TEST_SUITE_P(Hard, CpuInputKinds, ::testing::ValuesIn(testing::input_kinds()));

TEST_P(CpuForward, EveryLengthAroundBlocksAndChunks) {
  for (int64_t tokens : {1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 200}) {
    ForwardInputs inputs(2, tokens, 3, {}, static_cast<uint32_t>(tokens));
    expect_accurate(inputs.args(), "T=" + std::to_string(tokens));
  }
}

TEST_P(CpuForward, LowerBoundsAndScales) {
  for (double bound : {-5.0, -0.01, 0.0}) {
    ForwardInputs inputs(1, 150, 2);
    inputs.lower_bound = bound;
    inputs.scale = -3.0;
    expect_accurate(inputs.args(), "bound " + std::to_string(bound));
  }
}

TEST_P(CpuForward, SequencesOfAllLengthsAndBothOffsetTypes) {
  const std::vector<int64_t> offsets = {0, 0, 5, 5, 5, 21, 21, 85, 86, 216, 300, 300};
  ForwardInputs inputs(1, 310, 2, offsets);
  expect_accurate(inputs.args(), "int64 offsets");
  // Rows beyond the last offset are left as they are; those of the sequences are all written.
  const int64_t row = inputs.heads * kHeadDim;
  for (int64_t i = 0; i < 310 * row; ++i) {
    ASSERT_EQ(inputs.out[static_cast<size_t>(i)] == ForwardInputs::kPoison, i >= 300 * row) << i;
  }
  const std::vector<uint16_t> out = inputs.out;
  std::vector<int32_t> offsets32(offsets.begin(), offsets.end());
  ForwardArgs args = inputs.args();
  args.cu_seqlens = dense_tensor(offsets32.data(), DType::kInt32, {inputs.sequences + 1});
  run(args);
  EXPECT_EQ(out, inputs.out);
}

TEST_P(CpuForward, EmptySequencesPassTheirStateOn) {
  for (DType from : {DType::kOther, DType::kFloat32, DType::kBFloat16}) {
    for (DType to : {DType::kFloat32, DType::kBFloat16}) {
      ForwardInputs inputs(1, 70, 2, {0, 0, 70, 70});
      ForwardArgs args = inputs.args();
      testing::StateBuffer initial(inputs, from), final(inputs, to);
      initial.fill(inputs.initial_state);
      args.initial_state = initial.ref();
      args.final_state = final.ref();
      run(args);
      const int64_t size = inputs.heads * kHeadDim * kHeadDim;
      testing::StateBuffer rounded(inputs, to);
      for (int64_t i = 0; i < 3 * size; ++i) {
        if (i / size == 1) continue;  // the sequence with tokens
        const float expected = from == DType::kOther ? 0.0F : initial.at(i);
        rounded.set(i, expected);
        ASSERT_EQ(final.at(i), rounded.at(i)) << i;
      }
    }
  }
}

TEST_P(CpuForward, NoTokensAtAll) {
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{}, {0, 0, 0}}) {
    ForwardInputs inputs(1, 0, 2, offsets);
    run(inputs.args());
    EXPECT_EQ(inputs.initial_state, inputs.final_state);
    ForwardArgs args = inputs.args();
    args.initial_state = {};
    run(args);
    for (float value : inputs.final_state) ASSERT_EQ(value, 0.0F);
  }
}

TEST_P(CpuForward, StateTypesIndependently) {
  for (int64_t tokens : {3, 100}) {
    for (DType from : {DType::kOther, DType::kFloat32, DType::kBFloat16}) {
      for (DType to : {DType::kOther, DType::kFloat32, DType::kBFloat16}) {
        ForwardInputs inputs(2, tokens, 2);
        ForwardArgs args = inputs.args();
        testing::StateBuffer initial(inputs, from), final(inputs, to);
        initial.fill(inputs.initial_state);
        args.initial_state = initial.ref();
        args.final_state = final.ref();
        const double tolerance = to == DType::kBFloat16 ? kOutputTolerance : kStateTolerance;
        expect_accurate(args,
                        "states " + std::to_string(static_cast<int>(from)) + " to " +
                            std::to_string(static_cast<int>(to)),
                        tolerance);
      }
    }
  }
}

TEST_P(CpuForward, StateInPlace) {
  for (int64_t heads : {1, 3}) {  // fewer heads than threads, and more
    ForwardInputs inputs(1, 160, heads, {0, 1, 1, 160});
    set_threads(4);
    run(inputs.args());
    const std::vector<float> expected = inputs.final_state;
    ForwardArgs args = inputs.args();
    args.final_state = args.initial_state;
    run(args);
    EXPECT_EQ(expected, inputs.initial_state);
  }
}

TEST_P(CpuForward, StridedInputs) {
  ForwardInputs inputs(2, 90, 3);
  ForwardArgs args = inputs.args();
  run(args);
  const std::vector<uint16_t> expected = inputs.out;
  const std::vector<float> state = inputs.final_state;
  testing::StridedRows q(args.q, 5, 1), k(args.k, 1, 0), v(args.v, 7, 3), g(args.g, 3, 2);
  testing::StridedRows out(args.out, 11, 5);
  args.q = q.ref();
  args.k = k.ref();
  args.v = v.ref();
  args.g = g.ref();
  args.out = out.ref();
  // beta as [H, T, B] in float32.
  std::vector<float> beta(inputs.beta.size());
  for (int64_t i = 0; i < 2 * 90 * 3; ++i) {
    const int64_t b = i / 270, t = i / 3 % 90, h = i % 3;
    beta[static_cast<size_t>((h * 90 + t) * 2 + b)] = bf16_to_float(inputs.beta[i]);
  }
  args.beta = dense_tensor(beta.data(), DType::kFloat32, {2, 90, 3});
  args.beta.stride[0] = 1;
  args.beta.stride[1] = 2;
  args.beta.stride[2] = 180;
  run(args);
  EXPECT_EQ(expected, out.gather());
  EXPECT_EQ(state, inputs.final_state);
  EXPECT_TRUE(out.gaps_untouched());
}

TEST_P(CpuForward, GateParametersOfBothTypesOrNone) {
  ForwardInputs inputs(1, 80, 2);
  std::vector<uint16_t> a_log = {float_to_bf16(0.25F), float_to_bf16(-1.5F)};
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bias = testing::bf16_vector(2 * kHeadDim, [&] { return normal(engine); });
  ForwardArgs args = inputs.args();
  args.A_log = dense_tensor(a_log.data(), DType::kBFloat16, {2});
  args.dt_bias = dense_tensor(bias.data(), DType::kBFloat16, {2, kHeadDim});
  expect_accurate(args, "bf16 gate parameters");
  args.A_log = {};
  args.dt_bias = {};
  expect_accurate(args, "no gate parameters");
}

TEST_P(CpuForward, ExtremeLogitsAndGates) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (int64_t tokens : {8, 130}) {
    ForwardInputs inputs(1, tokens, 2);
    const float logits[] = {infinity, -infinity, 60.0F, -60.0F, 0.0F};
    for (size_t i = 0; i < inputs.beta.size(); ++i) inputs.beta[i] = float_to_bf16(logits[i % 5]);
    const float gates[] = {infinity, -infinity, 3e38F, -3e38F, 300.0F, -300.0F, 0.0F};
    for (size_t i = 0; i < inputs.g.size(); ++i) inputs.g[i] = float_to_bf16(gates[i % 7]);
    expect_accurate(inputs.args(), "extreme logits and gates");
  }
}

TEST_P(CpuForward, MagnitudesOfV) {
  for (float magnitude : {1e-20F, 1e20F}) {
    ForwardInputs inputs(1, 200, 1);
    for (uint16_t& v : inputs.v) v = float_to_bf16(bf16_to_float(v) * magnitude);
    for (float& s : inputs.initial_state) s *= magnitude;
    expect_accurate(inputs.args(), "v of " + std::to_string(magnitude));
  }
}

TEST_P(CpuForward, SameBitsForAnyNumberOfThreads) {
  const std::vector<int64_t> offsets = {0, 3, 3, 700, 780, 781};
  for (int64_t heads : {1, 2, 5}) {
    for (const std::vector<int64_t>& cu : {std::vector<int64_t>{}, offsets}) {
      ForwardInputs inputs(1, 781, heads, cu);
      set_threads(1);
      run(inputs.args());
      const std::vector<uint16_t> out = inputs.out;
      const std::vector<float> state = inputs.final_state;
      for (int threads : {2, 3, 16}) {
        set_threads(threads);
        inputs.out.assign(out.size(), ForwardInputs::kPoison);
        inputs.final_state.assign(state.size(), 0.0F);
        run(inputs.args());
        ASSERT_EQ(out, inputs.out) << threads << " threads, " << heads << " heads";
        ASSERT_EQ(state, inputs.final_state) << threads << " threads, " << heads << " heads";
      }
    }
  }
}

// What follows a token never changes its output: a prompt cut anywhere past the token-by-token
// lengths gives the same bits for its first part. Rounding to bf16 hides most differences, hence
// the many heads and cuts.
TEST_P(CpuForward, FirstPartIsTheSameBitsWhereverItIsCut) {
  const int64_t heads = 16;
  ForwardInputs whole(1, 200, heads);
  run(whole.args());
  for (int64_t cut = kDirectTokens + 1; cut < 200; cut += cut < 64 ? 1 : 13) {
    ForwardInputs part = whole;
    part.cu_seqlens = {0, cut};
    run(part.args());
    for (int64_t i = 0; i < cut * heads * kHeadDim; ++i) {
      ASSERT_EQ(part.out[static_cast<size_t>(i)], whole.out[static_cast<size_t>(i)])
          << "cut at " << cut << ", token " << i / (heads * kHeadDim);
    }
  }
}

TEST_P(CpuForward, NanStaysInItsSequence) {
  const uint16_t nan16 = 0x7fc0;
  const std::vector<int64_t> cu = {0, 13, 40, 140, 300};
  for (int threads : {1, 8}) {
    set_threads(threads);
    ForwardInputs clean(1, 300, 1, cu);
    run(clean.args());
    for (size_t sick = 0; sick < 4; ++sick) {
      ForwardInputs inputs(1, 300, 1, cu);
      for (auto* rows : {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta}) {
        const size_t row = rows->size() / 300;
        std::fill(rows->begin() + static_cast<int64_t>(row) * cu[sick],
                  rows->begin() + static_cast<int64_t>(row) * cu[sick + 1], nan16);
      }
      const int64_t size = kHeadDim * kHeadDim;
      std::fill_n(inputs.initial_state.begin() + static_cast<int64_t>(sick) * size, size, NAN);
      run(inputs.args());
      for (int64_t i = 0; i < 300 * kHeadDim; ++i) {
        const int64_t t = i / kHeadDim;
        const auto at = static_cast<size_t>(i);
        if (t >= cu[sick] && t < cu[sick + 1]) {
          ASSERT_TRUE(std::isnan(bf16_to_float(inputs.out[at])));
        } else {
          ASSERT_EQ(inputs.out[at], clean.out[at]) << "token " << t << ", sick " << sick;
        }
      }
      for (int64_t i = 0; i < 4 * size; ++i) {
        const auto at = static_cast<size_t>(i);
        if (i / size == static_cast<int64_t>(sick)) {
          ASSERT_TRUE(std::isnan(inputs.final_state[at]));
        } else {
          ASSERT_EQ(inputs.final_state[at], clean.final_state[at]);
        }
      }
    }
  }
}

// Every sequence alone gives the bits that it gives among others.
TEST_P(CpuForward, SequenceAloneAndAmongOthers) {
  ForwardInputs both(2, 150, 2);
  run(both.args());
  ForwardInputs second(1, 150, 2);
  const auto half = static_cast<int64_t>(both.q.size() / 2);
  second.q.assign(both.q.begin() + half, both.q.end());
  second.k.assign(both.k.begin() + half, both.k.end());
  second.v.assign(both.v.begin() + half, both.v.end());
  second.g.assign(both.g.begin() + half, both.g.end());
  second.beta.assign(both.beta.begin() + 300, both.beta.end());
  second.initial_state.assign(both.initial_state.begin() + 2 * kHeadDim * kHeadDim,
                              both.initial_state.end());
  set_threads(8);
  run(second.args());
  EXPECT_TRUE(std::equal(second.out.begin(), second.out.end(), both.out.begin() + half));
  EXPECT_TRUE(std::equal(second.final_state.begin(), second.final_state.end(),
                         both.final_state.begin() + 2 * kHeadDim * kHeadDim));
}

INSTANTIATE_TEST_SUITE_P(InstructionSets, CpuForward,
                         ::testing::ValuesIn(usable_kernels().begin(), usable_kernels().end()),
                         [](const auto& info) { return std::string(info.param->isa); });

}  // namespace
}  // namespace flash_kda::cpu
