// The C ABI says and does what the C++ API does, and survives callers that make mistakes.
#include "flash_kda/c_api.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "cpp/forward_inputs.h"

namespace flash_kda {
namespace {

using testing::ForwardInputs;

flash_kda_tensor to_c(const TensorRef& from) {
  flash_kda_tensor to = {};
  if (!from.given()) return to;
  to.given = 1;
  to.dtype = static_cast<int32_t>(from.dtype);
  to.device_type = static_cast<int32_t>(from.device.type);
  to.device_index = from.device.index;
  to.data = from.data;
  to.rank = from.rank;
  std::copy_n(from.shape, kMaxRank, to.shape);
  std::copy_n(from.stride, kMaxRank, to.stride);
  return to;
}

flash_kda_forward_args to_c(const ForwardArgs& from) {
  flash_kda_forward_args to = {};
  to.size = sizeof(to);
  to.q = to_c(from.q);
  to.k = to_c(from.k);
  to.v = to_c(from.v);
  to.g = to_c(from.g);
  to.beta = to_c(from.beta);
  to.out = to_c(from.out);
  to.A_log = to_c(from.A_log);
  to.dt_bias = to_c(from.dt_bias);
  to.initial_state = to_c(from.initial_state);
  to.final_state = to_c(from.final_state);
  to.cu_seqlens = to_c(from.cu_seqlens);
  to.workspace = to_c(from.workspace);
  to.scale = from.scale;
  to.lower_bound = from.lower_bound;
  to.stream = from.stream;
  return to;
}

struct Answer {
  int code;
  std::string message;
};

Answer run(const flash_kda_forward_args* args) {
  char message[1024];
  const int code = flash_kda_forward(args, message, sizeof(message));
  return {code, message};
}

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
  }
}

void expect_untouched(const ForwardInputs& inputs) {
  for (uint16_t bits : inputs.out) ASSERT_EQ(bits, ForwardInputs::kPoison);
  for (float value : inputs.final_state) ASSERT_EQ(value, 12345.0F);
}

// What a caller compiled against version 1 has on its side. These numbers may not change while
// FLASH_KDA_ABI_VERSION is 1.
TEST(CApi, LayoutOfVersion1) {
  EXPECT_EQ(flash_kda_abi_version(), 1);
  EXPECT_EQ(FLASH_KDA_ABI_VERSION, 1);
  EXPECT_EQ(sizeof(flash_kda_tensor), 128U);
  EXPECT_EQ(offsetof(flash_kda_tensor, data), 16U);
  EXPECT_EQ(offsetof(flash_kda_tensor, rank), 24U);
  EXPECT_EQ(offsetof(flash_kda_tensor, shape), 32U);
  EXPECT_EQ(offsetof(flash_kda_tensor, stride), 80U);
  EXPECT_EQ(sizeof(flash_kda_forward_args), 1568U);
  EXPECT_EQ(offsetof(flash_kda_forward_args, q), 8U);
  EXPECT_EQ(offsetof(flash_kda_forward_args, workspace), 8U + 11 * 128);
  EXPECT_EQ(offsetof(flash_kda_forward_args, scale), 8U + 12 * 128);
  EXPECT_EQ(offsetof(flash_kda_forward_args, stream), 1560U);
  EXPECT_EQ(sizeof(flash_kda_forward_plan), 24U);
  EXPECT_EQ(offsetof(flash_kda_forward_plan, workspace_bytes), 16U);
}

TEST(CApi, EnumsAreThoseOfTheCppApi) {
  const auto number = [](auto value) { return static_cast<int>(value); };
  EXPECT_EQ(FLASH_KDA_OK, number(StatusCode::kOk));
  EXPECT_EQ(FLASH_KDA_INVALID_VALUE, number(StatusCode::kInvalidValue));
  EXPECT_EQ(FLASH_KDA_INVALID_TYPE, number(StatusCode::kInvalidType));
  EXPECT_EQ(FLASH_KDA_UNSUPPORTED, number(StatusCode::kUnsupported));
  EXPECT_EQ(FLASH_KDA_RUNTIME, number(StatusCode::kRuntime));
  EXPECT_EQ(FLASH_KDA_OTHER_DTYPE, number(DType::kOther));
  EXPECT_EQ(FLASH_KDA_BFLOAT16, number(DType::kBFloat16));
  EXPECT_EQ(FLASH_KDA_FLOAT32, number(DType::kFloat32));
  EXPECT_EQ(FLASH_KDA_INT32, number(DType::kInt32));
  EXPECT_EQ(FLASH_KDA_INT64, number(DType::kInt64));
  EXPECT_EQ(FLASH_KDA_UINT8, number(DType::kUInt8));
  EXPECT_EQ(FLASH_KDA_FLOAT16, number(DType::kFloat16));
  EXPECT_EQ(FLASH_KDA_FLOAT64, number(DType::kFloat64));
  EXPECT_EQ(FLASH_KDA_CPU, number(DeviceType::kCpu));
  EXPECT_EQ(FLASH_KDA_CUDA, number(DeviceType::kCuda));
  EXPECT_EQ(FLASH_KDA_OTHER_DEVICE, number(DeviceType::kOther));
}

TEST(CApi, BitwiseEqualToTheCppApi) {
  int ran = 0;
  for (const std::string& name : implementation_names()) {
    ASSERT_EQ(setenv(kForceEnv, name.c_str(), 1), 0);
    ForwardInputs theirs(1, 100, 2, {0, 37, 37, 98}), ours(1, 100, 2, {0, 37, 37, 98});
    const Status status = forward(theirs.args());
    const flash_kda_forward_args args = to_c(ours.args());
    const Answer answer = run(&args);
    EXPECT_EQ(answer.code, static_cast<int>(status.code())) << name;
    EXPECT_EQ(answer.message, status.message());
    EXPECT_EQ(ours.out, theirs.out) << name;
    EXPECT_EQ(ours.final_state, theirs.final_state) << name;
    if (!status.ok()) continue;
    ++ran;
    EXPECT_NE(ours.out[0], ForwardInputs::kPoison) << name;
    flash_kda_forward_plan plan = {sizeof(plan), nullptr, -1};
    EXPECT_EQ(flash_kda_plan_forward(&args, &plan, nullptr, 0), FLASH_KDA_OK);
    EXPECT_EQ(name, plan.implementation);
    EXPECT_GE(plan.workspace_bytes, 0);
  }
  unsetenv(kForceEnv);
  EXPECT_GE(ran, 2);  // cpu and reference at least
}

TEST(CApi, ArgumentsLeftOut) {
  ForwardInputs theirs(2, 20, 1), ours(2, 20, 1);
  ForwardArgs args = theirs.args(), zeroed = ours.args();
  for (ForwardArgs* a : {&args, &zeroed}) a->A_log = a->dt_bias = a->initial_state = {};
  ASSERT_TRUE(forward(args).ok());
  const flash_kda_forward_args c_args = to_c(zeroed);
  EXPECT_EQ(c_args.A_log.given, 0);
  EXPECT_EQ(run(&c_args).code, FLASH_KDA_OK);
  EXPECT_EQ(ours.out, theirs.out);
  EXPECT_EQ(ours.final_state, theirs.final_state);
}

TEST(CApi, SizeFieldsAreChecked) {
  ForwardInputs inputs(1, 8, 2);
  for (size_t size : {size_t{0}, sizeof(flash_kda_forward_args) - 8,
                      sizeof(flash_kda_forward_args) + 8, ~size_t{0}}) {
    flash_kda_forward_args args = to_c(inputs.args());
    args.size = size;
    const Answer answer = run(&args);
    EXPECT_EQ(answer.code, FLASH_KDA_INVALID_VALUE);
    expect_words(answer.message, {"args.size", "1568", std::to_string(size)});
    expect_untouched(inputs);
    char text[4096];
    EXPECT_EQ(flash_kda_explain(&args, text, sizeof(text), nullptr), FLASH_KDA_INVALID_VALUE);
    expect_words(text, {"cpu\trefused\targs.size", "reference\trefused\targs.size", "1568"});
  }
  const flash_kda_forward_args args = to_c(inputs.args());
  flash_kda_forward_plan plan = {sizeof(plan) - 8, "before", -7};
  char message[256];
  EXPECT_EQ(flash_kda_plan_forward(&args, &plan, message, sizeof(message)),
            FLASH_KDA_INVALID_VALUE);
  expect_words(message, {"plan.size", "24", "16"});
  EXPECT_STREQ(plan.implementation, "before");
  EXPECT_EQ(plan.workspace_bytes, -7);
}

TEST(CApi, NullPointers) {
  char message[256];
  EXPECT_EQ(flash_kda_forward(nullptr, message, sizeof(message)), FLASH_KDA_INVALID_VALUE);
  expect_words(message, {"args", "null"});
  EXPECT_EQ(flash_kda_forward(nullptr, nullptr, 0), FLASH_KDA_INVALID_VALUE);
  EXPECT_EQ(flash_kda_plan_forward(nullptr, nullptr, nullptr, 0), FLASH_KDA_INVALID_VALUE);
  size_t needed = 0;
  EXPECT_EQ(flash_kda_explain(nullptr, nullptr, 0, &needed), FLASH_KDA_INVALID_VALUE);
  EXPECT_GT(needed, 1U);  // every implementation's refusal
  ForwardInputs inputs(1, 8, 2);
  const flash_kda_forward_args args = to_c(inputs.args());
  EXPECT_EQ(flash_kda_plan_forward(&args, nullptr, message, sizeof(message)),
            FLASH_KDA_INVALID_VALUE);
  expect_words(message, {"plan", "null"});
  EXPECT_EQ(flash_kda_explain(&args, nullptr, 0, nullptr), FLASH_KDA_OK);
}

using Member = flash_kda_tensor flash_kda_forward_args::*;
constexpr std::pair<const char*, Member> kMembers[] = {
    {"q", &flash_kda_forward_args::q},
    {"k", &flash_kda_forward_args::k},
    {"v", &flash_kda_forward_args::v},
    {"g", &flash_kda_forward_args::g},
    {"beta", &flash_kda_forward_args::beta},
    {"out", &flash_kda_forward_args::out},
    {"A_log", &flash_kda_forward_args::A_log},
    {"dt_bias", &flash_kda_forward_args::dt_bias},
    {"initial_state", &flash_kda_forward_args::initial_state},
    {"final_state", &flash_kda_forward_args::final_state},
    {"cu_seqlens", &flash_kda_forward_args::cu_seqlens}};

// A tensor with elements but without memory, as a caller leaves it who forgot to fill it in.
TEST(CApi, NullDataIsNamed) {
  for (const auto& [name, member] : kMembers) {
    ForwardInputs inputs(1, 8, 2, {0, 3, 8});
    flash_kda_forward_args args = to_c(inputs.args());
    (args.*member).data = nullptr;
    const Answer answer = run(&args);
    EXPECT_EQ(answer.code, FLASH_KDA_INVALID_VALUE) << name;
    expect_words(answer.message, {std::string(name) + ":", "null"});
    expect_untouched(inputs);
  }
}

TEST(CApi, NumbersOutsideTheEnums) {
  for (const auto& [name, member] : kMembers) {
    ForwardInputs inputs(1, 8, 2, {0, 3, 8});
    for (int64_t rank : {int64_t{-1}, int64_t{7}, int64_t{1} << 40}) {
      flash_kda_forward_args args = to_c(inputs.args());
      (args.*member).rank = rank;
      const Answer answer = run(&args);
      EXPECT_EQ(answer.code, FLASH_KDA_INVALID_VALUE) << name;
      expect_words(answer.message, {std::string(name) + ":", std::to_string(rank)});
    }
    for (int32_t dtype : {-1, 0, 99}) {
      flash_kda_forward_args args = to_c(inputs.args());
      (args.*member).dtype = dtype;
      const Answer answer = run(&args);
      EXPECT_EQ(answer.code, FLASH_KDA_INVALID_TYPE) << name;
      expect_words(answer.message, {std::string(name) + ":", "dtype"});
    }
    for (int32_t device : {-1, 2, 99}) {
      flash_kda_forward_args args = to_c(inputs.args());
      (args.*member).device_type = device;
      const Answer answer = run(&args);
      EXPECT_EQ(answer.code, FLASH_KDA_INVALID_VALUE) << name;
      expect_words(answer.message, {"device"});
    }
    expect_untouched(inputs);
  }
}

// Extents come from the caller as signed numbers.
TEST(CApi, NegativeExtents) {
  for (int axis = 0; axis < 3; ++axis) {
    ForwardInputs inputs(1, 8, 2);
    flash_kda_forward_args args = to_c(inputs.args());
    for (const auto& [name, member] : kMembers) {
      if ((args.*member).rank >= 3) (args.*member).shape[axis] = -3;
    }
    const Answer answer = run(&args);
    EXPECT_EQ(answer.code, FLASH_KDA_INVALID_VALUE) << "axis " << axis;
    expect_words(answer.message, {"q:", "-3"});
    expect_untouched(inputs);
  }
}

TEST(CApi, MessagesAreCutToTheCapacity) {
  ForwardInputs inputs(1, 8, 2);
  ForwardArgs spoiled = inputs.args();
  spoiled.k.dtype = DType::kFloat16;
  const std::string whole = forward(spoiled).message();
  const flash_kda_forward_args args = to_c(spoiled);
  ASSERT_GT(whole.size(), 20U);
  for (size_t capacity : {size_t{0}, size_t{1}, size_t{2}, size_t{20}, whole.size(),
                          whole.size() + 1, whole.size() + 2}) {
    std::string buffer(whole.size() + 8, '#');
    EXPECT_EQ(flash_kda_forward(&args, buffer.data(), capacity), FLASH_KDA_INVALID_TYPE);
    if (capacity > 0) {
      const std::string expected = whole.substr(0, capacity - 1);
      EXPECT_EQ(std::string(buffer.c_str()), expected);
    }
    const size_t written = std::min(capacity, whole.size() + 1);
    EXPECT_EQ(buffer.substr(written), std::string(buffer.size() - written, '#'));
  }
  char message[8] = "before";
  const flash_kda_forward_args legal = to_c(inputs.args());
  EXPECT_EQ(flash_kda_forward(&legal, message, sizeof(message)), FLASH_KDA_OK);
  EXPECT_STREQ(message, "");
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

TEST(CApi, ExplainWritesOneLinePerImplementation) {
  ForwardInputs inputs(1, 8, 2);
  const flash_kda_forward_args args = to_c(inputs.args());
  size_t needed = 0;
  ASSERT_EQ(flash_kda_explain(&args, nullptr, 0, &needed), FLASH_KDA_OK);
  std::string text(needed + 4, '#');
  ASSERT_EQ(flash_kda_explain(&args, text.data(), needed, &needed), FLASH_KDA_OK);
  EXPECT_EQ(text.substr(needed), "####");
  const std::string whole = text.c_str();
  EXPECT_EQ(whole.size() + 1, needed);

  std::vector<Verdict> verdicts;
  ASSERT_TRUE(explain(inputs.args(), &verdicts).ok());
  const std::vector<std::string> lines = split(whole, '\n');
  ASSERT_EQ(lines.size(), verdicts.size() + 1);  // the last line ends with a line break too
  EXPECT_EQ(lines.back(), "");
  for (size_t i = 0; i < verdicts.size(); ++i) {
    const std::vector<std::string> fields = split(lines[i], '\t');
    ASSERT_EQ(fields.size(), 3U) << lines[i];
    EXPECT_EQ(fields[0], verdicts[i].implementation);
    EXPECT_EQ(fields[1], verdicts[i].accepted ? "accepted" : "refused");
    EXPECT_EQ(fields[2], verdicts[i].reason);
  }

  // A smaller buffer gets the beginning, and the size of the whole all the same.
  text.assign(needed, '#');
  size_t needed_again = 0;
  EXPECT_EQ(flash_kda_explain(&args, text.data(), 6, &needed_again), FLASH_KDA_OK);
  EXPECT_EQ(needed_again, needed);
  EXPECT_EQ(std::string(text.c_str()), whole.substr(0, 5));
  EXPECT_EQ(text.substr(6), std::string(needed - 6, '#'));
  expect_untouched(inputs);
}

TEST(CApi, ExplainOfIllegalArguments) {
  ForwardInputs inputs(1, 8, 2);
  flash_kda_forward_args args = to_c(inputs.args());
  args.lower_bound = -7.0;
  char text[4096];
  size_t needed = 0;
  EXPECT_EQ(flash_kda_explain(&args, text, sizeof(text), &needed), FLASH_KDA_INVALID_VALUE);
  ASSERT_LT(needed, sizeof(text));
  const std::vector<std::string> lines = split(text, '\n');
  ASSERT_EQ(lines.size(), implementation_names().size() + 1);
  for (size_t i = 0; i + 1 < lines.size(); ++i) {
    expect_words(lines[i], {"\trefused\t", "lower_bound", "-7"});
  }
}

TEST(CApi, QueriesAreThoseOfTheCppApi) {
  EXPECT_STREQ(flash_kda_version(), version());
  std::string names, archs;
  for (const std::string& name : implementation_names()) names += (names.empty() ? "" : ",") + name;
  for (const std::string& arch : built_cuda_archs()) archs += (archs.empty() ? "" : ",") + arch;
  EXPECT_EQ(names, flash_kda_implementation_names());
  EXPECT_EQ(archs, flash_kda_built_cuda_archs());
  for (int64_t tokens : {0, 1, 1000, 1 << 20}) {
    EXPECT_EQ(flash_kda_workspace_size(tokens, 12, 3), workspace_size(tokens, 12, 3));
  }
}

}  // namespace
}  // namespace flash_kda
