// What the CUDA devices of this machine are, asked once, and the current device as a scope.
#pragma once

#include <string>

#include "flash_kda/status.h"

namespace flash_kda::cuda {

struct DeviceProperties {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;

  int capability() const { return 10 * major + minor; }
};

// The properties of a device, kept after the first question. kUnsupported with the reason where
// there is no such device or no driver.
Status device_properties(int device, const DeviceProperties** properties);

// "NVIDIA H200 (cuda:0, compute capability 9.0)"
std::string device_text(int device, const DeviceProperties& properties);

// Whether this build holds code that the device can run: `kernel` is any __global__ function of
// the implementation. kUnsupported names the device and the architectures in the build. A yes is
// remembered.
Status check_built_for(int device, const void* kernel);

// Makes a device current, and at the end the one that was.
class DeviceGuard {
 public:
  DeviceGuard() = default;
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  Status enter(int device);

 private:
  int previous_ = -1;  // to go back to; negative: nothing to do
};

}  // namespace flash_kda::cuda
