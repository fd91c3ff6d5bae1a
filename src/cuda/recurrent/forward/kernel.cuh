// The token loop of flash_kda/forward.h on CUDA cores, for sequences of a few tokens, whose cost is
// reading and writing the state once:
//
//   S <- S diag(e^gamma)       r = beta (v - S k^)       o = scale (S q^ + r (k^ . q^))
//   S <- S + r k^T
//
// One block takes kRowsPerBlock rows of the state of one (sequence, head), a warp kRowsPerWarp of
// them, in registers from the first token to the last. A lane holds 4 key channels of each row, so
// a row is one coalesced 512-byte access (256 in bf16). Both dot products of a row see the decayed
// state, so one reduction over the warp serves them: 2 x kRowsPerWarp = 32 sums, of which lane i
// ends with the i-th. No shared memory, no barrier; warps and blocks never meet.
#pragma once

#include <cuda_bf16.h>

#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/math.cuh"
#include "ops/forward/problem.h"
#include "ops/forward/spec.h"

namespace flash_kda::cuda::recurrent {

inline constexpr int kWarp = 32;
inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarp;
inline constexpr int kRowsPerWarp = 16;
inline constexpr int kRowsPerBlock = kWarps * kRowsPerWarp;
inline constexpr int kBlocksPerHead = kHeadDim / kRowsPerBlock;
inline constexpr int kChannels = kHeadDim / kWarp;  // of a lane

static_assert(2 * kRowsPerWarp == kWarp && kChannels == 4);

// This lane's channels of one vector.
struct Channels {
  float x[kChannels];
};

struct Span {
  int64_t batch, begin, end;
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ float load_parameter(const Dense& parameter, int64_t index) {
  if (parameter.data == nullptr) return 0.0F;
  return parameter.dtype == DType::kBFloat16
             ? to_float(static_cast<const __nv_bfloat16*>(parameter.data)[index])
             : static_cast<const float*>(parameter.data)[index];
}

// An offset between 0 and T, whatever cu_seqlens says.
__device__ __forceinline__ int64_t clamped_offset(const ForwardProblem& p, int64_t n) {
  const int64_t offset = p.cu_seqlens.dtype == DType::kInt32
                             ? static_cast<const int32_t*>(p.cu_seqlens.data)[n]
                             : static_cast<const int64_t*>(p.cu_seqlens.data)[n];
  return offset < 0 ? 0 : (offset > p.tokens ? p.tokens : offset);
}

__device__ __forceinline__ Span find_span(const ForwardProblem& p, int64_t sequence) {
  if (p.cu_seqlens.data == nullptr) return {sequence, 0, p.tokens};
  return {0, clamped_offset(p, sequence), clamped_offset(p, sequence + 1)};
}

__device__ __forceinline__ Channels unpack(uint2 words) {
  return {{ptx::low_bf16(words.x), ptx::high_bf16(words.x), ptx::low_bf16(words.y),
           ptx::high_bf16(words.y)}};
}

__device__ __forceinline__ int64_t row_offset(const Rows& rows, const Span& span, int64_t token,
                                              int64_t head) {
  return span.batch * rows.batch_stride + token * rows.token_stride + head * kHeadDim;
}

__device__ __forceinline__ Channels load_channels(const Rows& rows, const Span& span, int64_t token,
                                                  int64_t head) {
  const auto* row = static_cast<const __nv_bfloat16*>(rows.data) +
                    row_offset(rows, span, token, head) + lane_id() * kChannels;
  return unpack(__ldg(reinterpret_cast<const uint2*>(row)));
}

__device__ __forceinline__ float dot(const Channels& a, const Channels& b) {
  return a.x[0] * b.x[0] + a.x[1] * b.x[1] + (a.x[2] * b.x[2] + a.x[3] * b.x[3]);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffU, x, offset);
  }
  return x;
}

// One step of transposing_sum: of two lanes kHalf apart each keeps the half of x that its bit says
// and gets the other lane's share of it.
template <int kHalf>
__device__ __forceinline__ void fold(float (&x)[kWarp]) {
  const bool upper = (lane_id() & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float give = upper ? x[i] : x[i + kHalf];
    const float keep = upper ? x[i + kHalf] : x[i];
    x[i] = keep + __shfl_xor_sync(0xffffffffU, give, kHalf);
  }
}

// Sums 32 numbers over the lanes at once; lane i returns the sum of x[i].
__device__ __forceinline__ float transposing_sum(float (&x)[kWarp]) {
  fold<16>(x);
  fold<8>(x);
  fold<4>(x);
  fold<2>(x);
  fold<1>(x);
  return x[0];
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0F / (1.0F + __expf(-x)); }

// e^gamma of this lane's channels.
struct Gate {
  float rate;  // exp(A_log)
  Channels bias;
  __device__ __forceinline__ Gate(const ForwardProblem& p, int64_t head)
      : rate(expf(load_parameter(p.A_log, head))) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      bias.x[i] = load_parameter(p.dt_bias, head * kHeadDim + lane_id() * kChannels + i);
    }
  }
  __device__ __forceinline__ Channels decay(const Channels& g, float lower_bound) const {
    Channels d;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      d.x[i] = __expf(lower_bound * sigmoid(rate * (g.x[i] + bias.x[i])));
    }
    return d;
  }
};

struct StateRows {
  float s[kRowsPerWarp][kChannels];

  // `offset` of the warp's first row and this lane's first channel.
  __device__ __forceinline__ void load(const Dense& state, int64_t offset) {
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      if (state.data == nullptr) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) s[r][i] = 0.0F;
      } else if (state.dtype == DType::kBFloat16) {
        const auto* row = static_cast<const __nv_bfloat16*>(state.data) + offset + r * kHeadDim;
        const Channels row_channels = unpack(*reinterpret_cast<const uint2*>(row));
#pragma unroll
        for (int i = 0; i < kChannels; ++i) s[r][i] = row_channels.x[i];
      } else {
        const auto* row = static_cast<const float*>(state.data) + offset + r * kHeadDim;
        const float4 words = *reinterpret_cast<const float4*>(row);
        s[r][0] = words.x, s[r][1] = words.y, s[r][2] = words.z, s[r][3] = words.w;
      }
    }
  }

  __device__ __forceinline__ void store(const Dense& state, int64_t offset) const {
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      if (state.dtype == DType::kBFloat16) {
        auto* row = static_cast<__nv_bfloat16*>(state.data) + offset + r * kHeadDim;
        *reinterpret_cast<uint2*>(row) =
            make_uint2(ptx::pack_bf16(s[r][0], s[r][1]), ptx::pack_bf16(s[r][2], s[r][3]));
      } else {
        auto* row = static_cast<float*>(state.data) + offset + r * kHeadDim;
        *reinterpret_cast<float4*>(row) = make_float4(s[r][0], s[r][1], s[r][2], s[r][3]);
      }
    }
  }

  // One token. Lane i < kRowsPerWarp gives v of row i; lane kRowsPerWarp + i returns o of row i.
  __device__ __forceinline__ float step(const Channels& decay, const Channels& k_hat,
                                        const Channels& q_hat, float k_dot_q, float beta, float v,
                                        float scale) {
    float sums[kWarp];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      float recalled = 0.0F, read = 0.0F;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) {
        s[r][i] *= decay.x[i];
        recalled += s[r][i] * k_hat.x[i];
        read += s[r][i] * q_hat.x[i];
      }
      sums[r] = recalled;
      sums[kRowsPerWarp + r] = read;
    }
    const float sum = transposing_sum(sums);
    const float correction = beta * (v - sum);  // of row i in lane i < kRowsPerWarp
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const float row_correction = __shfl_sync(0xffffffffU, correction, r);
#pragma unroll
      for (int i = 0; i < kChannels; ++i) s[r][i] += row_correction * k_hat.x[i];
    }
    const float mine = __shfl_sync(0xffffffffU, correction, lane_id() % kRowsPerWarp);
    return scale * (sum + mine * k_dot_q);
  }
};

__global__ void __launch_bounds__(kThreads)
    flash_kda_recurrent(const __grid_constant__ ForwardProblem p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernels();
  const int64_t pair = blockIdx.x / kBlocksPerHead;  // sequence and head
  const int64_t sequence = pair / p.heads, head = pair % p.heads;
  const int first_row = static_cast<int>(blockIdx.x % kBlocksPerHead) * kRowsPerBlock +
                        static_cast<int>(threadIdx.x) / kWarp * kRowsPerWarp;
  const int64_t state_offset = (pair * kHeadDim + first_row) * kHeadDim + lane_id() * kChannels;
  StateRows state;
  state.load(p.initial_state, state_offset);

  const Span span = find_span(p, sequence);
  const Gate gate(p, head);
  const int value_row = first_row + lane_id() % kRowsPerWarp;
  for (int64_t t = span.begin; t < span.end; ++t) {
    const Channels q = load_channels(p.q, span, t, head), k = load_channels(p.k, span, t, head);
    const Channels decay = gate.decay(load_channels(p.g, span, t, head), p.lower_bound);
    const float v = to_float(
        static_cast<const __nv_bfloat16*>(p.v.data)[row_offset(p.v, span, t, head) + value_row]);
    const int64_t logit =
        span.batch * p.beta.batch_stride + t * p.beta.token_stride + head * p.beta.head_stride;
    const float beta =
        sigmoid(load_parameter({const_cast<void*>(p.beta.data), p.beta.dtype}, logit));

    const float q_factor = rsqrtf(warp_sum(dot(q, q)) + kNormEpsilon);
    const float k_factor = rsqrtf(warp_sum(dot(k, k)) + kNormEpsilon);
    Channels q_hat, k_hat;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      q_hat.x[i] = q.x[i] * q_factor;
      k_hat.x[i] = k.x[i] * k_factor;
    }
    const float k_dot_q = warp_sum(dot(q_hat, k_hat));
    const float o = state.step(decay, k_hat, q_hat, k_dot_q, beta, v, p.scale);
    if (lane_id() >= kRowsPerWarp) {
      static_cast<__nv_bfloat16*>(p.out.data)[row_offset(p.out, span, t, head) + value_row] =
          __float2bfloat16_rn(o);
    }
  }
  if (p.final_state.data != nullptr) state.store(p.final_state, state_offset);
}

}  // namespace flash_kda::cuda::recurrent
