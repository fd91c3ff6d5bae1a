#include "common/describe.h"

namespace flash_kda {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
    case DType::kOther:
      break;
  }
  return "another dtype";
}

int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
    case DType::kUInt8:
      return 1;
    case DType::kOther:
      break;
  }
  return 0;
}

std::string device_text(Device device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return "cuda:" + std::to_string(device.index);
    case DeviceType::kOther:
      break;
  }
  return "another device";
}

std::string shape_text(const int64_t* extents, size_t rank) {
  std::string text = "[";
  for (size_t axis = 0; axis < rank; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(extents[axis]);
  }
  return text + "]";
}

std::string shape_text(const TensorRef& tensor) {
  return shape_text(tensor.shape, static_cast<size_t>(tensor.rank));
}

std::string stride_text(const TensorRef& tensor) {
  return shape_text(tensor.stride, static_cast<size_t>(tensor.rank));
}

}  // namespace flash_kda
