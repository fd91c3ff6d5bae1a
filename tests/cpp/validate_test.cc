// Every illegal argument is answered by a message that names it; nothing is written.
#include "ops/forward/validate.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <limits>

#include "cpp/forward_inputs.h"

namespace flash_kda {
namespace {

using testing::ForwardInputs;

struct IllegalCase {
  const char* name;
  StatusCode code;
  std::vector<std::string> words;  // all of them in the message
  std::function<void(ForwardArgs*)> spoil;
};

void PrintTo(const IllegalCase& c, std::ostream* stream) { *stream << c.name; }

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Illegal : public ::testing::TestWithParam<IllegalCase> {};

TEST_P(Illegal, IsNamedAndNothingIsWritten) {
  ForwardInputs inputs(1, 8, 2, {0, 3, 8});
  ForwardArgs args = inputs.args();
  GetParam().spoil(&args);
  const Status status = forward(args);
  EXPECT_EQ(status.code(), GetParam().code) << status.message();
  for (const std::string& word : GetParam().words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "'" << word << "' is not in: " << status.message();
  }
  for (uint16_t bits : inputs.out) ASSERT_EQ(bits, ForwardInputs::kPoison);
  for (float value : inputs.final_state) ASSERT_EQ(value, 12345.0F);
  std::vector<Verdict> verdicts;
  EXPECT_EQ(explain(args, &verdicts).code(), status.code());
  EXPECT_EQ(verdicts.size(), implementation_names().size());
  for (const Verdict& verdict : verdicts) EXPECT_FALSE(verdict.accepted);
}

constexpr StatusCode kValue = StatusCode::kInvalidValue;
constexpr StatusCode kType = StatusCode::kInvalidType;

INSTANTIATE_TEST_SUITE_P(
    Arguments, Illegal,
    ::testing::Values(IllegalCase{"q_missing",
                                  kType,
                                  {"q", "tensor"},
                                  [](ForwardArgs* a) { a->q = {}; }},
                      IllegalCase{
                          "out_missing", kType, {"out"}, [](ForwardArgs* a) { a->out = {}; }},
                      IllegalCase{
                          "beta_missing", kType, {"beta"}, [](ForwardArgs* a) { a->beta = {}; }},
                      IllegalCase{"q_three_axes",
                                  kValue,
                                  {"q", "[B, T, H, 128]", "[1, 8, 2]"},
                                  [](ForwardArgs* a) { a->q.rank = 3; }},
                      IllegalCase{"k_float16",
                                  kType,
                                  {"k", "bfloat16", "float16"},
                                  [](ForwardArgs* a) { a->k.dtype = DType::kFloat16; }},
                      IllegalCase{"g_float32",
                                  kType,
                                  {"g", "bfloat16", "float32"},
                                  [](ForwardArgs* a) { a->g.dtype = DType::kFloat32; }},
                      IllegalCase{"v_head_dim",
                                  kValue,
                                  {"v", "128", "[1, 8, 2, 64]"},
                                  [](ForwardArgs* a) { a->v.shape[3] = 64; }},
                      IllegalCase{"q_head_dim",
                                  kValue,
                                  {"q", "128"},
                                  [](ForwardArgs* a) { a->q.shape[3] = 64; }},
                      IllegalCase{"v_more_heads",
                                  kValue,
                                  {"v", "[1, 8, 2, 128]", "[1, 8, 4, 128]"},
                                  [](ForwardArgs* a) { a->v.shape[2] = 4; }},
                      IllegalCase{"q_strided_heads",
                                  kValue,
                                  {"q", "strides"},
                                  [](ForwardArgs* a) { a->q.stride[2] = 256; }},
                      IllegalCase{"k_strided_channels",
                                  kValue,
                                  {"k", "strides"},
                                  [](ForwardArgs* a) { a->k.stride[3] = 2; }},
                      IllegalCase{"out_rows_overlap",
                                  kValue,
                                  {"out", "overlap"},
                                  [](ForwardArgs* a) { a->out.stride[1] = 128; }},
                      IllegalCase{"beta_shape",
                                  kValue,
                                  {"beta", "[B, T, H]"},
                                  [](ForwardArgs* a) { a->beta.shape[1] = 7; }},
                      IllegalCase{"beta_int",
                                  kType,
                                  {"beta"},
                                  [](ForwardArgs* a) { a->beta.dtype = DType::kInt32; }},
                      IllegalCase{"A_log_shape",
                                  kValue,
                                  {"A_log", "[H]", "H = 2"},
                                  [](ForwardArgs* a) { a->A_log.shape[0] = 3; }},
                      IllegalCase{"A_log_seven_axes",
                                  kValue,
                                  {"A_log", "at most 6 axes", "got 7"},
                                  [](ForwardArgs* a) { a->A_log.rank = 7; }},
                      IllegalCase{"dt_bias_shape",
                                  kValue,
                                  {"dt_bias", "[H, 128]"},
                                  [](ForwardArgs* a) { a->dt_bias.shape[1] = 64; }},
                      IllegalCase{"initial_state_shape",
                                  kValue,
                                  {"initial_state", "[N, H, V, K] = [2, 2, 128, 128]"},
                                  [](ForwardArgs* a) { a->initial_state.shape[0] = 1; }},
                      IllegalCase{"final_state_dtype",
                                  kType,
                                  {"final_state", "float32 or bfloat16", "float16"},
                                  [](ForwardArgs* a) { a->final_state.dtype = DType::kFloat16; }},
                      IllegalCase{"final_state_transposed",
                                  kValue,
                                  {"final_state", "contiguous"},
                                  [](ForwardArgs* a) {
                                    std::swap(a->final_state.stride[2], a->final_state.stride[3]);
                                  }},
                      IllegalCase{"other_device",
                                  kValue,
                                  {"k", "cpu", "cuda:1"},
                                  [](ForwardArgs* a) {
                                    a->k.device = {DeviceType::kCuda, 1};
                                  }},
                      IllegalCase{"cu_seqlens_on_gpu",
                                  kValue,
                                  {"cu_seqlens", "cpu", "cuda:0"},
                                  [](ForwardArgs* a) {
                                    a->cu_seqlens.device = {DeviceType::kCuda, 0};
                                  }},
                      IllegalCase{"cu_seqlens_float",
                                  kType,
                                  {"cu_seqlens", "int64"},
                                  [](ForwardArgs* a) { a->cu_seqlens.dtype = DType::kFloat32; }},
                      IllegalCase{"cu_seqlens_two_axes",
                                  kValue,
                                  {"cu_seqlens", "[N + 1]"},
                                  [](ForwardArgs* a) { a->cu_seqlens.rank = 2; }},
                      IllegalCase{"scale_nan",
                                  kValue,
                                  {"scale", "nan"},
                                  [](ForwardArgs* a) { a->scale = kNan; }},
                      IllegalCase{"scale_inf",
                                  kValue,
                                  {"scale", "inf"},
                                  [](ForwardArgs* a) { a->scale = kInfinity; }},
                      IllegalCase{"lower_bound_nan",
                                  kValue,
                                  {"lower_bound", "[-5, 0]", "nan"},
                                  [](ForwardArgs* a) { a->lower_bound = kNan; }},
                      IllegalCase{"lower_bound_low",
                                  kValue,
                                  {"lower_bound", "[-5, 0]", "-5.6"},
                                  [](ForwardArgs* a) { a->lower_bound = -5.6; }},
                      IllegalCase{"lower_bound_positive",
                                  kValue,
                                  {"lower_bound"},
                                  [](ForwardArgs* a) { a->lower_bound = 0.1; }},
                      IllegalCase{
                          "out_is_v", kValue, {"out", "v"}, [](ForwardArgs* a) { a->out = a->v; }},
                      IllegalCase{"states_half_overlap",
                                  kValue,
                                  {"final_state", "initial_state"},
                                  [](ForwardArgs* a) {
                                    a->final_state = a->initial_state;
                                    a->final_state.data =
                                        static_cast<float*>(a->initial_state.data) + 16;
                                  }},
                      IllegalCase{
                          "final_state_is_out",
                          kValue,
                          {"final_state", "overlaps out"},
                          [](ForwardArgs* a) { a->final_state.data = a->out.data; }},
                      IllegalCase{"workspace_is_out",
                                  kValue,
                                  {"workspace", "overlaps out"},
                                  [](ForwardArgs* a) {
                                    a->workspace = dense_tensor(a->out.data, DType::kUInt8, {64});
                                  }},
                      IllegalCase{
                          "workspace_is_g",
                          kValue,
                          {"workspace", "overlaps g"},
                          [](ForwardArgs* a) {
                            a->workspace = dense_tensor(a->g.data, DType::kUInt8, {64});
                          }},
                      IllegalCase{
                          "workspace_two_axes",
                          kValue,
                          {"workspace", "[bytes]", "[8, 8]"},
                          [](ForwardArgs* a) {
                            static unsigned char memory[64];
                            a->workspace = dense_tensor(memory, DType::kUInt8, {8, 8});
                          }},
                      IllegalCase{"workspace_dtype",
                                  kType,
                                  {"workspace", "uint8"},
                                  [](ForwardArgs* a) {
                                    static float memory[64];
                                    a->workspace = dense_tensor(memory, DType::kFloat32, {64});
                                  }}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(CuSeqlens, OffsetsAreChecked) {
  const std::pair<std::vector<int64_t>, const char*> cases[] = {{{1, 3, 8}, "start at 0"},
                                                                {{0, 5, 3}, "never decrease"},
                                                                {{0, 3, 9}, "up to T = 8"},
                                                                {{0, -1, 8}, "never decrease"}};
  for (const auto& [offsets, words] : cases) {
    ForwardInputs inputs(1, 8, 1, {0, 3, 8});
    inputs.cu_seqlens = offsets;
    const Status status = forward(inputs.args());
    EXPECT_EQ(status.code(), StatusCode::kInvalidValue);
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  }
}

TEST(CuSeqlens, NeedsOneBatchEntry) {
  ForwardInputs inputs(2, 64, 1);
  inputs.cu_seqlens = {0, 64, 128};
  const Status status = forward(inputs.args());
  EXPECT_EQ(status.code(), StatusCode::kInvalidValue);
  EXPECT_NE(status.message().find("B = 1"), std::string::npos) << status.message();
}

TEST(Validate, LegalVariantsPass) {
  ForwardInputs inputs(1, 8, 2, {0, 3, 8});
  ForwardArgs args = inputs.args();
  EXPECT_TRUE(forward(args).ok());
  args.A_log = dense_tensor(inputs.A_log.data(), DType::kFloat32, {1, 1, 2, 1});
  args.dt_bias = dense_tensor(inputs.dt_bias.data(), DType::kFloat32, {2 * kHeadDim});
  args.final_state = args.initial_state;
  EXPECT_TRUE(forward(args).ok());
  args.A_log = args.dt_bias = args.initial_state = args.final_state = {};
  EXPECT_TRUE(forward(args).ok());
  std::vector<int32_t> offsets = {0, 0, 7};
  args.cu_seqlens = dense_tensor(offsets.data(), DType::kInt32, {3});
  EXPECT_TRUE(forward(args).ok());
}

// What is asked of CUDA tensors beyond those of the CPU. Planning reads none of them.
TEST(Validate, AlignmentOnCuda) {
  ForwardInputs inputs(1, 8, 2);
  ForwardArgs legal = inputs.args();
  for (TensorRef* tensor :
       {&legal.q, &legal.k, &legal.v, &legal.g, &legal.beta, &legal.out, &legal.A_log,
        &legal.dt_bias, &legal.initial_state, &legal.final_state}) {
    tensor->device = {DeviceType::kCuda, 0};
    tensor->data = nullptr;
  }
  ForwardPlan plan;
  EXPECT_NE(plan_forward(legal, &plan).code(), StatusCode::kInvalidValue);
  const auto expect_named = [&](const ForwardArgs& args, const std::string& begin) {
    const Status status = plan_forward(args, &plan);
    EXPECT_EQ(status.code(), StatusCode::kInvalidValue);
    EXPECT_EQ(status.message().find(begin), 0U) << status.message();
  };
  ForwardArgs args = legal;
  args.k.data = inputs.k.data() + 1;
  expect_named(args, "k: expected data aligned to 16 bytes");
  args = legal;
  args.v.stride[1] += 4;
  expect_named(args, "v: expected data aligned to 16 bytes and strides that are multiples of 8");
  args = legal;
  args.initial_state.data = inputs.initial_state.data() + 1;
  expect_named(args, "initial_state: expected data aligned to 16 bytes");
}

// Planning needs no memory, running does.
TEST(Validate, PlansWithoutMemory) {
  ForwardInputs inputs(1, 8, 2, {0, 3, 8});
  ForwardArgs args = inputs.args();
  for (TensorRef* tensor : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out, &args.A_log,
                            &args.dt_bias, &args.initial_state, &args.final_state}) {
    tensor->data = nullptr;
  }
  ForwardPlan plan;
  const Status planned = plan_forward(args, &plan);
  EXPECT_TRUE(planned.ok()) << planned.message();
  EXPECT_STREQ(plan.implementation, "cpu");
  EXPECT_EQ(forward(args).code(), StatusCode::kInvalidValue);
  args.cu_seqlens.data = nullptr;  // read on the host even to plan
  const Status unread = plan_forward(args, &plan);
  EXPECT_EQ(unread.code(), StatusCode::kInvalidValue);
  EXPECT_EQ(unread.message().find("cu_seqlens: expected memory"), 0U) << unread.message();
}

TEST(Dispatch, ForcedImplementationRuns) {
  ForwardInputs inputs(1, 8, 1);
  for (const std::string& name : implementation_names()) {
    ASSERT_EQ(setenv(kForceEnv, name.c_str(), 1), 0);
    ForwardPlan plan;
    const Status status = plan_forward(inputs.args(), &plan);
    if (status.ok()) {
      EXPECT_EQ(plan.implementation, name);
    } else {
      EXPECT_EQ(status.code(), StatusCode::kUnsupported);  // a GPU's, for tensors on the CPU
      EXPECT_EQ(name.rfind("cuda", 0), 0U) << status.message();
    }
    std::vector<Verdict> verdicts;
    EXPECT_TRUE(explain(inputs.args(), &verdicts).ok());
    for (const Verdict& verdict : verdicts) {
      EXPECT_EQ(verdict.accepted, status.ok() && verdict.implementation == name);
      EXPECT_EQ(verdict.accepted, verdict.reason.empty());
    }
  }
  ASSERT_EQ(setenv(kForceEnv, "cuda.sm1", 1), 0);
  ForwardPlan plan;
  const Status status = plan_forward(inputs.args(), &plan);
  EXPECT_EQ(status.code(), StatusCode::kInvalidValue);
  EXPECT_NE(status.message().find("reference"), std::string::npos) << status.message();
  unsetenv(kForceEnv);
}

TEST(Dispatch, WorkspaceSizeNeverFalls) {
  for (int64_t tokens : {-32, 0, 1, 31, 32, 33, 1000, 100000}) {
    for (int64_t heads : {-1, 1, 12, 96}) {
      for (int64_t sequences : {-1, 1, 2, 257}) {
        const int64_t size = workspace_size(tokens, heads, sequences);
        EXPECT_GE(size, 0);
        EXPECT_LE(size, workspace_size(tokens + 1, heads, sequences));
        EXPECT_LE(size, workspace_size(tokens, heads + 1, sequences));
        EXPECT_LE(size, workspace_size(tokens, heads, sequences + 1));
      }
    }
  }
}

}  // namespace
}  // namespace flash_kda
