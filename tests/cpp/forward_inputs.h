// Inputs of a forward call in memory that a test owns.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "common/bf16.h"
#include "flash_kda/flash_kda.h"

namespace flash_kda::testing {

inline std::vector<uint16_t> bf16_vector(int64_t count, const std::function<float()>& next) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) value = float_to_bf16(next());
  return values;
}

// Dense tensors of B x T x H; args() refers to them. Change a vector or the returned args freely.
struct ForwardInputs {
  int64_t batch, tokens, heads, sequences;
  std::vector<uint16_t> q, k, v, g, beta, out;
  std::vector<float> A_log, dt_bias, initial_state, final_state;
  std::vector<int64_t> cu_seqlens;  // empty: fixed length
  double scale = 0.08838834764831845;
  double lower_bound = -5.0;

  // Standard normal tensors, A_log = dt_bias = 0.5, a normal fp32 initial state.
  ForwardInputs(int64_t b, int64_t t, int64_t h, std::vector<int64_t> offsets = {},
                uint32_t seed = 1)
      : batch(b),
        tokens(t),
        heads(h),
        sequences(offsets.empty() ? b : static_cast<int64_t>(offsets.size()) - 1),
        A_log(static_cast<size_t>(h), 0.5F),
        dt_bias(static_cast<size_t>(h * kHeadDim), 0.5F),
        cu_seqlens(std::move(offsets)) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    const auto next = [&] { return normal(engine); };
    const int64_t rows = b * t * h;
    q = bf16_vector(rows * kHeadDim, next);
    k = bf16_vector(rows * kHeadDim, next);
    v = bf16_vector(rows * kHeadDim, next);
    g = bf16_vector(rows * kHeadDim, next);
    beta = bf16_vector(rows, next);
    out.assign(q.size(), kPoison);
    initial_state.resize(static_cast<size_t>(sequences * h * kHeadDim * kHeadDim));
    for (float& value : initial_state) value = next();
    final_state.assign(initial_state.size(), 12345.0F);
  }

  ForwardArgs args() {
    ForwardArgs a;
    const auto rows = [&](std::vector<uint16_t>& data) {
      return dense_tensor(data.data(), DType::kBFloat16, {batch, tokens, heads, kHeadDim});
    };
    a.q = rows(q);
    a.k = rows(k);
    a.v = rows(v);
    a.g = rows(g);
    a.out = rows(out);
    a.beta = dense_tensor(beta.data(), DType::kBFloat16, {batch, tokens, heads});
    a.A_log = dense_tensor(A_log.data(), DType::kFloat32, {heads});
    a.dt_bias = dense_tensor(dt_bias.data(), DType::kFloat32, {heads, kHeadDim});
    const auto state = [&](std::vector<float>& data) {
      return dense_tensor(data.data(), DType::kFloat32, {sequences, heads, kHeadDim, kHeadDim});
    };
    a.initial_state = state(initial_state);
    a.final_state = state(final_state);
    if (!cu_seqlens.empty()) {
      a.cu_seqlens = dense_tensor(cu_seqlens.data(), DType::kInt64, {sequences + 1});
    }
    a.scale = scale;
    a.lower_bound = lower_bound;
    return a;
  }

  static constexpr uint16_t kPoison = 0x7fc1;  // a NaN that no implementation writes
};

}  // namespace flash_kda::testing
