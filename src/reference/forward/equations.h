// One token of Kimi Delta Attention in double precision; tests compare it with closed forms.
#pragma once

#include <array>
#include <vector>

#include "flash_kda/forward.h"

namespace flash_kda::reference {

using Vector = std::array<double, kHeadDim>;
using State = std::vector<double>;  // [V, K], row-major

struct HeadParameters {
  double scale = 1.0;
  double lower_bound = 0.0;
  double a_log = 0.0;
  Vector dt_bias = {};
};

// x / sqrt(sum(x^2) + 1e-6)
Vector normalize(const Vector& x);

// 1 / (1 + e^-x)
double sigmoid(double x);

// Decays and updates the state with one token, then reads it: returns o. q, k and g are raw.
Vector step(const HeadParameters& parameters, const Vector& q, const Vector& k, const Vector& v,
            const Vector& g, double beta_logit, State* state);

}  // namespace flash_kda::reference
