// cuda.sm90: what it can run, and the way from a problem to its kernel.
#include <algorithm>
#include <string>

#include "common/describe.h"
#include "cuda/common/call_scope.h"
#include "cuda/common/device.h"
#include "cuda/sm90/forward/config.h"
#include "cuda/sm90/forward/cost.h"
#include "cuda/sm90/forward/kernel.h"
#include "cuda/sm90_split/forward/cost.h"
#include "cuda/sm90_split/forward/layout.h"
#include "ops/forward/impls.h"

namespace flash_kda::cuda::sm90 {
namespace {

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
  work.fusable =
      work.chunks <= sm90_split::most_window_slots(problem.heads, sm90_split::kRecordBudget);
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
  return check_params(problem);
}

int64_t workspace_bytes(int64_t, int64_t, int64_t) { return 0; }

Status run(const ForwardProblem& problem, void*, int64_t) {
  const int64_t items = problem.sequences * problem.heads;
  if (items == 0) return {};
  CallScope scope;
  FLASH_KDA_RETURN_IF_ERROR(scope.enter(problem, 0, 0));

  Params params;
  FLASH_KDA_RETURN_IF_ERROR(fill_params(problem, &params));
  const int64_t ctas = std::min<int64_t>(items, scope.device().multiprocessors);
  params.sort = problem.cu_seqlens && items > ctas && problem.sequences > 1 &&
                problem.sequences <= kMaxSorted;
  return launch_forward(params, static_cast<uint32_t>(ctas),
                        static_cast<cudaStream_t>(problem.stream));
}

}  // namespace

const ForwardImpl kForward = {"cuda.sm90", accepts, workspace_bytes, run, prefers};

}  // namespace flash_kda::cuda::sm90
