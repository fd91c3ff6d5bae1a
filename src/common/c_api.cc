#include "flash_kda/c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "flash_kda/flash_kda.h"

namespace {

using flash_kda::ForwardArgs;
using flash_kda::Status;
using flash_kda::TensorRef;

static_assert(FLASH_KDA_MAX_RANK == flash_kda::kMaxRank);

// Copies what fits, always with a terminating zero.
void copy_text(const std::string& text, char* target, size_t capacity) {
  if (target == nullptr || capacity == 0) return;
  const size_t length = std::min(text.size(), capacity - 1);
  std::memcpy(target, text.data(), length);
  target[length] = '\0';
}

Status to_tensor(const char* name, const flash_kda_tensor& from, TensorRef* to) {
  if (!from.given) return {};
  if (from.rank < 0 || from.rank > FLASH_KDA_MAX_RANK) {
    return Status::invalid_value(std::string(name) + ": expected 0 to " +
                                 std::to_string(FLASH_KDA_MAX_RANK) + " axes, got " +
                                 std::to_string(from.rank));
  }
  to->data = from.data;
  to->dtype = static_cast<flash_kda::DType>(from.dtype);
  to->rank = static_cast<int32_t>(from.rank);
  std::copy_n(from.shape, FLASH_KDA_MAX_RANK, to->shape);
  std::copy_n(from.stride, FLASH_KDA_MAX_RANK, to->stride);
  to->device = {static_cast<flash_kda::DeviceType>(from.device_type), from.device_index};
  return {};
}

Status check_size(const char* name, size_t given, size_t expected) {
  if (given == expected) return {};
  return Status::invalid_value(std::string(name) + ".size: expected " + std::to_string(expected) +
                               ", got " + std::to_string(given));
}

Status to_args(const flash_kda_forward_args* from, ForwardArgs* to) {
  if (from == nullptr) return Status::invalid_value("args: expected a struct, got null");
  FLASH_KDA_RETURN_IF_ERROR(check_size("args", from->size, sizeof(flash_kda_forward_args)));
  struct Pair {
    const char* name;
    const flash_kda_tensor& from;
    TensorRef& to;
  };
  const Pair pairs[] = {
      {"q", from->q, to->q},
      {"k", from->k, to->k},
      {"v", from->v, to->v},
      {"g", from->g, to->g},
      {"beta", from->beta, to->beta},
      {"out", from->out, to->out},
      {"A_log", from->A_log, to->A_log},
      {"dt_bias", from->dt_bias, to->dt_bias},
      {"initial_state", from->initial_state, to->initial_state},
      {"final_state", from->final_state, to->final_state},
      {"cu_seqlens", from->cu_seqlens, to->cu_seqlens},
      {"workspace", from->workspace, to->workspace},
  };
  for (const Pair& pair : pairs) {
    FLASH_KDA_RETURN_IF_ERROR(to_tensor(pair.name, pair.from, &pair.to));
  }
  to->scale = from->scale;
  to->lower_bound = from->lower_bound;
  to->stream = from->stream;
  return {};
}

// Runs `body`, which returns a Status, and hands its code and message out. Nothing is thrown on.
template <typename Body>
int guarded(char* message, size_t capacity, Body body) {
  Status status;
  try {
    status = body();
  } catch (const std::exception& error) {
    status = Status::runtime(error.what());
  }
  copy_text(status.message(), message, capacity);
  return static_cast<int>(status.code());
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ",") + part;
  return text;
}

std::string verdict_lines(const std::vector<flash_kda::Verdict>& verdicts) {
  std::string text;
  for (const flash_kda::Verdict& verdict : verdicts) {
    std::string reason = verdict.reason;
    std::replace(reason.begin(), reason.end(), '\n', ' ');
    text += verdict.implementation + (verdict.accepted ? "\taccepted\t" : "\trefused\t") + reason +
            "\n";
  }
  return text;
}

}  // namespace

int flash_kda_plan_forward(const flash_kda_forward_args* args, flash_kda_forward_plan* plan,
                           char* message, size_t capacity) {
  return guarded(message, capacity, [&]() -> Status {
    ForwardArgs converted;
    FLASH_KDA_RETURN_IF_ERROR(to_args(args, &converted));
    if (plan == nullptr) return Status::invalid_value("plan: expected a struct, got null");
    FLASH_KDA_RETURN_IF_ERROR(check_size("plan", plan->size, sizeof(flash_kda_forward_plan)));
    flash_kda::ForwardPlan result;
    FLASH_KDA_RETURN_IF_ERROR(flash_kda::plan_forward(converted, &result));
    plan->implementation = result.implementation;
    plan->workspace_bytes = result.workspace_bytes;
    return {};
  });
}

int flash_kda_forward(const flash_kda_forward_args* args, char* message, size_t capacity) {
  return guarded(message, capacity, [&]() -> Status {
    ForwardArgs converted;
    FLASH_KDA_RETURN_IF_ERROR(to_args(args, &converted));
    return flash_kda::forward(converted);
  });
}

int flash_kda_explain(const flash_kda_forward_args* args, char* text, size_t capacity,
                      size_t* needed) {
  std::string lines;
  const int code = guarded(nullptr, 0, [&]() -> Status {
    ForwardArgs converted;
    std::vector<flash_kda::Verdict> verdicts;
    Status status = to_args(args, &converted);
    if (status.ok()) {
      status = flash_kda::explain(converted, &verdicts);
    } else {
      for (const std::string& name : flash_kda::implementation_names()) {
        verdicts.push_back({name, false, status.message()});
      }
    }
    lines = verdict_lines(verdicts);
    return status;
  });
  copy_text(lines, text, capacity);
  if (needed != nullptr) *needed = lines.size() + 1;
  return code;
}

int64_t flash_kda_workspace_size(int64_t tokens_total, int64_t heads, int64_t sequences) {
  return flash_kda::workspace_size(tokens_total, heads, sequences);
}

int flash_kda_abi_version(void) { return FLASH_KDA_ABI_VERSION; }

const char* flash_kda_version(void) { return flash_kda::version(); }

const char* flash_kda_built_cuda_archs(void) {
  static const std::string text = join(flash_kda::built_cuda_archs());
  return text.c_str();
}

const char* flash_kda_implementation_names(void) {
  static const std::string text = join(flash_kda::implementation_names());
  return text.c_str();
}
