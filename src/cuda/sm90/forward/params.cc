// What the Hopper forward kernel can be given, and the way from a problem to its parameters.
#include "cuda/sm90/forward/params.h"

#include <string>

#include "cuda/sm90/forward/config.h"
#include "cuda/sm90/forward/kernel.h"
#include "cuda/sm90/forward/tile_map.h"

namespace flash_kda::cuda::sm90 {
namespace {

constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;

Status fill_maps(const ForwardProblem& problem, Params* params) {
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.q, &params->q));
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.k, &params->k));
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.v, &params->v));
  FLASH_KDA_RETURN_IF_ERROR(make_tile_map(problem, problem.g, &params->g));
  return make_tile_map(problem, problem.out, &params->out);
}

}  // namespace

Status check_params(const ForwardProblem& problem) {
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

Status fill_params(const ForwardProblem& problem, Params* params) {
  *params = {};
  if (problem.tokens_total() > 0) FLASH_KDA_RETURN_IF_ERROR(fill_maps(problem, params));
  params->out_rows = problem.out.data;
  params->out_batch_stride = problem.out.batch_stride;
  params->out_token_stride = problem.out.token_stride;
  params->beta = problem.beta.data;
  params->beta_batch_stride = problem.beta.batch_stride;
  params->beta_token_stride = problem.beta.token_stride;
  params->beta_head_stride = problem.beta.head_stride;
  params->A_log = problem.A_log.data;
  params->dt_bias = problem.dt_bias.data;
  params->initial_state = problem.initial_state.data;
  params->final_state = problem.final_state.data;
  params->cu_seqlens = problem.cu_seqlens.data;
  params->tokens = static_cast<int32_t>(problem.tokens);
  params->heads = static_cast<int32_t>(problem.heads);
  params->sequences = static_cast<int32_t>(problem.sequences);
  params->scale = problem.scale;
  params->lower_bound = problem.lower_bound;
  params->beta_bf16 = problem.beta.dtype == DType::kBFloat16;
  params->A_log_bf16 = problem.A_log.dtype == DType::kBFloat16;
  params->dt_bias_bf16 = problem.dt_bias.dtype == DType::kBFloat16;
  params->initial_bf16 = problem.initial_state.dtype == DType::kBFloat16;
  params->final_bf16 = problem.final_state.dtype == DType::kBFloat16;
  params->cu_seqlens_int64 = problem.cu_seqlens.dtype == DType::kInt64;
  return {};
}

}  // namespace flash_kda::cuda::sm90
