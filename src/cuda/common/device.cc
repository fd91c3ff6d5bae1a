#include "cuda/common/device.h"

#include <array>
#include <mutex>
#include <set>
#include <utility>

#include "cuda/common/check.h"
#include "flash_kda/backends.h"

namespace flash_kda::cuda {
namespace {

constexpr int kMaxDevices = 64;

struct Entry {
  std::mutex mutex;
  bool asked = false;
  Status status;
  DeviceProperties properties;
};

Status ask_attribute(int device, cudaDeviceAttr attribute, int* value) {
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(value, attribute, device));
  return {};
}

// "13.0" of 13000; "none" of 0.
std::string version_text(int version) {
  if (version == 0) return "none";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Status no_devices(cudaError_t error) {
  (void)cudaGetLastError();  // it is reported here, not by the next launch
  std::string why = std::string("no usable CUDA driver or device: ") + cudaGetErrorString(error);
  int required = 0, found = 0;
  if (error == cudaErrorInsufficientDriver && cudaRuntimeGetVersion(&required) == cudaSuccess &&
      cudaDriverGetVersion(&found) == cudaSuccess) {
    why +=
        ": expected a driver for CUDA " + version_text(required) + ", found " + version_text(found);
  }
  return Status::unsupported(why);
}

Status ask(int device, DeviceProperties* p) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return no_devices(error);
  if (device < 0 || device >= count) {
    return Status::unsupported("device cuda:" + std::to_string(device) + ": expected one of the " +
                               std::to_string(count) + " visible devices");
  }
  FLASH_KDA_RETURN_IF_ERROR(ask_attribute(device, cudaDevAttrComputeCapabilityMajor, &p->major));
  FLASH_KDA_RETURN_IF_ERROR(ask_attribute(device, cudaDevAttrComputeCapabilityMinor, &p->minor));
  FLASH_KDA_RETURN_IF_ERROR(
      ask_attribute(device, cudaDevAttrMultiProcessorCount, &p->multiprocessors));
  cudaDeviceProp all;
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&all, device));
  p->name = all.name;
  return {};
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace

Status device_properties(int device, const DeviceProperties** properties) {
  static std::array<Entry, kMaxDevices> entries;
  if (device < 0 || device >= kMaxDevices) {
    return Status::unsupported("device cuda:" + std::to_string(device) +
                               ": expected an index below " + std::to_string(kMaxDevices));
  }
  Entry& entry = entries[static_cast<size_t>(device)];
  const std::lock_guard<std::mutex> lock(entry.mutex);
  if (!entry.asked) {
    entry.status = ask(device, &entry.properties);
    entry.asked = true;
  }
  *properties = &entry.properties;
  return entry.status;
}

std::string device_text(int device, const DeviceProperties& p) {
  return p.name + " (cuda:" + std::to_string(device) + ", compute capability " +
         std::to_string(p.major) + "." + std::to_string(p.minor) + ")";
}

Status check_built_for(int device, const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> known;  // what has been found built
  const std::lock_guard<std::mutex> lock(mutex);
  if (known.count({device, kernel}) != 0) return {};
  const DeviceProperties* properties = nullptr;
  FLASH_KDA_RETURN_IF_ERROR(device_properties(device, &properties));
  DeviceGuard guard;
  FLASH_KDA_RETURN_IF_ERROR(guard.enter(device));
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    known.insert({device, kernel});
    return {};
  }
  (void)cudaGetLastError();
  return Status::unsupported("no code for " + device_text(device, *properties) +
                             " in this build, which holds " + joined(built_cuda_archs()) + ": " +
                             cudaGetErrorString(error));
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) (void)cudaSetDevice(previous_);
}

Status DeviceGuard::enter(int device) {
  int current = 0;
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&current));
  if (current == device) return {};
  FLASH_KDA_RETURN_IF_CUDA_ERROR(cudaSetDevice(device));
  previous_ = current;
  return {};
}

}  // namespace flash_kda::cuda
