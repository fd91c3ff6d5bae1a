#include "ops/forward/validate.h"

#include <array>
#include <limits>
#include <sstream>
#include <string>

#include "common/describe.h"
#include "ops/forward/sequences.h"
#include "ops/forward/spec.h"

namespace flash_kda {
namespace {

// On CUDA rows and states are read 16 bytes at a time.
constexpr int64_t kRowAlignmentBytes = 16;
constexpr int64_t kRowAlignmentElements = kRowAlignmentBytes / 2;

struct Named {
  const char* name;
  const TensorRef* tensor;
};

// Every argument: the inputs, then what is written.
constexpr size_t kInputs = 9, kOutputs = 3;
std::array<Named, kInputs + kOutputs> all_arguments(const ForwardArgs& args) {
  return {{{"q", &args.q},
           {"k", &args.k},
           {"v", &args.v},
           {"g", &args.g},
           {"beta", &args.beta},
           {"A_log", &args.A_log},
           {"dt_bias", &args.dt_bias},
           {"initial_state", &args.initial_state},
           {"cu_seqlens", &args.cu_seqlens},
           {"out", &args.out},
           {"final_state", &args.final_state},
           {"workspace", &args.workspace}}};
}

std::string message(const char* name, const std::string& expected, const std::string& got) {
  return std::string(name) + ": expected " + expected + ", got " + got;
}

// A TensorRef has no room for more axes: nothing may look at them.
Status check_ranks(const ForwardArgs& args) {
  for (const Named& argument : all_arguments(args)) {
    if (argument.tensor->rank <= kMaxRank) continue;
    return Status::invalid_value(message(argument.name,
                                         "at most " + std::to_string(kMaxRank) + " axes",
                                         std::to_string(argument.tensor->rank)));
  }
  return {};
}

Status check_given(const Named& argument) {
  if (argument.tensor->given()) return {};
  return Status::invalid_type(message(argument.name, "a tensor", "none"));
}

Status check_dtype(const Named& argument, std::initializer_list<DType> allowed) {
  std::string expected;
  for (DType dtype : allowed) {
    if (argument.tensor->dtype == dtype) return {};
    if (!expected.empty()) expected += " or ";
    expected += dtype_name(dtype);
  }
  return Status::invalid_type(
      message(argument.name, "dtype " + expected, dtype_name(argument.tensor->dtype)));
}

// `symbols` names the axes in the message, e.g. "[B, T, H, 128]".
Status check_shape(const Named& argument, const char* symbols,
                   std::initializer_list<int64_t> expected) {
  const TensorRef& tensor = *argument.tensor;
  bool same = tensor.rank == static_cast<int32_t>(expected.size());
  int axis = 0;
  for (int64_t extent : expected) same = same && tensor.shape[axis++] == extent;
  if (same) return {};
  return Status::invalid_value(message(
      argument.name,
      "shape " + std::string(symbols) + " = " + shape_text(expected.begin(), expected.size()),
      shape_text(tensor)));
}

Status check_device(const Named& argument, Device device) {
  if (argument.tensor->device == device) return {};
  return Status::invalid_value(message(argument.name, "device " + device_text(device) + " as q",
                                       device_text(argument.tensor->device)));
}

bool is_dense(const TensorRef& tensor) {
  int64_t expected = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] == 0) return true;
    if (tensor.shape[axis] != 1 && tensor.stride[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

Status check_dense(const Named& argument) {
  if (is_dense(*argument.tensor)) return {};
  return Status::invalid_value(message(
      argument.name, "a contiguous tensor",
      "strides " + stride_text(*argument.tensor) + " for shape " + shape_text(*argument.tensor)));
}

int64_t element_count(const TensorRef& tensor) {
  int64_t count = 1;
  for (int axis = 0; axis < tensor.rank; ++axis) count *= tensor.shape[axis];
  return count;
}

Status check_memory(const Named& argument) {
  const TensorRef& tensor = *argument.tensor;
  if (!tensor.given() || tensor.data != nullptr || element_count(tensor) == 0) return {};
  return Status::invalid_value(
      message(argument.name, "memory for shape " + shape_text(tensor), "a null pointer"));
}

// q, k, v, g or out: [B, T, H, 128] with dense [H, 128].
Status check_rows(const Named& argument, const ForwardProblem& p, Rows* rows) {
  FLASH_KDA_RETURN_IF_ERROR(check_given(argument));
  FLASH_KDA_RETURN_IF_ERROR(check_dtype(argument, {DType::kBFloat16}));
  FLASH_KDA_RETURN_IF_ERROR(
      check_shape(argument, "[B, T, H, 128]", {p.batch, p.tokens, p.heads, kHeadDim}));
  FLASH_KDA_RETURN_IF_ERROR(check_device(argument, p.device));
  const TensorRef& tensor = *argument.tensor;
  *rows = {tensor.data, tensor.stride[0], tensor.stride[1]};
  if (element_count(tensor) == 0) return {};
  const bool dense = tensor.stride[3] == 1 && (p.heads == 1 || tensor.stride[2] == kHeadDim);
  if (!dense) {
    return Status::invalid_value(message(
        argument.name, "dense [H, 128] in each token (strides 128 and 1 on the last two axes)",
        "strides " + stride_text(tensor)));
  }
  // Strides of axes of extent 1 say nothing.
  if (p.batch == 1) rows->batch_stride = 0;
  if (p.tokens == 1) rows->token_stride = 0;
  if (p.device.type != DeviceType::kCuda) return {};
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % kRowAlignmentBytes == 0 &&
                       rows->batch_stride % kRowAlignmentElements == 0 &&
                       rows->token_stride % kRowAlignmentElements == 0;
  if (aligned) return {};
  std::ostringstream got;
  got << "address " << tensor.data << ", strides " << stride_text(tensor);
  return Status::invalid_value(message(
      argument.name, "data aligned to 16 bytes and strides that are multiples of 8", got.str()));
}

// Rows that are written must not share memory with each other.
Status check_rows_apart(const TensorRef& out, const ForwardProblem& p) {
  const int64_t row = p.heads * kHeadDim;
  const int64_t token_stride = p.tokens > 1 ? out.stride[1] : row;
  const bool tokens_apart = token_stride >= row;
  const bool batches_apart = p.batch <= 1 || out.stride[0] >= (p.tokens - 1) * token_stride + row ||
                             (out.stride[0] >= row && token_stride >= p.batch * out.stride[0]);
  if (p.tokens == 0 || (tokens_apart && batches_apart)) return {};
  return Status::invalid_value(
      message("out", "rows of " + std::to_string(row) + " elements that do not overlap",
              "strides " + stride_text(out)));
}

Status check_beta(const Named& argument, ForwardProblem* p) {
  FLASH_KDA_RETURN_IF_ERROR(check_given(argument));
  FLASH_KDA_RETURN_IF_ERROR(check_dtype(argument, {DType::kBFloat16, DType::kFloat32}));
  FLASH_KDA_RETURN_IF_ERROR(check_shape(argument, "[B, T, H]", {p->batch, p->tokens, p->heads}));
  FLASH_KDA_RETURN_IF_ERROR(check_device(argument, p->device));
  const TensorRef& beta = *argument.tensor;
  p->beta = {beta.data, beta.dtype, beta.stride[0], beta.stride[1], beta.stride[2]};
  return {};
}

// A_log and dt_bias: any shape of `count` elements whose axes multiply out as `symbols` says.
Status check_parameter(const Named& argument, const char* symbols, int64_t count, bool legal_shape,
                       const ForwardProblem& p, Dense* parameter) {
  if (!argument.tensor->given()) return {};
  FLASH_KDA_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32, DType::kBFloat16}));
  if (!legal_shape || element_count(*argument.tensor) != count) {
    return Status::invalid_value(message(
        argument.name, "shape " + std::string(symbols) + " with H = " + std::to_string(p.heads),
        shape_text(*argument.tensor)));
  }
  FLASH_KDA_RETURN_IF_ERROR(check_device(argument, p.device));
  FLASH_KDA_RETURN_IF_ERROR(check_dense(argument));
  *parameter = {argument.tensor->data, argument.tensor->dtype};
  return {};
}

Status check_parameters(const ForwardArgs& args, ForwardProblem* p) {
  const TensorRef& a = args.A_log;
  int wide_axes = 0;  // [H] may come with axes of extent 1 around it
  for (int axis = 0; axis < a.rank; ++axis) wide_axes += a.shape[axis] != 1 ? 1 : 0;
  FLASH_KDA_RETURN_IF_ERROR(
      check_parameter({"A_log", &a}, "[H]", p->heads, wide_axes <= 1, *p, &p->A_log));
  const TensorRef& bias = args.dt_bias;
  const bool two_axes = bias.rank == 2 && bias.shape[1] == kHeadDim;
  return check_parameter({"dt_bias", &bias}, "[H, 128] or [H * 128]", p->heads * kHeadDim,
                         bias.rank == 1 || two_axes, *p, &p->dt_bias);
}

Status check_cu_seqlens(const TensorRef& cu_seqlens, ForwardProblem* p) {
  if (!cu_seqlens.given()) {
    p->sequences = p->batch;
    return {};
  }
  const Named argument = {"cu_seqlens", &cu_seqlens};
  FLASH_KDA_RETURN_IF_ERROR(check_dtype(argument, {DType::kInt64, DType::kInt32}));
  if (cu_seqlens.rank != 1 || cu_seqlens.shape[0] < 1) {
    return Status::invalid_value(message("cu_seqlens", "shape [N + 1]", shape_text(cu_seqlens)));
  }
  FLASH_KDA_RETURN_IF_ERROR(check_device(argument, p->device));
  FLASH_KDA_RETURN_IF_ERROR(check_dense(argument));
  if (p->batch != 1) {
    return Status::invalid_value(message("cu_seqlens", "B = 1 (all sequences packed along T)",
                                         "B = " + std::to_string(p->batch)));
  }
  p->sequences = cu_seqlens.shape[0] - 1;
  p->cu_seqlens = {cu_seqlens.data, cu_seqlens.dtype};
  if (p->device.type != DeviceType::kCpu) return {};
  FLASH_KDA_RETURN_IF_ERROR(check_memory(argument));
  return check_offsets(*p);
}

Status check_state(const Named& argument, const ForwardProblem& p, Dense* state) {
  if (!argument.tensor->given()) return {};
  FLASH_KDA_RETURN_IF_ERROR(check_dtype(argument, {DType::kFloat32, DType::kBFloat16}));
  FLASH_KDA_RETURN_IF_ERROR(
      check_shape(argument, "[N, H, V, K]", {p.sequences, p.heads, kHeadDim, kHeadDim}));
  FLASH_KDA_RETURN_IF_ERROR(check_device(argument, p.device));
  FLASH_KDA_RETURN_IF_ERROR(check_dense(argument));
  if (p.device.type == DeviceType::kCuda &&
      reinterpret_cast<uintptr_t>(argument.tensor->data) % kRowAlignmentBytes != 0) {
    std::ostringstream got;
    got << "address " << argument.tensor->data;
    return Status::invalid_value(message(argument.name, "data aligned to 16 bytes", got.str()));
  }
  *state = {argument.tensor->data, argument.tensor->dtype};
  return {};
}

Status check_number(const char* name, double value, double low, double high, const char* expected) {
  if (value >= low && value <= high) return {};  // false for NaN
  std::ostringstream got;
  got << value;
  return Status::invalid_value(message(name, expected, got.str()));
}

// The bytes that an argument spans; none where it has no memory, as planning may have it.
struct Footprint {
  uintptr_t begin = 0, end = 0;  // [begin, end)
  bool dense = true;
};

Footprint footprint(const TensorRef& tensor) {
  if (!tensor.given() || tensor.data == nullptr || element_count(tensor) == 0) return {};
  int64_t low = 0, high = 1;  // in elements
  for (int axis = 0; axis < tensor.rank; ++axis) {
    const int64_t reach = (tensor.shape[axis] - 1) * tensor.stride[axis];
    (reach < 0 ? low : high) += reach;
  }
  const auto base = reinterpret_cast<intptr_t>(tensor.data);
  const int64_t size = dtype_size(tensor.dtype);
  return {static_cast<uintptr_t>(base + low * size), static_cast<uintptr_t>(base + high * size),
          is_dense(tensor)};
}

// Two strided views may interleave in one buffer without sharing an element; they pass.
bool overlap(const Footprint& a, const Footprint& b) {
  return (a.dense || b.dense) && a.begin < b.end && b.begin < a.end;
}

// What is written must be neither something that is still to be read nor written twice.
Status check_overlaps(const ForwardArgs& args) {
  const auto all = all_arguments(args);
  std::array<Footprint, kInputs + kOutputs> footprints;
  for (size_t i = 0; i < all.size(); ++i) footprints[i] = footprint(*all[i].tensor);
  const TensorRef &before = args.initial_state, &after = args.final_state;
  const bool state_in_place = before.data == after.data && before.dtype == after.dtype;
  for (size_t output = kInputs; output < all.size(); ++output) {
    for (size_t other = 0; other < output; ++other) {
      if (!overlap(footprints[output], footprints[other])) continue;
      const bool states = all[output].tensor == &after && all[other].tensor == &before;
      if (states && state_in_place) continue;
      return Status::invalid_value(message(all[output].name, "memory of its own",
                                           std::string("memory that overlaps ") + all[other].name));
    }
  }
  return {};
}

Status check_workspace(const TensorRef& workspace, const ForwardProblem& p) {
  if (!workspace.given()) return {};
  const Named argument = {"workspace", &workspace};
  FLASH_KDA_RETURN_IF_ERROR(check_dtype(argument, {DType::kUInt8}));
  if (workspace.rank != 1) {
    return Status::invalid_value(message("workspace", "shape [bytes]", shape_text(workspace)));
  }
  FLASH_KDA_RETURN_IF_ERROR(check_device(argument, p.device));
  return check_dense(argument);
}

}  // namespace

Status check_offsets(const ForwardProblem& p) {
  int64_t previous = 0;
  for (int64_t n = 0; n <= p.sequences; ++n) {
    const int64_t offset = cu_seqlens_at(p.cu_seqlens, n);
    const std::string entry = "cu_seqlens[" + std::to_string(n) + "] = " + std::to_string(offset);
    if (n == 0 && offset != 0) {
      return Status::invalid_value(message("cu_seqlens", "offsets that start at 0", entry));
    }
    if (offset < previous) {
      return Status::invalid_value(message("cu_seqlens", "offsets that never decrease",
                                           entry + " after " + std::to_string(previous)));
    }
    if (offset > p.tokens) {
      return Status::invalid_value(
          message("cu_seqlens", "offsets up to T = " + std::to_string(p.tokens), entry));
    }
    previous = offset;
  }
  return {};
}

Status check_memory(const ForwardArgs& args) {
  for (const Named& argument : all_arguments(args)) {
    FLASH_KDA_RETURN_IF_ERROR(check_memory(argument));
  }
  return {};
}

Status validate(const ForwardArgs& args, ForwardProblem* problem) {
  ForwardProblem p;
  FLASH_KDA_RETURN_IF_ERROR(check_ranks(args));
  FLASH_KDA_RETURN_IF_ERROR(check_given({"q", &args.q}));
  if (args.q.rank != 4) {
    return Status::invalid_value(message("q", "shape [B, T, H, 128]", shape_text(args.q)));
  }
  p.batch = args.q.shape[0];
  p.tokens = args.q.shape[1];
  p.heads = args.q.shape[2];
  p.device = args.q.device;
  p.stream = args.stream;
  if (p.batch < 0 || p.tokens < 0 || p.heads < 0) {
    return Status::invalid_value(message("q", "extents of at least 0", shape_text(args.q)));
  }
  if (p.device.type != DeviceType::kCpu && p.device.type != DeviceType::kCuda) {
    return Status::invalid_value(message("q", "a tensor on device cpu or cuda", "another device"));
  }
  FLASH_KDA_RETURN_IF_ERROR(check_rows({"q", &args.q}, p, &p.q));
  FLASH_KDA_RETURN_IF_ERROR(check_rows({"k", &args.k}, p, &p.k));
  FLASH_KDA_RETURN_IF_ERROR(check_rows({"v", &args.v}, p, &p.v));
  FLASH_KDA_RETURN_IF_ERROR(check_rows({"g", &args.g}, p, &p.g));
  FLASH_KDA_RETURN_IF_ERROR(check_beta({"beta", &args.beta}, &p));
  FLASH_KDA_RETURN_IF_ERROR(check_rows({"out", &args.out}, p, &p.out));
  FLASH_KDA_RETURN_IF_ERROR(check_rows_apart(args.out, p));
  FLASH_KDA_RETURN_IF_ERROR(check_parameters(args, &p));
  FLASH_KDA_RETURN_IF_ERROR(check_cu_seqlens(args.cu_seqlens, &p));
  FLASH_KDA_RETURN_IF_ERROR(
      check_state({"initial_state", &args.initial_state}, p, &p.initial_state));
  FLASH_KDA_RETURN_IF_ERROR(check_state({"final_state", &args.final_state}, p, &p.final_state));
  constexpr double kMaxFloat = std::numeric_limits<float>::max();
  FLASH_KDA_RETURN_IF_ERROR(
      check_number("scale", args.scale, -kMaxFloat, kMaxFloat, "a finite number"));
  FLASH_KDA_RETURN_IF_ERROR(
      check_number("lower_bound", args.lower_bound, kMinLowerBound, 0.0, "a number in [-5, 0]"));
  p.scale = static_cast<float>(args.scale);
  p.lower_bound = static_cast<float>(args.lower_bound);
  FLASH_KDA_RETURN_IF_ERROR(check_workspace(args.workspace, p));
  FLASH_KDA_RETURN_IF_ERROR(check_overlaps(args));
  *problem = p;
  return {};
}

}  // namespace flash_kda
