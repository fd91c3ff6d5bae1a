// Chooses the first implementation in the list that accepts a problem, or the forced one.
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "common/workspace.h"
#include "flash_kda/backends.h"
#include "ops/forward/impls.h"
#include "ops/forward/validate.h"

namespace flash_kda {
namespace {

std::string_view forced_name() {
  const char* name = std::getenv(kForceEnv);
  return name == nullptr ? std::string_view() : std::string_view(name);
}

Status check_forced(std::string_view forced) {
  if (forced.empty()) return {};
  std::string known;
  for (const ForwardImpl* impl : forward_impls()) {
    if (forced == impl->name) return {};
    known += (known.empty() ? "" : ", ") + std::string(impl->name);
  }
  return Status::invalid_value(std::string(kForceEnv) + ": expected one of " + known + ", got " +
                               std::string(forced));
}

Status accepts(const ForwardImpl& impl, const ForwardProblem& problem, std::string_view forced) {
  if (!forced.empty() && forced != impl.name) {
    return Status::unsupported(std::string(kForceEnv) + " forces " + std::string(forced));
  }
  FLASH_KDA_RETURN_IF_ERROR(impl.accepts(problem));
  if (forced == impl.name || impl.prefers == nullptr) return {};
  return impl.prefers(problem);
}

std::string reasons(const ForwardProblem& problem, std::string_view forced) {
  std::string text;
  for (const ForwardImpl* impl : forward_impls()) {
    text += std::string("\n  ") + impl->name + ": " + accepts(*impl, problem, forced).message();
  }
  return text;
}

Status choose(const ForwardProblem& problem, const ForwardImpl** chosen) {
  const std::string_view forced = forced_name();
  FLASH_KDA_RETURN_IF_ERROR(check_forced(forced));
  for (const ForwardImpl* impl : forward_impls()) {
    if (!forced.empty() && forced != impl->name) continue;
    if (!accepts(*impl, problem, forced).ok()) continue;
    *chosen = impl;
    return {};
  }
  return Status::unsupported("no implementation accepts this call:" + reasons(problem, forced));
}

int64_t workspace_bytes(const ForwardImpl& impl, const ForwardProblem& problem) {
  return impl.workspace_bytes(problem.tokens_total(), problem.heads, problem.sequences);
}

Status check_workspace(const TensorRef& workspace, int64_t needed, const ForwardProblem& problem) {
  const int64_t given = workspace.given() ? workspace.shape[0] : 0;
  if (given < needed) {
    return Status::invalid_value("workspace: expected at least " + std::to_string(needed) +
                                 " bytes, got " + std::to_string(given));
  }
  constexpr auto kAlignment = static_cast<uintptr_t>(WorkspaceLedger::kAlignment);
  const uintptr_t past = reinterpret_cast<uintptr_t>(workspace.data) % kAlignment;
  if (needed > 0 && problem.device.type == DeviceType::kCuda && past != 0) {
    return Status::invalid_value("workspace: expected data aligned to " +
                                 std::to_string(kAlignment) + " bytes, got an address " +
                                 std::to_string(past) + " bytes past such a boundary");
  }
  return {};
}

}  // namespace

Status plan_forward(const ForwardArgs& args, ForwardPlan* plan) {
  ForwardProblem problem;
  FLASH_KDA_RETURN_IF_ERROR(validate(args, &problem));
  const ForwardImpl* impl = nullptr;
  FLASH_KDA_RETURN_IF_ERROR(choose(problem, &impl));
  *plan = {impl->name, workspace_bytes(*impl, problem)};
  return {};
}

Status forward(const ForwardArgs& args) {
  ForwardProblem problem;
  FLASH_KDA_RETURN_IF_ERROR(validate(args, &problem));
  FLASH_KDA_RETURN_IF_ERROR(check_memory(args));
  const ForwardImpl* impl = nullptr;
  FLASH_KDA_RETURN_IF_ERROR(choose(problem, &impl));
  const int64_t needed = workspace_bytes(*impl, problem);
  FLASH_KDA_RETURN_IF_ERROR(check_workspace(args.workspace, needed, problem));
  if (problem.sequences == 0 || problem.heads == 0) return {};
  return impl->run(problem, args.workspace.data, needed);
}

Status explain(const ForwardArgs& args, std::vector<Verdict>* verdicts) {
  ForwardProblem problem;
  Status legal = validate(args, &problem);
  const std::string_view forced = forced_name();
  if (legal.ok()) legal = check_forced(forced);
  verdicts->clear();
  for (const ForwardImpl* impl : forward_impls()) {
    const Status verdict = legal.ok() ? accepts(*impl, problem, forced) : legal;
    verdicts->push_back({impl->name, verdict.ok(), verdict.message()});
  }
  return legal;
}

int64_t workspace_size(int64_t tokens_total, int64_t heads, int64_t sequences) {
  for (int64_t* extent : {&tokens_total, &heads, &sequences}) {
    *extent = std::max<int64_t>(*extent, 0);  // implementations count on it
  }
  int64_t most = 0;
  for (const ForwardImpl* impl : forward_impls()) {
    most = std::max(most, impl->workspace_bytes(tokens_total, heads, sequences));
  }
  return most;
}

std::vector<std::string> implementation_names() {
  std::vector<std::string> names;
  for (const ForwardImpl* impl : forward_impls()) names.emplace_back(impl->name);
  return names;
}

std::vector<std::string> built_cuda_archs() {
  std::vector<std::string> archs;
  std::string_view list = FLASH_KDA_BUILT_ARCHS;  // "80,90a", set by the build
  while (!list.empty()) {
    const size_t end = std::min(list.find(','), list.size());
    archs.emplace_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return archs;
}

const char* version() { return FLASH_KDA_VERSION; }

}  // namespace flash_kda
