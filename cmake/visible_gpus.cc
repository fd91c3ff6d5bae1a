// Prints the compute capability of each visible CUDA device, "9.0", one a line; nothing where
// there is no driver or no device. The build runs it for FLASH_KDA_CUDA_ARCHS=auto, so it asks the
// driver itself and respects CUDA_VISIBLE_DEVICES.
#include <dlfcn.h>

#include <cstdio>

int main() {
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count_devices = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  const auto attribute =
      reinterpret_cast<int (*)(int*, int, int)>(dlsym(driver, "cuDeviceGetAttribute"));
  if (init == nullptr || count_devices == nullptr || attribute == nullptr) return 0;
  int count = 0;
  if (init(0) != 0 || count_devices(&count) != 0) return 0;
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    if (attribute(&major, kMajor, device) != 0) continue;
    if (attribute(&minor, kMinor, device) != 0) continue;
    std::printf("%d.%d\n", major, minor);
  }
  return 0;
}
