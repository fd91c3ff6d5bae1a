// What a call on a CUDA device keeps the host, from C++, with out and workspace given: of every
// implementation that runs a case, and of the one that is chosen. Beside it what the choice alone
// takes, without any CUDA call, and what the launch of a kernel that does nothing does.
//
// Calls are timed in batches, which the GPU's queue holds; it is waited for in between.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "empty_kernel.h"
#include "flash_kda/flash_kda.h"

namespace flash_kda {
namespace {

constexpr int kCalls = 64;  // of a batch
constexpr int kBatches = 30;
constexpr Device kDevice = {DeviceType::kCuda, 0};

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

struct Case {
  const char* name;
  int64_t tokens;     // in all
  int64_t heads;      // one for each
  int64_t sequences;  // of equal length, by cu_seqlens where there are several
};

// A single token; a sequence that is cut into segments; packed sequences.
constexpr Case kCases[] = {
    {"1x1/H=1", 1, 1, 1}, {"1x4096/H=1", 4096, 1, 1}, {"8x128/H=16", 1024, 16, 8}};

// The arguments of a call; all tensors but cu_seqlens are zeros.
class Call {
 public:
  explicit Call(const Case& c) {
    for (TensorRef* rows : {&args_.q, &args_.k, &args_.v, &args_.g, &args_.out}) {
      *rows = make(DType::kBFloat16, 2, {1, c.tokens, c.heads, kHeadDim});
    }
    args_.beta = make(DType::kBFloat16, 2, {1, c.tokens, c.heads});
    args_.A_log = make(DType::kFloat32, 4, {c.heads});
    args_.dt_bias = make(DType::kFloat32, 4, {c.heads, kHeadDim});
    args_.initial_state = make(DType::kFloat32, 4, {c.sequences, c.heads, kHeadDim, kHeadDim});
    args_.final_state = args_.initial_state;
    if (c.sequences > 1) set_offsets(c);
    args_.workspace = make(DType::kUInt8, 1, {workspace_size(c.tokens, c.heads, c.sequences)});
    args_.scale = 1.0 / std::sqrt(static_cast<double>(kHeadDim));
    args_.lower_bound = -5.0;
  }

  const ForwardArgs& args() const { return args_; }

 private:
  TensorRef make(DType dtype, size_t element_bytes, std::initializer_list<int64_t> shape) {
    size_t bytes = element_bytes;
    for (int64_t extent : shape) bytes *= static_cast<size_t>(extent);
    void* data = nullptr;
    check(cudaMalloc(&data, bytes));
    memory_.emplace_back(data);
    check(cudaMemset(data, 0, bytes));
    return dense_tensor(data, dtype, shape, kDevice);
  }

  void set_offsets(const Case& c) {
    std::vector<int64_t> offsets;
    for (int64_t n = 0; n <= c.sequences; ++n) offsets.push_back(c.tokens * n / c.sequences);
    args_.cu_seqlens = make(DType::kInt64, sizeof(int64_t), {c.sequences + 1});
    check(cudaMemcpy(args_.cu_seqlens.data, offsets.data(), sizeof(int64_t) * offsets.size(),
                     cudaMemcpyHostToDevice));
  }

  struct Free {
    void operator()(void* data) const { (void)cudaFree(data); }
  };
  std::vector<std::unique_ptr<void, Free>> memory_;
  ForwardArgs args_;
};

// The mean of all calls, and as a counter that of the best batch.
void time_calls(benchmark::State& state, const std::function<void()>& call) {
  using Clock = std::chrono::steady_clock;
  double best = INFINITY;
  call();
  while (state.KeepRunningBatch(kCalls)) {
    check(cudaDeviceSynchronize());
    const auto start = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    state.SetIterationTime(seconds);
    best = std::min(best, seconds / kCalls);
  }
  check(cudaDeviceSynchronize());
  state.counters["best_us"] = 1e6 * best;
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(kCalls * kBatches);
}

std::string chosen(const ForwardArgs& args) {
  ForwardPlan plan;
  check(plan_forward(args, &plan));
  return plan.implementation;
}

void add_case(const Case& c) {
  const auto call = std::make_shared<const Call>(c);
  const std::string prefix = std::string(c.name) + "/";
  add(prefix + "choice", [call](benchmark::State& state) {
    ForwardPlan plan;
    time_calls(state, [&] { check(plan_forward(call->args(), &plan)); });
  });
  add(prefix + "auto", [call](benchmark::State& state) {
    state.SetLabel(chosen(call->args()));
    time_calls(state, [&] { check(forward(call->args())); });
  });
  for (const std::string& name : implementation_names()) {
    setenv(kForceEnv, name.c_str(), 1);
    ForwardPlan plan;
    const bool able = plan_forward(call->args(), &plan).ok();
    unsetenv(kForceEnv);
    if (!able) continue;
    add(prefix + name, [call, name](benchmark::State& state) {
      setenv(kForceEnv, name.c_str(), 1);
      time_calls(state, [&] { check(forward(call->args())); });
      unsetenv(kForceEnv);
    });
  }
}

void add_all() {
  add("empty kernel",
      [](benchmark::State& state) { time_calls(state, [] { check(launch_empty_kernel()); }); });
  for (const Case& c : kCases) add_case(c);
}

}  // namespace
}  // namespace flash_kda

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  try {
    flash_kda::add_all();
    benchmark::RunSpecifiedBenchmarks();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "flash_kda_cuda_host: %s\n", error.what());
    return 1;
  }
  return 0;
}
