// The torch operator flash_kda::fwd, on torch's stable ABI: built against any torch >= 2.10, it
// loads in 2.10 and newer. The only file that includes torch headers. It includes no CUDA headers
// and links no CUDA library, so that one binary serves CPU-only builds of torch too.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "flash_kda/flash_kda.h"

namespace {

using torch::stable::Tensor;

// Beside the numbers of flash_kda::StatusCode: becomes torch.OutOfMemoryError.
constexpr int kOutOfMemory = 5;

// Torch makes a RuntimeError of whatever is thrown here. The code in front lets
// python/flash_kda/_errors.py raise the exception of the right type instead.
[[noreturn]] void throw_coded(int code, const std::string& message) {
  throw std::runtime_error("[flash_kda:" + std::to_string(code) + "] " + message);
}

void throw_if_error(const flash_kda::Status& status) {
  if (!status.ok()) throw_coded(static_cast<int>(status.code()), status.message());
}

flash_kda::DType to_dtype(const Tensor& tensor) {
  static const struct {
    int32_t torch_dtype;
    flash_kda::DType dtype;
  } kTable[] = {{aoti_torch_dtype_bfloat16(), flash_kda::DType::kBFloat16},
                {aoti_torch_dtype_float32(), flash_kda::DType::kFloat32},
                {aoti_torch_dtype_int64(), flash_kda::DType::kInt64},
                {aoti_torch_dtype_int32(), flash_kda::DType::kInt32},
                {aoti_torch_dtype_uint8(), flash_kda::DType::kUInt8},
                {aoti_torch_dtype_float16(), flash_kda::DType::kFloat16},
                {aoti_torch_dtype_float64(), flash_kda::DType::kFloat64}};
  int32_t torch_dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &torch_dtype));
  for (const auto& row : kTable) {
    if (row.torch_dtype == torch_dtype) return row.dtype;
  }
  return flash_kda::DType::kOther;
}

flash_kda::Device to_device(const Tensor& tensor) {
  static const int32_t kCpu = aoti_torch_device_type_cpu();
  static const int32_t kCuda = aoti_torch_device_type_cuda();
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  if (type == kCpu) return {flash_kda::DeviceType::kCpu, 0};
  const auto device_type =
      type == kCuda ? flash_kda::DeviceType::kCuda : flash_kda::DeviceType::kOther;
  return {device_type, tensor.get_device_index()};
}

flash_kda::TensorRef to_ref(const char* name, const Tensor& tensor) {
  flash_kda::TensorRef ref;
  const int64_t rank = tensor.dim();
  if (rank > flash_kda::kMaxRank) {
    throw_if_error(flash_kda::Status::invalid_value(std::string(name) + ": expected at most " +
                                                    std::to_string(flash_kda::kMaxRank) +
                                                    " axes, got " + std::to_string(rank)));
  }
  ref.data = tensor.data_ptr();
  ref.dtype = to_dtype(tensor);
  ref.rank = static_cast<int32_t>(rank);
  std::copy_n(tensor.sizes().data(), rank, ref.shape);
  std::copy_n(tensor.strides().data(), rank, ref.stride);
  ref.device = to_device(tensor);
  return ref;
}

flash_kda::TensorRef to_ref(const char* name, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? to_ref(name, *tensor) : flash_kda::TensorRef();
}

// Torch's current stream of a CUDA device. The function lives in libtorch_cuda, which is loaded
// already when there is a CUDA tensor.
void* current_stream(int32_t device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol =
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  if (get_stream == nullptr || get_stream(device, &stream) != TORCH_SUCCESS) {
    throw_if_error(
        flash_kda::Status::runtime("the current CUDA stream: not to be had from this torch"));
  }
  return stream;
}

// From torch's allocator, which hands the memory on in the order of the stream: it may be given
// back while the kernels that use it are queued.
Tensor allocate_workspace(int64_t bytes, const Tensor& like) {
  int32_t device_type = 0, device_index = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), device_type,
                               device_index, &handle) != TORCH_SUCCESS) {
    throw_coded(kOutOfMemory,
                "workspace: torch could not allocate " + std::to_string(bytes) + " bytes");
  }
  return Tensor(handle);
}

void fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
         double scale, const Tensor& out, const std::optional<Tensor>& workspace,
         const std::optional<Tensor>& A_log, const std::optional<Tensor>& dt_bias,
         double lower_bound, const std::optional<Tensor>& initial_state,
         const std::optional<Tensor>& final_state, const std::optional<Tensor>& cu_seqlens) {
  flash_kda::ForwardArgs args;
  args.q = to_ref("q", q);
  args.k = to_ref("k", k);
  args.v = to_ref("v", v);
  args.g = to_ref("g", g);
  args.beta = to_ref("beta", beta);
  args.out = to_ref("out", out);
  args.A_log = to_ref("A_log", A_log);
  args.dt_bias = to_ref("dt_bias", dt_bias);
  args.initial_state = to_ref("initial_state", initial_state);
  args.final_state = to_ref("final_state", final_state);
  args.cu_seqlens = to_ref("cu_seqlens", cu_seqlens);
  args.workspace = to_ref("workspace", workspace);
  args.scale = scale;
  args.lower_bound = lower_bound;
  if (args.q.device.type == flash_kda::DeviceType::kCuda) {
    args.stream = current_stream(args.q.device.index);
  }

  std::optional<Tensor> allocated;
  if (!workspace.has_value()) {
    flash_kda::ForwardPlan plan;
    throw_if_error(flash_kda::plan_forward(args, &plan));
    if (plan.workspace_bytes > 0) {
      allocated = allocate_workspace(plan.workspace_bytes, q);
      args.workspace = to_ref("workspace", *allocated);
    }
  }
  throw_if_error(flash_kda::forward(args));
}

}  // namespace

// python/flash_kda/_operator.py has the same schema for the route without this file.
STABLE_TORCH_LIBRARY(flash_kda, library) {
  library.def(
      "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
      "Tensor(c!)? workspace, Tensor? A_log, Tensor? dt_bias, float lower_bound, "
      "Tensor? initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flash_kda, CPU, library) { library.impl("fwd", TORCH_BOX(&fwd)); }

STABLE_TORCH_LIBRARY_IMPL(flash_kda, CUDA, library) { library.impl("fwd", TORCH_BOX(&fwd)); }
