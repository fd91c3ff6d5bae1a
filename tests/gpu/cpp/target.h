// Every CUDA implementation, divided in every way that its options allow: what the tests of this
// folder run in turn.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "cpp/cpu_inputs.h"
#include "cuda/portable/forward/impl.h"
#include "cuda/sm90_split/forward/cost.h"
#include "cuda/sm90_split/forward/impl.h"
#include "gpu/cpp/device_call.h"
#include "ops/forward/impls.h"

namespace flash_kda::testing {

struct Target {
  std::string name;  // of a test: letters, digits and _
  const ForwardImpl* impl = nullptr;
  std::function<int64_t(int64_t tokens_total, int64_t heads, int64_t sequences)> workspace_bytes;
  std::function<Status(const ForwardProblem&, void* workspace, int64_t bytes)> run;
};

inline void PrintTo(const Target& target, std::ostream* stream) { *stream << target.name; }

inline Target whole_target(std::string name, const ForwardImpl& impl) {
  return {std::move(name), &impl, impl.workspace_bytes, impl.run};
}

inline Target portable_target(std::string name, const cuda::portable::Options& options) {
  return {std::move(name), &cuda::portable::kForward,
          [options](int64_t tokens, int64_t heads, int64_t sequences) {
            return cuda::portable::workspace_bytes_with(options, tokens, heads, sequences);
          },
          [options](const ForwardProblem& p, void* workspace, int64_t bytes) {
            return cuda::portable::run_with(options, p, workspace, bytes);
          }};
}

inline Target split_target(std::string name, const cuda::sm90_split::Options& options) {
  return {std::move(name), &cuda::sm90_split::kForward,
          [options](int64_t tokens, int64_t heads, int64_t sequences) {
            return cuda::sm90_split::workspace_bytes_with(options, tokens, heads, sequences);
          },
          [options](const ForwardProblem& p, void* workspace, int64_t bytes) {
            return cuda::sm90_split::run_with(options, p, workspace, bytes);
          }};
}

using cuda::sm90_split::kWhole;

inline Target divided(int64_t segment_chunks, int groups) {
  const std::string segments =
      segment_chunks == kWhole ? "whole" : "segments" + std::to_string(segment_chunks);
  cuda::sm90_split::Options options;
  options.segment_chunks = segment_chunks;
  options.groups = groups;
  return split_target("split_" + segments + "_groups" + std::to_string(groups), options);
}

// Whole, by halves, with preparation running beside the recurrence.
inline cuda::sm90_split::Options beside() {
  cuda::sm90_split::Options options;
  options.segment_chunks = kWhole;
  options.groups = 1;
  options.beside = true;
  return options;
}

// cuda.sm90_split whole by halves and by heads, and in segments, the shortest and an uneven one
// among them.
inline const std::vector<Target>& targets() {
  static const std::vector<Target> all = {
      whole_target("recurrent", cuda::recurrent::kForward),
      whole_target("portable", cuda::portable::kForward),
      whole_target("sm90", cuda::sm90::kForward),
      whole_target("split", cuda::sm90_split::kForward),
      divided(kWhole, 1),
      divided(kWhole, 2),
      split_target("split_beside", beside()),
      divided(1, 2),
      divided(3, 1),
      divided(8, 2),
  };
  return all;
}

// Relative errors that are allowed. Rounding an exact output to bf16 alone makes about 1.7e-3;
// cuda.sm90 computes its gates by the tanh of the hardware.
struct Tolerance {
  double output = 3.5e-3, state = 1e-3;
};
// Keys that all but coincide: each update cancels most of the one before, and fp16 rounding adds
// up.
inline constexpr Tolerance kCollinear = {8e-3, 1.6e-2};
inline constexpr Tolerance kBf16State = {3.5e-3, 2.5e-3};

class GpuTest : public ::testing::TestWithParam<Target> {
 protected:
  void SetUp() override {
    ForwardProblem problem;
    problem.device = {DeviceType::kCuda, 0};
    const Status status = GetParam().impl->accepts(problem);
    if (!status.ok()) GTEST_SKIP() << status.message();
  }

  static void queue(const Target& target, DeviceCall* call, cudaStream_t stream = nullptr) {
    ForwardProblem p;
    call->args().stream = stream;
    const Status legal = call->problem(&p);
    ASSERT_TRUE(legal.ok()) << legal.message();
    const int64_t bytes = target.workspace_bytes(p.tokens_total(), p.heads, p.sequences);
    const Status status = target.run(p, call->workspace(bytes), bytes);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  static void queue(DeviceCall* call, cudaStream_t stream = nullptr) {
    queue(GetParam(), call, stream);
  }

  // Runs and brings the results back into the host tensors of `args`.
  static void run(const Target& target, const ForwardArgs& args) {
    DeviceCall call(args);
    queue(target, &call);
    call.fetch();
    EXPECT_TRUE(call.guards_intact());
  }
  static void run(const ForwardArgs& args) { run(GetParam(), args); }

  // Runs and compares with `exact`. FLASH_KDA_PRINT_ERRORS=1 prints the errors.
  static void expect_near(const Target& target, const ForwardArgs& args, const Exact& exact,
                          const std::string& what, const Tolerance& tolerance = {}) {
    run(target, args);
    const double output = output_error(args, exact);
    const double state = args.final_state.given() ? state_error(args, exact) : 0.0;
    EXPECT_LE(output, tolerance.output) << what;
    EXPECT_LE(state, tolerance.state) << what;
    if (std::getenv("FLASH_KDA_PRINT_ERRORS") != nullptr) {
      std::printf("%-24s %-36s out %.2e  state %.2e\n", target.name.c_str(), what.c_str(), output,
                  state);
    }
  }
  static void expect_accurate(const ForwardArgs& args, const std::string& what,
                              const Tolerance& tolerance = {}) {
    const Exact exact = exact_forward(args);  // before the run: states may share memory
    expect_near(GetParam(), args, exact, what, tolerance);
  }
};

// Rows whose magnitude moves by many orders along the sequence, each in its own way.
inline void move_magnitudes(ForwardInputs* x) {
  for (size_t i = 0; i < x->v.size(); ++i) {
    const double token = static_cast<double>(i / kHeadDim) / static_cast<double>(x->heads);
    const double channel = static_cast<double>(i % kHeadDim);
    const double power = 12.0 * std::sin(token / 40.0 + channel);
    x->v[i] = float_to_bf16(static_cast<float>(bf16_to_float(x->v[i]) * std::exp2(power)));
  }
}

// The instances of a suite derived from GpuTest.
#define FLASH_KDA_GPU_SUITE(Suite)                         \
  INSTANTIATE_TEST_SUITE_P(                                \
      All, Suite, ::testing::ValuesIn(testing::targets()), \
      [](const ::testing::TestParamInfo<testing::Target>& i) { return i.param.name; })

}  // namespace flash_kda::testing
