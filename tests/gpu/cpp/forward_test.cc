// Every CUDA implementation against the equations in double precision, and what it promises beyond
// numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string>

#include "gpu/cpp/target.h"

namespace flash_kda {
namespace {

using testing::check_cuda;
using testing::DeviceCall;
using testing::Exact;
using testing::exact_forward;
using testing::ForwardInputs;
using testing::move_magnitudes;
using testing::output_error;
using testing::state_error;
using testing::StateBuffer;
using testing::StridedRows;
using testing::Tolerance;

using Forward = testing::GpuTest;
FLASH_KDA_GPU_SUITE(Forward);

TEST_P(Forward, MatchesTheEquationsOnHardInputs) {
  static std::map<std::string, Exact> exact;  // the same for all implementations, and slow to make
  for (const testing::InputKind& kind : testing::input_kinds()) {
    ForwardInputs x(1, kind.tokens, kind.heads);
    kind.fill(&x);
    const std::string name = kind.name;
    if (exact.count(name) == 0) exact[name] = exact_forward(x.args());
    const bool collinear =
        name.find("key") != std::string::npos || name.find("cosine") != std::string::npos;
    expect_near(GetParam(), x.args(), exact[name], name,
                collinear ? testing::kCollinear : Tolerance{});
  }
}

TEST_P(Forward, ValuesOfAnyMagnitude) {
  for (float magnitude : {1e-30F, 1e-20F, 1e-6F, 1e4F, 1e20F, 1e30F}) {
    ForwardInputs x(1, 200, 2);
    for (uint16_t& v : x.v) v = float_to_bf16(bf16_to_float(v) * magnitude);
    for (float& s : x.initial_state) s *= magnitude;
    expect_accurate(x.args(), "v * " + std::to_string(magnitude));
  }
}

TEST_P(Forward, ValuesThatChangeMagnitude) {
  ForwardInputs x(1, 512, 1);
  move_magnitudes(&x);
  expect_accurate(x.args(), "v of moving magnitude");
}

TEST_P(Forward, LargeValuesAfterZeros) {
  ForwardInputs x(1, 256, 1);
  std::fill(x.initial_state.begin(), x.initial_state.end(), 0.0F);
  for (size_t i = 0; i < x.v.size(); ++i) {
    x.v[i] = i < x.v.size() / 2 ? uint16_t{0} : float_to_bf16(bf16_to_float(x.v[i]) * 1e20F);
  }
  expect_accurate(x.args(), "zeros, then large v");
}

TEST_P(Forward, TailsAndBatches) {
  for (int64_t tokens : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130}) {
    ForwardInputs x(2, tokens, 3, {}, static_cast<uint32_t>(tokens));
    expect_accurate(x.args(), "2 x " + std::to_string(tokens) + " x 3");
  }
}

TEST_P(Forward, SequencesOfAnyLengths) {
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 5, 70},
                                              {0, 0, 5, 5, 5, 21, 21},
                                              {0, 33, 34, 66, 66, 131},
                                              {0, 1, 2, 3, 4, 5, 6, 7, 40}}) {
    ForwardInputs x(1, offsets.back(), 2, offsets);
    expect_accurate(x.args(), "varlen to " + std::to_string(offsets.back()));
  }
}

TEST_P(Forward, StateTypesAreIndependent) {
  for (DType initial : {DType::kOther, DType::kBFloat16, DType::kFloat32}) {
    for (DType final : {DType::kOther, DType::kBFloat16, DType::kFloat32}) {
      ForwardInputs x(1, 75, 2, {0, 40, 40, 75});
      StateBuffer from(x, initial), to(x, final);
      from.fill(x.initial_state);
      ForwardArgs args = x.args();
      args.initial_state = from.ref();
      args.final_state = to.ref();
      expect_accurate(args, "states", final == DType::kFloat32 ? Tolerance{} : testing::kBf16State);
    }
  }
}

TEST_P(Forward, EmptySequencesPassTheStateOn) {
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

TEST_P(Forward, NoTokens) {
  ForwardInputs x(2, 0, 2);
  run(x.args());
  EXPECT_EQ(x.final_state, x.initial_state);
}

TEST_P(Forward, StateInPlace) {
  ForwardInputs x(2, 100, 2);
  ForwardArgs args = x.args();
  args.final_state = args.initial_state;
  expect_accurate(args, "state in place");
}

TEST_P(Forward, StridesAndTypes) {
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
  EXPECT_LE(output_error(args, exact), Tolerance{}.output);
  EXPECT_LE(state_error(args, exact), Tolerance{}.state);
  EXPECT_TRUE(out.gaps_untouched());
}

TEST_P(Forward, MissingParametersAreZeros) {
  ForwardInputs x(1, 40, 2);
  ForwardArgs args = x.args();
  args.A_log = {};
  args.dt_bias = {};
  expect_accurate(args, "no A_log, no dt_bias");
}

TEST_P(Forward, BetaLogitsAtTheEnds) {
  ForwardInputs x(1, 64, 1);
  const float ends[] = {INFINITY, -INFINITY, 60.0F, -60.0F};
  for (size_t i = 0; i < x.beta.size(); ++i) x.beta[i] = float_to_bf16(ends[i % 4]);
  expect_accurate(x.args(), "beta logits of +-infinity and +-60");
}

TEST_P(Forward, RowsOfNoSequenceStayAsTheyAre) {
  ForwardInputs x(1, 128, 2, {0, 40, 100});
  expect_accurate(x.args(), "rows past the last sequence");
  for (size_t i = 100 * 2 * kHeadDim; i < x.out.size(); ++i) {
    ASSERT_EQ(x.out[i], ForwardInputs::kPoison);
  }
}

TEST_P(Forward, NanStaysInItsSequence) {
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
TEST_P(Forward, MalformedOffsetsAreMemorySafe) {
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 90, 10, 96},
                                              {-5, 40, 1000000, 96},
                                              {50, 20, -7, 300},
                                              {int64_t{1} << 40, -(int64_t{1} << 40), 5, 96}}) {
    ForwardInputs x(1, 96, 2, {0, 30, 60, 96});
    ForwardArgs args = x.args();
    DeviceCall call(args);
    check_cuda(cudaMemcpy(call.args().cu_seqlens.data, offsets.data(), 32, cudaMemcpyHostToDevice));
    queue(&call);
    call.fetch();
    EXPECT_TRUE(call.guards_intact());
  }
}

TEST_P(Forward, CheckedOffsetsAreAnError) {
  ForwardInputs x(1, 96, 1, {0, 30, 96});
  DeviceCall call(x.args());
  const int64_t offsets[] = {0, 97, 96};
  check_cuda(
      cudaMemcpy(call.args().cu_seqlens.data, offsets, sizeof offsets, cudaMemcpyHostToDevice));
  ForwardProblem p;
  ASSERT_TRUE(call.problem(&p).ok());
  const int64_t bytes = GetParam().workspace_bytes(96, 1, 2);
  setenv("FLASH_KDA_CHECK", "1", 1);
  const Status status = GetParam().run(p, call.workspace(bytes), bytes);
  unsetenv("FLASH_KDA_CHECK");
  EXPECT_EQ(status.code(), StatusCode::kInvalidValue);
  EXPECT_NE(status.message().find("cu_seqlens"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace flash_kda
