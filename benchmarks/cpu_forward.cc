// Times of the CPU implementation, and beside them an sgemm of the same number of operations.
//
// Operations of one token and head, products only, triangles counted as such:
//   6 K V       S kd', S qd' and R' kr
//   2 C K       L and M, the lower halves of C x C x K products
//   2 C V       T X and M R, likewise
// which for C = 64 and K = V = 128 is 2^17.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/forward/config.h"
#include "flash_kda/flash_kda.h"
#include "sgemm.h"

namespace flash_kda {
namespace {

constexpr double kOperations = 6.0 * kHeadDim * kHeadDim + 4.0 * cpu::kChunk * kHeadDim;

// Dense inputs: random q, k, v; gates of moderate decay.
class Problem {
 public:
  Problem(int64_t tokens, int64_t heads)
      : rows_{make(tokens * heads), make(tokens * heads), make(tokens * heads),
              make(tokens * heads)},
        out_(rows_[0].size()),
        beta_(static_cast<size_t>(tokens * heads)),
        parameters_(static_cast<size_t>(heads * kHeadDim), 0.5F),
        state_(static_cast<size_t>(heads * kHeadDim * kHeadDim)) {
    const auto tensor = [&](std::vector<uint16_t>& data) {
      return dense_tensor(data.data(), DType::kBFloat16, {1, tokens, heads, kHeadDim});
    };
    args_.q = tensor(rows_[0]);
    args_.k = tensor(rows_[1]);
    args_.v = tensor(rows_[2]);
    args_.g = tensor(rows_[3]);
    args_.out = tensor(out_);
    args_.beta = dense_tensor(beta_.data(), DType::kBFloat16, {1, tokens, heads});
    args_.A_log = dense_tensor(parameters_.data(), DType::kFloat32, {heads});
    args_.dt_bias = dense_tensor(parameters_.data(), DType::kFloat32, {heads, kHeadDim});
    args_.initial_state =
        dense_tensor(state_.data(), DType::kFloat32, {1, heads, kHeadDim, kHeadDim});
    args_.final_state = args_.initial_state;
    args_.scale = 1.0 / std::sqrt(static_cast<double>(kHeadDim));
    args_.lower_bound = -5.0;
  }

  const ForwardArgs& args() const { return args_; }

 private:
  static std::vector<uint16_t> make(int64_t rows) {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> values(static_cast<size_t>(rows * kHeadDim));
    for (uint16_t& value : values) {
      const float number = normal(engine);
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof bits);
      value = static_cast<uint16_t>(bits >> 16);
    }
    return values;
  }

  std::vector<uint16_t> rows_[4], out_, beta_;
  std::vector<float> parameters_, state_;
  ForwardArgs args_;
};

void set_rates(benchmark::State& state, int64_t tokens, int64_t heads) {
  const double pairs = static_cast<double>(tokens * heads);
  state.counters["per_token_head"] = benchmark::Counter(
      pairs, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
  state.counters["FLOPS"] =
      benchmark::Counter(kOperations * pairs, benchmark::Counter::kIsIterationInvariantRate);
}

void Forward(benchmark::State& state) {
  const int64_t tokens = state.range(0), heads = state.range(1);
  const Problem problem(tokens, heads);
  ForwardPlan plan;
  if (!plan_forward(problem.args(), &plan).ok() || std::string(plan.implementation) != "cpu") {
    state.SkipWithError("not the CPU implementation");
    return;
  }
  for (auto _ : state) {
    const Status status = forward(problem.args());
    if (!status.ok()) state.SkipWithError(status.message().c_str());
  }
  set_rates(state, tokens, heads);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// One forward call and one sgemm in turn, so that both see the same machine. The ratio is that of
// the two fastest.
void ForwardBesideSgemm(benchmark::State& state) {
  const int64_t tokens = state.range(0), heads = state.range(1);
  const Problem problem(tokens, heads);
  const double operations = kOperations * static_cast<double>(tokens * heads);
  const int size = static_cast<int>(std::lround(std::cbrt(operations / 2.0)));
  Sgemm sgemm(size);
  double fastest_forward = INFINITY, fastest_sgemm = INFINITY;
  for (auto _ : state) {
    auto start = std::chrono::steady_clock::now();
    const Status status = forward(problem.args());
    fastest_forward = std::min(fastest_forward, seconds_since(start));
    if (!status.ok()) state.SkipWithError(status.message().c_str());
    start = std::chrono::steady_clock::now();
    sgemm.run();
    fastest_sgemm = std::min(fastest_sgemm, seconds_since(start));
  }
  // What an sgemm of exactly the same number of operations would take.
  const double scale = operations / (2.0 * std::pow(size, 3.0));
  state.counters["forward_ms"] = fastest_forward * 1e3;
  state.counters["sgemm_ms"] = fastest_sgemm * scale * 1e3;
  state.counters["sgemm_FLOPS"] = operations / (fastest_sgemm * scale);
  state.counters["ratio"] = fastest_forward / (fastest_sgemm * scale);
}

BENCHMARK(Forward)
    ->ArgNames({"T", "H"})
    ->ArgsProduct({{1, 32, 256, 2048, 16384, 65536}, {1, 8}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(ForwardBesideSgemm)
    ->ArgNames({"T", "H"})
    ->Args({2048, 8})
    ->Args({8192, 1})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace flash_kda

BENCHMARK_MAIN();
