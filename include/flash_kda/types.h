// Tensor references: memory that the caller owns, described by dtype, shape, strides and device.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace flash_kda {

// The numbers are part of the C ABI. kOther stands for any dtype that no argument takes.
enum class DType : int32_t {
  kOther = 0,
  kBFloat16 = 1,
  kFloat32 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kUInt8 = 5,
  kFloat16 = 6,
  kFloat64 = 7,
};

enum class DeviceType : int32_t { kCpu = 0, kCuda = 1, kOther = 2 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;  // CUDA ordinal; 0 for the CPU

  friend bool operator==(const Device& a, const Device& b) {
    return a.type == b.type && a.index == b.index;
  }
  friend bool operator!=(const Device& a, const Device& b) { return !(a == b); }
};

inline constexpr int kMaxRank = 6;

// A tensor, or with rank < 0 (the default) an argument that was not given.
// Strides are in elements. Nothing is owned or copied.
struct TensorRef {
  void* data = nullptr;
  DType dtype = DType::kOther;
  int32_t rank = -1;
  int64_t shape[kMaxRank] = {};
  int64_t stride[kMaxRank] = {};
  Device device;

  bool given() const { return rank >= 0; }
};

// A reference to a dense row-major tensor of at most kMaxRank axes.
inline TensorRef dense_tensor(void* data, DType dtype, std::initializer_list<int64_t> shape,
                              Device device = {}) {
  TensorRef tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.device = device;
  tensor.rank = static_cast<int32_t>(shape.size());
  int axis = 0;
  for (int64_t extent : shape) tensor.shape[axis++] = extent;
  int64_t stride = 1;
  for (axis = tensor.rank - 1; axis >= 0; --axis) {
    tensor.stride[axis] = stride;
    stride *= tensor.shape[axis];
  }
  return tensor;
}

}  // namespace flash_kda
