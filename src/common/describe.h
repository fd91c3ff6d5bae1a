// Tensors in words, for messages.
#pragma once

#include <string>

#include "flash_kda/types.h"

namespace flash_kda {

const char* dtype_name(DType dtype);                          // "bfloat16"
int64_t dtype_size(DType dtype);                              // bytes; 0 for kOther
std::string device_text(Device device);                       // "cuda:1"
std::string shape_text(const int64_t* extents, size_t rank);  // "[1, 64, 4, 128]"
std::string shape_text(const TensorRef& tensor);
std::string stride_text(const TensorRef& tensor);

}  // namespace flash_kda
