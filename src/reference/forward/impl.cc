// The oracle: the token loop of flash_kda/forward.h in double precision, written straight from the
// equations. It shares no arithmetic with the fast implementations and is never optimised.
#include <cmath>

#include "common/bf16.h"
#include "ops/forward/impls.h"
#include "ops/forward/sequences.h"
#include "ops/forward/spec.h"
#include "reference/forward/equations.h"

namespace flash_kda::reference {
namespace {

Vector load_row(const Rows& rows, int64_t batch, int64_t token, int64_t head) {
  const auto* row = static_cast<const uint16_t*>(rows.data) + batch * rows.batch_stride +
                    token * rows.token_stride + head * kHeadDim;
  Vector vector;
  for (int c = 0; c < kHeadDim; ++c) vector[c] = bf16_to_float(row[c]);
  return vector;
}

double load_parameter(const Dense& parameter, int64_t index) {
  return parameter ? load_float(parameter.data, parameter.dtype, index) : 0.0;
}

double load_logit(const Logits& logits, int64_t batch, int64_t token, int64_t head) {
  return load_float(
      logits.data, logits.dtype,
      batch * logits.batch_stride + token * logits.token_stride + head * logits.head_stride);
}

void run_head(const ForwardProblem& p, int64_t sequence, int64_t head) {
  const int64_t state_offset = (sequence * p.heads + head) * kStateSize;
  State state(kStateSize, 0.0);
  if (p.initial_state) {
    for (size_t i = 0; i < state.size(); ++i) {
      state[i] = load_float(p.initial_state.data, p.initial_state.dtype,
                            state_offset + static_cast<int64_t>(i));
    }
  }
  HeadParameters parameters;
  parameters.scale = p.scale;
  parameters.lower_bound = p.lower_bound;
  parameters.a_log = load_parameter(p.A_log, head);
  for (int c = 0; c < kHeadDim; ++c) {
    parameters.dt_bias[c] = load_parameter(p.dt_bias, head * kHeadDim + c);
  }

  const SequenceSpan span = sequence_span(p, sequence);
  for (int64_t t = span.begin; t < span.begin + span.length; ++t) {
    const Vector o =
        step(parameters, load_row(p.q, span.batch, t, head), load_row(p.k, span.batch, t, head),
             load_row(p.v, span.batch, t, head), load_row(p.g, span.batch, t, head),
             load_logit(p.beta, span.batch, t, head), &state);
    auto* out = static_cast<uint16_t*>(p.out.data) + span.batch * p.out.batch_stride +
                t * p.out.token_stride + head * kHeadDim;
    for (int c = 0; c < kHeadDim; ++c) out[c] = float_to_bf16(static_cast<float>(o[c]));
  }
  if (!p.final_state) return;
  for (size_t i = 0; i < state.size(); ++i) {
    store_float(p.final_state.data, p.final_state.dtype, state_offset + static_cast<int64_t>(i),
                static_cast<float>(state[i]));
  }
}

Status accepts(const ForwardProblem& problem) {
  if (problem.device.type == DeviceType::kCpu) return {};
  return Status::unsupported("runs on CPU tensors only");
}

int64_t workspace_bytes(int64_t, int64_t, int64_t) { return 0; }

Status run(const ForwardProblem& problem, void*, int64_t) {
  const int64_t pairs = problem.sequences * problem.heads;
#pragma omp parallel for schedule(dynamic)
  for (int64_t pair = 0; pair < pairs; ++pair) {
    run_head(problem, pair / problem.heads, pair % problem.heads);
  }
  return {};
}

}  // namespace

Vector step(const HeadParameters& parameters, const Vector& q, const Vector& k, const Vector& v,
            const Vector& g, double beta_logit, State* state) {
  const Vector q_hat = normalize(q);
  const Vector k_hat = normalize(k);
  const double beta = sigmoid(beta_logit);
  Vector decay;
  for (int c = 0; c < kHeadDim; ++c) {
    const double x = std::exp(parameters.a_log) * (g[c] + parameters.dt_bias[c]);
    decay[c] = std::exp(parameters.lower_bound * sigmoid(x));
  }
  Vector o;
  for (int row = 0; row < kHeadDim; ++row) {
    double* s = state->data() + row * kHeadDim;
    double recalled = 0.0;
    for (int c = 0; c < kHeadDim; ++c) {
      s[c] *= decay[c];
      recalled += s[c] * k_hat[c];
    }
    const double correction = beta * (v[row] - recalled);
    double read = 0.0;
    for (int c = 0; c < kHeadDim; ++c) {
      s[c] += correction * k_hat[c];
      read += s[c] * q_hat[c];
    }
    o[row] = parameters.scale * read;
  }
  return o;
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

Vector normalize(const Vector& x) {
  double sum = 0.0;
  for (double value : x) sum += value * value;
  const double factor = 1.0 / std::sqrt(sum + 1e-6);
  Vector y;
  for (int c = 0; c < kHeadDim; ++c) y[c] = x[c] * factor;
  return y;
}

const ForwardImpl kForward = {"reference", accepts, workspace_bytes, run};

}  // namespace flash_kda::reference
