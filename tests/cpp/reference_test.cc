// The oracle against finite closed forms, to 1e-12.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "reference/forward/equations.h"

namespace flash_kda::reference {
namespace {

constexpr double kTolerance = 1e-12;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Vector random_vector(std::mt19937* engine) {
  std::normal_distribution<double> normal;
  Vector vector;
  for (double& value : vector) value = normal(*engine);
  return vector;
}

Vector unit_vector(int channel) {
  Vector vector = {};
  vector[static_cast<size_t>(channel)] = 1.0;
  return vector;
}

double dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (int c = 0; c < kHeadDim; ++c) sum += a[c] * b[c];
  return sum;
}

State zero_state() { return State(kHeadDim * kHeadDim, 0.0); }

TEST(Reference, OneTokenFromZero) {
  std::mt19937 engine(1);
  const HeadParameters parameters = {
      .scale = 0.3, .lower_bound = -5.0, .a_log = 0.7, .dt_bias = {}};
  const Vector q = random_vector(&engine), k = random_vector(&engine), v = random_vector(&engine);
  const double logit = 0.4, beta = 1.0 / (1.0 + std::exp(-logit));
  State state = zero_state();
  const Vector o = step(parameters, q, k, v, random_vector(&engine), logit, &state);
  const double k_norm = std::sqrt(dot(k, k) + 1e-6), q_norm = std::sqrt(dot(q, q) + 1e-6);
  for (int row = 0; row < kHeadDim; ++row) {
    EXPECT_NEAR(o[row], 0.3 * beta * v[row] * dot(q, k) / (q_norm * k_norm), kTolerance);
    for (int c = 0; c < kHeadDim; ++c) {
      EXPECT_NEAR(state[row * kHeadDim + c], beta * v[row] * k[c] / k_norm, kTolerance);
    }
  }
}

// With beta = 0 the state only decays: column c of it by exp(lower_bound sigmoid(e^A (g + bias))).
TEST(Reference, DecayPerKeyChannel) {
  std::mt19937 engine(2);
  HeadParameters parameters = {.scale = 2.0, .lower_bound = -3.0, .a_log = -0.4, .dt_bias = {}};
  parameters.dt_bias = random_vector(&engine);
  State state = zero_state();
  std::normal_distribution<double> normal;
  for (double& value : state) value = normal(engine);
  const State before = state;
  const Vector g = random_vector(&engine), v = random_vector(&engine), k = random_vector(&engine);
  const Vector o = step(parameters, unit_vector(5), k, v, g, -kInfinity, &state);
  for (int row = 0; row < kHeadDim; ++row) {
    for (int c = 0; c < kHeadDim; ++c) {
      const double x = std::exp(-0.4) * (g[c] + parameters.dt_bias[c]);
      const double gamma = -3.0 / (1.0 + std::exp(-x));
      const int i = row * kHeadDim + c;
      EXPECT_NEAR(state[i], before[i] * std::exp(gamma), kTolerance);
      if (c == 5) {
        EXPECT_NEAR(o[row], 2.0 * before[i] * std::exp(gamma) / std::sqrt(1.0 + 1e-6), kTolerance);
      }
    }
  }
}

// One key repeated, no decay: S k^ = v (1 - (1 - beta m)^n) with m = |k^|^2.
TEST(Reference, CollinearKeysWithoutDecay) {
  std::mt19937 engine(3);
  const HeadParameters parameters = {.scale = 1.0, .lower_bound = 0.0, .a_log = 0.0, .dt_bias = {}};
  const Vector k = random_vector(&engine), v = random_vector(&engine), g = {};
  const double logit = 1.3, beta = 1.0 / (1.0 + std::exp(-logit));
  const double m = dot(k, k) / (dot(k, k) + 1e-6);
  State state = zero_state();
  for (int n = 1; n <= 1000; ++n) {
    const Vector o = step(parameters, k, k, v, g, logit, &state);
    const double expected = 1.0 - std::pow(1.0 - beta * m, n);
    for (int row = 0; row < kHeadDim; ++row) {
      ASSERT_NEAR(o[row], v[row] * expected, kTolerance) << "token " << n;
    }
  }
}

// The same with one decay e^gamma on all channels: a geometric series.
TEST(Reference, CollinearKeysWithDecay) {
  std::mt19937 engine(4);
  const HeadParameters parameters = {
      .scale = 1.0, .lower_bound = -2.0, .a_log = 0.0, .dt_bias = {}};
  const Vector k = random_vector(&engine), v = random_vector(&engine), g = {};
  const double beta = 0.5, gamma = -2.0 * 0.5;  // logit 0, g = 0
  const double m = dot(k, k) / (dot(k, k) + 1e-6);
  const double ratio = std::exp(gamma) * (1.0 - beta * m);
  State state = zero_state();
  for (int n = 1; n <= 200; ++n) {
    const Vector o = step(parameters, k, k, v, g, 0.0, &state);
    const double expected = beta * m * (1.0 - std::pow(ratio, n)) / (1.0 - ratio);
    for (int row = 0; row < kHeadDim; ++row) ASSERT_NEAR(o[row], v[row] * expected, kTolerance);
  }
}

// Orthogonal keys with beta = 1 and no decay are recalled exactly, however many came after.
TEST(Reference, OrthogonalKeysAreRecalled) {
  std::mt19937 engine(5);
  const HeadParameters parameters = {.scale = 1.0, .lower_bound = 0.0, .a_log = 0.0, .dt_bias = {}};
  std::vector<Vector> values;
  State state = zero_state();
  for (int c = 0; c < kHeadDim; ++c) {
    values.push_back(random_vector(&engine));
    step(parameters, unit_vector(c), unit_vector(c), values.back(), {}, kInfinity, &state);
  }
  const double norm = std::sqrt(1.0 + 1e-6);
  for (int c = 0; c < kHeadDim; ++c) {
    State copy = state;
    const Vector o = step(parameters, unit_vector(c), unit_vector(c), {}, {}, -kInfinity, &copy);
    for (int row = 0; row < kHeadDim; ++row) {
      EXPECT_NEAR(o[row], values[c][row] / (norm * norm), kTolerance);
    }
  }
}

}  // namespace
}  // namespace flash_kda::reference
