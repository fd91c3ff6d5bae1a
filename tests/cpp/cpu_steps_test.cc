// The steps of the CPU implementation against closed forms in double precision. They are compiled
// into this test under a name of their own, with its flags.
#define FLASH_KDA_ISA steps_test
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>

#include "common/bf16.h"
#include "cpu/forward/direct.h"
#include "cpu/forward/prepare.h"
#include "cpu/forward/recurrence.h"

namespace flash_kda::cpu::steps_test {
namespace {

constexpr double kUnit = 6e-8;  // half a unit in the last place of a float near 1
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(Vectors, Bfloat16BothWaysForEveryPattern) {
  for (uint32_t pattern = 0; pattern < 0x10000U; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const float value = to_float(bits);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(value))));
    } else {
      EXPECT_EQ(to_bf16(value), bits);
    }
  }
}

TEST(Vectors, Bfloat16RoundsAsTheScalarConversion) {
  std::mt19937 engine(1);
  for (int i = 0; i < 100000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(engine()));
    EXPECT_EQ(to_bf16(value), float_to_bf16(value)) << value;
  }
}

TEST(Vectors, PowersOfTwo) {
  for (float x = -126.0F; x <= 126.0F; x += 0.00731F) {
    EXPECT_NEAR(exp2_in_range(x) / std::exp2(static_cast<double>(x)), 1.0, 2e-7) << x;
  }
  EXPECT_EQ(exp2_in_range(0.0F), 1.0F);
  EXPECT_TRUE(std::isnan(exp2_in_range(NAN)));
}

TEST(Vectors, WidePowersAreAccurateNearOne) {
  for (float x = -125.0F; x < 0.0F; x = x < -1e-6F ? x * 0.97F : 0.0F) {
    const double exact = std::exp2(static_cast<double>(x));
    EXPECT_NEAR(exp2_wide(x) / exact, 1.0, 1e-7) << x;
    if (x > -0.4F) {
      EXPECT_NEAR((1.0 - exp2_wide(x)) / -std::expm1(x * std::log(2.0)), 1.0, 2e-7) << x;
    }
  }
  EXPECT_EQ(exp2_wide(0.0F), 1.0);
  EXPECT_LE(exp2_wide(-1000.0F), 1.2e-38);
  EXPECT_TRUE(std::isnan(exp2_wide(NAN)));
}

TEST(Vectors, Exponentials) {
  for (float x = -87.0F; x <= 87.0F; x += 0.00519F) {
    EXPECT_NEAR(exp_clamped(x) / std::exp(static_cast<double>(x)), 1.0, 3e-7) << x;
  }
  EXPECT_EQ(exp_clamped(-1000.0F), exp_clamped(-87.0F));
  EXPECT_EQ(exp_clamped(kInfinity), exp_clamped(87.0F));
  EXPECT_TRUE(std::isnan(exp_clamped(NAN)));
}

// A head of `tokens` random tokens and the exact values of its gates.
class OneHead {
 public:
  OneHead(int tokens, float g_mean, float g_spread, float lower_bound, uint32_t seed)
      : q_(tokens * kHeadDim), k_(q_), v_(q_), g_(q_), out_(q_), beta_(tokens), bias_(kHeadDim) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal;
    for (auto* rows : {&q_, &k_, &v_}) {
      for (uint16_t& x : *rows) x = float_to_bf16(normal(engine));
    }
    for (uint16_t& x : g_) x = float_to_bf16(g_mean + g_spread * normal(engine));
    for (uint16_t& x : beta_) x = float_to_bf16(normal(engine));
    for (float& x : bias_) x = 0.3F * normal(engine);
    head_.q = {q_.data(), kHeadDim};
    head_.k = {k_.data(), kHeadDim};
    head_.v = {v_.data(), kHeadDim};
    head_.g = {g_.data(), kHeadDim};
    head_.out = {out_.data(), kHeadDim};
    head_.beta = beta_.data();
    head_.beta_dtype = DType::kBFloat16;
    head_.beta_stride = 1;
    head_.tokens = tokens;
    head_.dt_bias = bias_.data();
    head_.dt_bias_dtype = DType::kFloat32;
    head_.gate_rate = 1.25F;
    head_.lower_bound = lower_bound;
    head_.scale = 0.25F;
  }

  const Head& head() const { return head_; }
  int tokens() const { return static_cast<int>(head_.tokens); }
  double log2_decay(int t, int c) const {
    return head_.lower_bound / std::log(2.0) / (1.0 + std::exp(-gate_argument(t, c)));
  }
  double gate_argument(int t, int c) const {
    const double g = bf16_to_float(g_[static_cast<size_t>(t * kHeadDim + c)]);
    return head_.gate_rate * (g + bias_[static_cast<size_t>(c)]);
  }
  double beta(int t) const {
    return 1.0 / (1.0 + std::exp(-bf16_to_float(beta_[static_cast<size_t>(t)])));
  }
  std::vector<double> k_hat(int t) const { return normalized(k_, t); }
  std::vector<double> q_hat(int t) const { return normalized(q_, t); }

 private:
  static std::vector<double> normalized(const std::vector<uint16_t>& rows, int t) {
    std::vector<double> x(kHeadDim);
    double sum = 1e-6;
    for (int c = 0; c < kHeadDim; ++c) {
      x[c] = bf16_to_float(rows[static_cast<size_t>(t * kHeadDim + c)]);
      sum += x[c] * x[c];
    }
    for (double& value : x) value /= std::sqrt(sum);
    return x;
  }

  std::vector<uint16_t> q_, k_, v_, g_, out_, beta_;
  std::vector<float> bias_;
  Head head_ = {};
};

struct GateCase {
  const char* name;
  float mean, spread, bound;
};
constexpr GateCase kGateCases[] = {{"random", 0.0F, 1.0F, -5.0F},
                                   {"fastest", 30.0F, 1.0F, -5.0F},
                                   {"slow", -9.0F, 0.5F, -5.0F},
                                   {"either", 0.0F, 60.0F, -5.0F},
                                   {"none", 0.0F, 1.0F, 0.0F}};

TEST(Gate, DecayOfABlock) {
  for (const GateCase& gates : kGateCases) {
    for (int rows : {16, 5}) {
      const OneHead x(kBlock + rows, gates.mean, gates.spread, gates.bound, 3);
      GateParameters parameters;
      load_gate(x.head(), &parameters);
      const auto block = std::make_unique<BlockDecay>();
      gate_block(x.head(), parameters, kBlock, rows, block.get());
      for (int c = 0; c < kHeadDim; ++c) {
        double sum = 0.0, argument = 0.0;
        for (int i = 0; i < kBlock; ++i) {
          if (i < rows) {
            sum += x.log2_decay(kBlock + i, c);
            argument = std::max(argument, std::abs(x.gate_argument(kBlock + i, c)));
          }
          // Up to 16 roundings of the sum, and those of the sigmoid's argument in front of it. Past
          // e^-87 the sigmoid counts as that.
          const double error = kUnit * (16.0 + 2.0 * argument) * std::abs(sum) + 1e-35;
          EXPECT_NEAR(block->log2[i][c], sum, error) << gates.name;
          EXPECT_NEAR(block->decay[i][c] / std::exp2(sum), 1.0, 4e-7 + error) << gates.name;
          EXPECT_NEAR(block->inverse[i][c] * std::exp2(sum), 1.0, 4e-7 + error) << gates.name;
        }
      }
    }
  }
}

TEST(Gate, BetaOfAnyLogit) {
  std::vector<float> logits = {0.0F, 3.5F, -3.5F, 60.0F, -60.0F, kInfinity, -kInfinity};
  Head head = {};
  head.beta = logits.data();
  head.beta_dtype = DType::kFloat32;
  head.beta_stride = 1;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double exact = 1.0 / (1.0 + std::exp(-static_cast<double>(logits[i])));
    EXPECT_NEAR(beta_of(head, static_cast<int64_t>(i)), exact, 2e-7 * exact) << logits[i];
  }
}

// The rows of (I + L)^-1 diag(beta), by forward substitution in double.
std::vector<double> exact_inverse(const float (*L)[kChunk], const float* beta) {
  std::vector<double> inverse(kChunk * kChunk, 0.0);
  for (int i = 0; i < kChunk; ++i) {
    for (int c = 0; c <= i; ++c) {
      double value = i == c ? 1.0 : 0.0;
      for (int j = c; j < i; ++j) value -= static_cast<double>(L[i][j]) * inverse[j * kChunk + c];
      inverse[i * kChunk + c] = value;
    }
  }
  for (int i = 0; i < kChunk * kChunk; ++i) inverse[i] *= beta[i % kChunk];
  return inverse;
}

void expect_inverse(const float (*L)[kChunk], const float* beta, double tolerance) {
  alignas(64) static float T[kChunk][kChunk];
  std::fill_n(T[0], kChunk * kChunk, NAN);
  invert(L, beta, T);
  const std::vector<double> exact = exact_inverse(L, beta);
  for (int i = 0; i < kChunk; ++i) {
    for (int j = 0; j < kChunk; ++j) {
      if (j > i) {
        ASSERT_EQ(T[i][j], 0.0F);
      } else {
        ASSERT_NEAR(T[i][j], exact[i * kChunk + j], tolerance) << i << ", " << j;
      }
    }
  }
}

TEST(Inverse, RandomMatrix) {
  std::mt19937 engine(4);
  std::normal_distribution<float> normal;
  alignas(64) float L[kChunk][kChunk];
  float beta[kChunk];
  for (int i = 0; i < kChunk; ++i) {
    beta[i] = 0.5F + 0.1F * normal(engine);
    // Above the diagonal lies what nobody may read.
    for (int j = 0; j < kChunk; ++j) L[i][j] = j < i ? 0.1F * normal(engine) : NAN;
  }
  expect_inverse(L, beta, 2e-6);
}

// Equal keys: every entry of L is beta, and the inverse has beta (1 - beta)^(i - j - 1) with
// alternating terms that must cancel.
TEST(Inverse, EqualKeys) {
  for (float b : {0.5F, 0.99966F, 1.0F}) {
    alignas(64) float L[kChunk][kChunk];
    float beta[kChunk];
    for (int i = 0; i < kChunk; ++i) {
      beta[i] = b;
      for (int j = 0; j < kChunk; ++j) L[i][j] = b;
    }
    expect_inverse(L, beta, 1e-5);
  }
}

void expect_tiles(const OneHead& x, int chunk, const ChunkTiles& tiles, const std::string& what) {
  const int start = chunk * kChunk;
  const int tokens = std::min(kChunk, x.tokens() - start);
  std::vector<std::vector<double>> G(kChunk, std::vector<double>(kHeadDim, 0.0));
  for (int i = 0; i < kChunk; ++i) {
    for (int c = 0; c < kHeadDim; ++c) {
      G[i][c] = (i > 0 ? G[i - 1][c] : 0.0) + (i < tokens ? x.log2_decay(start + i, c) : 0.0);
    }
  }
  const std::vector<double>& last = G[kChunk - 1];
  const double tolerance = 1e-6;
  std::vector<float> beta(kChunk, 0.0F);
  alignas(64) static float L[kChunk][kChunk];
  for (int i = 0; i < kChunk; ++i) {
    for (int j = 0; j < kChunk; ++j) L[i][j] = 0.0F;
    if (i >= tokens) {  // past the end: nothing is read, nothing is added
      for (int c = 0; c < kHeadDim; ++c) {
        ASSERT_EQ(tiles.rows[kd_row(i)][c], 0.0F) << what;
        ASSERT_EQ(tiles.rows[qd_row(i)][c], 0.0F) << what;
        ASSERT_EQ(tiles.kr[i][c], 0.0) << what;
      }
      for (int j = 0; j < kChunk; ++j) ASSERT_EQ(tiles.M[i][j], 0.0F) << what;
      continue;
    }
    const std::vector<double> k = x.k_hat(start + i), q = x.q_hat(start + i);
    beta[i] = static_cast<float>(x.beta(start + i));
    for (int c = 0; c < kHeadDim; ++c) {
      const double decay = std::exp2(G[i][c]);
      ASSERT_NEAR(tiles.rows[kd_row(i)][c], k[c] * decay, tolerance) << what;
      ASSERT_NEAR(tiles.rows[qd_row(i)][c], 0.25 * q[c] * decay, tolerance) << what;
      ASSERT_NEAR(tiles.kr[i][c], k[c] * std::exp2(last[c] - G[i][c]), tolerance) << what;
    }
    for (int j = 0; j < kChunk; ++j) {
      if (j > i) {
        ASSERT_EQ(tiles.M[i][j], 0.0F) << what;
        continue;
      }
      const std::vector<double> k_j = x.k_hat(start + j);
      double kk = 0.0, qk = 0.0;
      for (int c = 0; c < kHeadDim; ++c) {
        const double decay = std::exp2(G[i][c] - G[j][c]);
        kk += k[c] * k_j[c] * decay;
        qk += 0.25 * q[c] * k_j[c] * decay;
      }
      ASSERT_NEAR(tiles.M[i][j], qk, tolerance) << what << " M " << i << ", " << j;
      if (j < i) L[i][j] = static_cast<float>(x.beta(start + i) * kk);
    }
  }
  const std::vector<double> T = exact_inverse(L, beta.data());
  for (int i = 0; i < kChunk * kChunk; ++i) {
    ASSERT_NEAR(tiles.T[i / kChunk][i % kChunk], T[i], 3e-6) << what;
  }
  for (int c = 0; c < kHeadDim; ++c) ASSERT_NEAR(tiles.d[c], std::exp2(last[c]), tolerance) << what;
}

TEST(Prepare, TilesOfFullAndPartialChunks) {
  const auto tiles = std::make_unique<ChunkTiles>();
  const auto scratch = std::make_unique<PrepareScratch>();
  // Whatever scratch held before, of another sequence for one, must not matter.
  std::fill_n(reinterpret_cast<float*>(tiles.get()), sizeof(ChunkTiles) / sizeof(float), NAN);
  std::fill_n(reinterpret_cast<float*>(scratch.get()), sizeof(PrepareScratch) / sizeof(float), NAN);
  for (const GateCase& gates : kGateCases) {
    for (int tokens : {1, 16, 17, 40, 64}) {
      const OneHead x(kChunk + tokens, gates.mean, gates.spread, gates.bound, 7);
      for (int chunk : {0, 1}) {
        prepare(x.head(), chunk, tiles.get(), scratch.get());
        expect_tiles(x, chunk, *tiles,
                     std::string(gates.name) + ", " + std::to_string(tokens) + " tokens");
      }
    }
  }
}

TEST(Recurrence, StateThroughBothLayouts) {
  std::vector<float> initial(kHeadDim * kHeadDim), final(initial.size());
  for (size_t i = 0; i < initial.size(); ++i) initial[i] = static_cast<float>(i);
  OneHead x(1, 0.0F, 1.0F, -5.0F, 1);
  Head head = x.head();
  head.initial_state = initial.data();
  head.initial_dtype = DType::kFloat32;
  head.final_state = final.data();
  head.final_dtype = DType::kFloat32;
  const auto state = std::make_unique<State>();
  for (int slice = 0; slice < kSlices; ++slice) {
    load_state(head, slice, &state->slices[slice]);
    for (int k = 0; k < kHeadDim; ++k) {
      for (int v = 0; v < kSlice; ++v) {
        ASSERT_EQ(state->slices[slice][k][v], (slice * kSlice + v) * kHeadDim + k);
      }
    }
    store_state(head, slice, state->slices[slice]);
  }
  EXPECT_EQ(initial, final);
}

}  // namespace
}  // namespace flash_kda::cpu::steps_test
