// Hard inputs, strided and typed memory, and the exact result of a forward call in double
// precision.
#pragma once

#include <cmath>
#include <ostream>
#include <vector>

#include "cpp/forward_inputs.h"
#include "ops/forward/sequences.h"
#include "ops/forward/spec.h"
#include "ops/forward/validate.h"
#include "reference/forward/equations.h"

namespace flash_kda::testing {

// out and final state before they are rounded. Rows of out that belong to no sequence are NaN.
struct Exact {
  std::vector<double> out;    // [B, T, H, V]
  std::vector<double> state;  // [N, H, V, K]
};

inline reference::Vector exact_row(const Rows& rows, int64_t batch, int64_t token, int64_t head) {
  const auto* row = static_cast<const uint16_t*>(rows.data) + batch * rows.batch_stride +
                    token * rows.token_stride + head * kHeadDim;
  reference::Vector vector;
  for (size_t c = 0; c < vector.size(); ++c) vector[c] = bf16_to_float(row[c]);
  return vector;
}

inline Exact exact_forward(const ForwardArgs& args) {
  ForwardProblem p;
  if (!validate(args, &p).ok()) return {};
  Exact exact;
  exact.out.assign(static_cast<size_t>(p.batch * p.tokens * p.heads * kHeadDim), NAN);
  for (int64_t pair = 0; pair < p.sequences * p.heads; ++pair) {
    const int64_t h = pair % p.heads;
    const SequenceSpan span = sequence_span(p, pair / p.heads);
    reference::State state(kStateSize, 0.0);
    for (int64_t i = 0; p.initial_state && i < kStateSize; ++i) {
      state[static_cast<size_t>(i)] =
          load_float(p.initial_state.data, p.initial_state.dtype, pair * kStateSize + i);
    }
    reference::HeadParameters parameters;
    parameters.scale = p.scale;
    parameters.lower_bound = p.lower_bound;
    if (p.A_log) parameters.a_log = load_float(p.A_log.data, p.A_log.dtype, h);
    for (int c = 0; p.dt_bias && c < kHeadDim; ++c) {
      parameters.dt_bias[static_cast<size_t>(c)] =
          load_float(p.dt_bias.data, p.dt_bias.dtype, h * kHeadDim + c);
    }
    for (int64_t t = span.begin; t < span.begin + span.length; ++t) {
      const double logit = load_float(
          p.beta.data, p.beta.dtype,
          span.batch * p.beta.batch_stride + t * p.beta.token_stride + h * p.beta.head_stride);
      const reference::Vector o = reference::step(
          parameters, exact_row(p.q, span.batch, t, h), exact_row(p.k, span.batch, t, h),
          exact_row(p.v, span.batch, t, h), exact_row(p.g, span.batch, t, h), logit, &state);
      const int64_t row = ((span.batch * p.tokens + t) * p.heads + h) * kHeadDim;
      std::copy(o.begin(), o.end(), exact.out.begin() + row);
    }
    exact.state.insert(exact.state.end(), state.begin(), state.end());
  }
  return exact;
}

// |ours - exact| / |exact|, Frobenius norms.
struct RelativeError {
  double difference = 0.0, norm = 0.0;
  void add(double ours, double exact) {
    difference += (ours - exact) * (ours - exact);
    norm += exact * exact;
  }
  double value() const {
    return norm == 0.0 ? std::sqrt(difference) : std::sqrt(difference / norm);
  }
};

inline double output_error(const ForwardArgs& args, const Exact& exact) {
  RelativeError error;
  const TensorRef& out = args.out;
  const auto* data = static_cast<const uint16_t*>(out.data);
  size_t at = 0;
  for (int64_t b = 0; b < out.shape[0]; ++b) {
    for (int64_t t = 0; t < out.shape[1]; ++t) {
      for (int64_t i = 0; i < out.shape[2] * kHeadDim; ++i, ++at) {
        if (std::isnan(exact.out[at])) continue;
        error.add(bf16_to_float(data[b * out.stride[0] + t * out.stride[1] + i]), exact.out[at]);
      }
    }
  }
  return error.value();
}

inline double state_error(const ForwardArgs& args, const Exact& exact) {
  RelativeError error;
  for (size_t i = 0; i < exact.state.size(); ++i) {
    error.add(load_float(args.final_state.data, args.final_state.dtype, static_cast<int64_t>(i)),
              exact.state[i]);
  }
  return error.value();
}

struct InputKind {
  const char* name;
  int64_t tokens, heads;
  std::function<void(ForwardInputs*)> fill;
};

inline void PrintTo(const InputKind& kind, std::ostream* stream) { *stream << kind.name; }

inline void fill_bf16(std::vector<uint16_t>* values, float value) {
  values->assign(values->size(), float_to_bf16(value));
}

inline void set_plain_gates(ForwardInputs* x, float g, float beta_logit) {
  x->A_log.assign(x->A_log.size(), 0.0F);
  x->dt_bias.assign(x->dt_bias.size(), 0.0F);
  fill_bf16(&x->g, g);
  fill_bf16(&x->beta, beta_logit);
}

// All keys and queries are one vector, v repeats after 16 tokens: every update must cancel the one
// before it.
inline void repeat_key(ForwardInputs* x) {
  const size_t row = static_cast<size_t>(x->heads) * kHeadDim;
  for (size_t i = row; i < x->k.size(); ++i) x->k[i] = x->k[i - row];
  x->q = x->k;
  for (size_t i = 16 * row; i < x->v.size(); ++i) x->v[i] = x->v[i - 16 * row];
}

// Keys = one vector + noise, which leaves them at a cosine of 0.99 and more.
inline void near_collinear_keys(ForwardInputs* x) {
  const size_t row = static_cast<size_t>(x->heads) * kHeadDim;
  const std::vector<uint16_t> first(x->q.begin(), x->q.begin() + static_cast<int64_t>(row));
  for (size_t i = 0; i < x->k.size(); ++i) {
    x->k[i] = float_to_bf16(bf16_to_float(first[i % row]) + 0.08F * bf16_to_float(x->k[i]));
  }
}

inline std::vector<InputKind> input_kinds() {
  return {
      {"random", 2048, 2, [](ForwardInputs*) {}},
      {"g=-6", 2048, 1, [](ForwardInputs* x) { set_plain_gates(x, -6.0F, 0.0F); }},
      {"g=-9, T=8192", 8192, 1, [](ForwardInputs* x) { set_plain_gates(x, -9.0F, 0.0F); }},
      {"g=-12, T=8192", 8192, 1, [](ForwardInputs* x) { set_plain_gates(x, -12.0F, 0.0F); }},
      {"g=+30", 512, 1, [](ForwardInputs* x) { set_plain_gates(x, 30.0F, 0.0F); }},
      {"half the channels +30, half -30", 2048, 1,
       [](ForwardInputs* x) {
         set_plain_gates(x, 30.0F, 0.0F);
         for (size_t i = 0; i < x->g.size(); i += 2) x->g[i] = float_to_bf16(-30.0F);
       }},
      {"one key, g=-12, beta logit 8", 2048, 1,
       [](ForwardInputs* x) {
         set_plain_gates(x, -12.0F, 8.0F);
         repeat_key(x);
       }},
      {"one key from zero, T=16384", 16384, 1,
       [](ForwardInputs* x) {
         set_plain_gates(x, -12.0F, 8.0F);
         repeat_key(x);
         x->initial_state.assign(x->initial_state.size(), 0.0F);
       }},
      {"one key, slow gates per channel", 8192, 1,
       [](ForwardInputs* x) {
         set_plain_gates(x, 0.0F, 8.0F);
         repeat_key(x);
         for (size_t i = 0; i < x->g.size(); ++i) {
           x->g[i] = float_to_bf16(-8.0F - 0.05F * static_cast<float>(i % kHeadDim));
         }
         x->initial_state.assign(x->initial_state.size(), 0.0F);
       }},
      {"cosine 0.99, g=-6, beta logit 4", 2048, 1,
       [](ForwardInputs* x) {
         set_plain_gates(x, -6.0F, 4.0F);
         near_collinear_keys(x);
       }},
      {"cosine 0.99, g=-9, beta logit 8", 2048, 1,
       [](ForwardInputs* x) {
         set_plain_gates(x, -9.0F, 8.0F);
         near_collinear_keys(x);
       }},
      {"no decay", 1024, 1, [](ForwardInputs* x) { x->lower_bound = 0.0; }},
      {"q = k = 0", 100, 1,
       [](ForwardInputs* x) {
         x->lower_bound = -0.01;
         fill_bf16(&x->q, 0.0F);
         fill_bf16(&x->k, 0.0F);
       }},
  };
}

// States of one of the two types, or not given (kOther).
class StateBuffer {
 public:
  StateBuffer(const ForwardInputs& inputs, DType dtype)
      : dtype_(dtype), shape_{inputs.sequences, inputs.heads}, data_(inputs.initial_state.size()) {}

  float at(int64_t i) const { return load_float(data_.data(), dtype_, i); }
  void set(int64_t i, float value) { store_float(data_.data(), dtype_, i, value); }
  void fill(const std::vector<float>& values) {
    if (dtype_ == DType::kOther) return;
    for (size_t i = 0; i < values.size(); ++i) set(static_cast<int64_t>(i), values[i]);
  }
  TensorRef ref() {
    if (dtype_ == DType::kOther) return {};
    return dense_tensor(data_.data(), dtype_, {shape_[0], shape_[1], kHeadDim, kHeadDim});
  }

 private:
  DType dtype_;
  int64_t shape_[2];
  std::vector<float> data_;  // enough for either
};

// A copy of dense [B, T, H, 128] rows with gaps between tokens and between batch entries.
class StridedRows {
 public:
  StridedRows(const TensorRef& dense, int64_t token_gap, int64_t batch_gap) : ref_(dense) {
    ref_.stride[1] += token_gap;
    ref_.stride[0] = ref_.stride[1] * ref_.shape[1] + batch_gap;
    data_.assign(static_cast<size_t>(ref_.stride[0] * ref_.shape[0]), ForwardInputs::kPoison);
    ref_.data = data_.data();
    const auto* source = static_cast<const uint16_t*>(dense.data);
    visit([&](int64_t at) { data_[static_cast<size_t>(at)] = *source++; });
  }

  TensorRef ref() const { return ref_; }
  std::vector<uint16_t> gather() const {
    std::vector<uint16_t> rows;
    visit([&](int64_t at) { rows.push_back(data_[static_cast<size_t>(at)]); });
    return rows;
  }
  bool gaps_untouched() const {
    std::vector<bool> inside(data_.size());
    visit([&](int64_t at) { inside[static_cast<size_t>(at)] = true; });
    for (size_t i = 0; i < data_.size(); ++i) {
      if (!inside[i] && data_[i] != ForwardInputs::kPoison) return false;
    }
    return true;
  }

 private:
  template <class Visit>
  void visit(const Visit& visit) const {
    for (int64_t b = 0; b < ref_.shape[0]; ++b) {
      for (int64_t t = 0; t < ref_.shape[1]; ++t) {
        for (int64_t i = 0; i < ref_.shape[2] * kHeadDim; ++i) {
          visit(b * ref_.stride[0] + t * ref_.stride[1] + i);
        }
      }
    }
  }

  TensorRef ref_;
  std::vector<uint16_t> data_;
};

}  // namespace flash_kda::testing
