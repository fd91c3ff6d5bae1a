// cuda.recurrent: sequences of a few tokens on any device of compute capability 8.0 and newer.
#include <string>

#include "cuda/common/call_scope.h"
#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "cuda/common/launch_dependent.cuh"
#include "cuda/recurrent/forward/kernel.cuh"
#include "ops/forward/impls.h"

namespace flash_kda::cuda::recurrent {
namespace {

// Up to so many tokens a sequence this loop is at the cost of its state traffic, below that of a
// chunked implementation, which handles a whole chunk for each. With cu_seqlens only the mean is
// known here; a long sequence among many empty ones is slow, not wrong.
constexpr int64_t kMaxTokens = 8;
constexpr int64_t kMaxMeanTokens = 2;

Status accepts(const ForwardProblem& p) {
  FLASH_KDA_RETURN_IF_ERROR(check_problem(p));
  if (p.cu_seqlens.data != nullptr && p.tokens > kMaxMeanTokens * p.sequences) {
    return Status::unsupported("T: expected at most " + std::to_string(kMaxMeanTokens) +
                               " tokens a sequence on average with cu_seqlens, got " +
                               std::to_string(p.tokens) +
                               " for N = " + std::to_string(p.sequences));
  }
  if (p.cu_seqlens.data == nullptr && p.tokens > kMaxTokens) {
    return Status::unsupported("T: expected at most " + std::to_string(kMaxTokens) + ", got " +
                               std::to_string(p.tokens));
  }
  return check_built_for(p.device.index, reinterpret_cast<const void*>(&flash_kda_recurrent));
}

int64_t workspace_bytes(int64_t, int64_t, int64_t) { return 0; }

Status run(const ForwardProblem& p, void*, int64_t) {
  CallScope scope;
  FLASH_KDA_RETURN_IF_ERROR(scope.enter(p, 0, 0));
  const auto blocks = static_cast<unsigned>(p.sequences * p.heads * kBlocksPerHead);
  auto* stream = static_cast<cudaStream_t>(p.stream);
  if (scope.device().capability() >= kCapabilityOfDependent) {
    return launch_dependent("flash_kda_recurrent", flash_kda_recurrent, blocks, kThreads, 0, p,
                            stream);
  }
  flash_kda_recurrent<<<blocks, kThreads, 0, stream>>>(p);
  return launch_status("flash_kda_recurrent");
}

}  // namespace

const ForwardImpl kForward = {"cuda.recurrent", accepts, workspace_bytes, run};

}  // namespace flash_kda::cuda::recurrent
