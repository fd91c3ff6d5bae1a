// The workspace ledger: every buffer is booked once, which fixes its offset and its share of the
// total. Size queries and kernels go through the same bookings.
#pragma once

#include <cstdint>

namespace flash_kda {

// A booked buffer of T.
template <typename T>
struct WorkspaceBuffer {
  int64_t offset = 0;  // bytes from the start of the workspace
  int64_t count = 0;   // elements

  T* in(void* workspace) const {
    return count == 0 ? nullptr
                      : reinterpret_cast<T*>(static_cast<unsigned char*>(workspace) + offset);
  }
};

class WorkspaceLedger {
 public:
  // Buffers start at multiples of this many bytes, on CUDA the workspace itself too.
  static constexpr int64_t kAlignment = 256;

  template <typename T>
  WorkspaceBuffer<T> book(int64_t count) {
    const WorkspaceBuffer<T> buffer = {bytes_, count};
    const int64_t size = count * static_cast<int64_t>(sizeof(T));
    bytes_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return buffer;
  }

  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

}  // namespace flash_kda
