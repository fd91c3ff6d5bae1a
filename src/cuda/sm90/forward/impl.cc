// cuda.sm90: what it can run, and the way from a problem to its kernel.
#include <algorithm>
#include <string>

#include "common/describe.h"
#include "cuda/common/call_scope.h"
#include "cuda/common/device.h"
#include "cuda/sm90/forward/config.h"
#include "cuda/sm90/forward/cost.h"
#include "cuda/sm90/forward/kernel.h"
#include "cuda/sm90/forward/tile_map.h"
#include "cuda/sm90_split/forward/cost.h"
#include "ops/forward/impls.h"

namespace flash_kda::cuda::sm90 {
namespace {

constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;

int64_t state_bytes(const Dense& state) { return state ? dtype_size(state.dtype) * kStateSize : 0; }

// cuda.sm90_split's estimate, which leaves out the states, with them.
double split_microseconds(const ForwardProblem& problem, int64_t tokens, int64_t multiprocessors) {
  constexpr double kBytesPerMicrosecond = 4.2e6;  // of memory
  constexpr int64_t kUnbounded = int64_t{1} << 40;
  sm90_split::Work work;
  work.chunks = (tokens + kChunk - 1) / kChunk;
  work.pairs = problem.sequences * problem.heads;
  work.heads = problem.heads;
  work.most_maps = kUnbounded;
  work.multiprocessors = multiprocessors;
  const int64_t states = state_bytes(problem.initial_state) + state_bytes(problem.final_state);
  return sm90_split::total_microseconds(work) +
         static_cast<double>(work.pairs * states) / kBytesPerMicrosecond;
}

Status prefers(const ForwardProblem& problem) {
  const int64_t items = problem.sequences * problem.heads;
  if (items == 0) return {};
  const DeviceProperties* device = nullptr;
  FLASH_KDA_RETURN_IF_ERROR(device_properties(problem.device.index, &device));
  const int64_t tokens = problem.tokens_total() / problem.sequences;
  const double fused = total_microseconds(items, tokens, device->multiprocessors);
  const double split = split_microseconds(problem, tokens, device->multiprocessors);
  if (fused <= kPreferred * split) return {};
  return Status::unsupported("expected to be faster than cuda.sm90_split, got an estimate of " +
                             std::to_string(static_cast<int64_t>(fused)) + " against " +
                             std::to_string(static_cast<int64_t>(split)) + " microseconds");
}

Status accepts(const ForwardProblem& problem) {
  FLASH_KDA_RETURN_IF_ERROR(check_hopper(problem, forward_entry()));
  if (problem.tokens > kMaxCount - kChunk) {
    return Status::unsupported("tokens: expected less than 2^31, got " +
                               std::to_string(problem.tokens));
  }
  if (problem.heads > 0 && problem.sequences > kMaxCount / problem.heads) {
    return Status::unsupported("sequences * heads: expected less than 2^31, got " +
                               std::to_string(problem.sequences) + " * " +
                               std::to_string(problem.heads));
  }
  FLASH_KDA_RETURN_IF_ERROR(check_mappable("q", problem, problem.q));
  FLASH_KDA_RETURN_IF_ERROR(check_mappable("k", problem, problem.k));
  FLASH_KDA_RETURN_IF_ERROR(check_mappable("v", problem, problem.v));
  FLASH_KDA_RETURN_IF_ERROR(check_mappable("g", problem, problem.g));
  FLASH_KDA_RETURN_IF_ERROR(check_mappable("out", problem, problem.out));
  return {};
}

int64_t workspace_bytes(int64_t, int64_t, int64_t) { return 0; }

Status fill_maps(const ForwardProblem& problem, Params* params) {
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.q, &params->q));
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.k, &params->k));
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.v, &params->v));
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.g, &params->g));
  return make_tile_map(problem, problem.out, &params->out);
}

Status run(const ForwardProblem& problem, void*, int64_t) {
  const int64_t items = problem.sequences * problem.heads;
  if (items == 0) return {};
  CallScope scope;
  FLASH_KDA_RETURN_IF_ERROR(scope.enter(problem, 0, 0));

  Params params{};
  if (problem.tokens_total() > 0) FLASH_KDA_RETURN_IF_ERROR(fill_maps(problem, &params));
  params.out_rows = problem.out.data;
  params.out_batch_stride = problem.out.batch_stride;
  params.out_token_stride = problem.out.token_stride;
  params.beta = problem.beta.data;
  params.beta_batch_stride = problem.beta.batch_stride;
  params.beta_token_stride = problem.beta.token_stride;
  params.beta_head_stride = problem.beta.head_stride;
  params.A_log = problem.A_log.data;
  params.dt_bias = problem.dt_bias.data;
  params.initial_state = problem.initial_state.data;
  params.final_state = problem.final_state.data;
  params.cu_seqlens = problem.cu_seqlens.data;
  params.tokens = static_cast<int32_t>(problem.tokens);
  params.heads = static_cast<int32_t>(problem.heads);
  params.sequences = static_cast<int32_t>(problem.sequences);
  params.scale = problem.scale;
  params.lower_bound = problem.lower_bound;
  params.beta_bf16 = problem.beta.dtype == DType::kBFloat16;
  params.A_log_bf16 = problem.A_log.dtype == DType::kBFloat16;
  params.dt_bias_bf16 = problem.dt_bias.dtype == DType::kBFloat16;
  params.initial_bf16 = problem.initial_state.dtype == DType::kBFloat16;
  params.final_bf16 = problem.final_state.dtype == DType::kBFloat16;
  params.cu_seqlens_int64 = problem.cu_seqlens.dtype == DType::kInt64;

  const int64_t ctas = std::min<int64_t>(items, scope.device().multiprocessors);
  params.sort = problem.cu_seqlens && items > ctas && problem.sequences > 1 &&
                problem.sequences <= kMaxSorted;
  return launch_forward(params, static_cast<uint32_t>(ctas),
                        static_cast<cudaStream_t>(problem.stream));
}

}  // namespace

const ForwardImpl kForward = {"cuda.sm90", accepts, workspace_bytes, run, prefers};

}  // namespace flash_kda::cuda::sm90
