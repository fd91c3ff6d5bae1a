// A square single-precision product by Eigen, on all threads, as the measure of what this machine
// can do.
#pragma once

#include <memory>

namespace flash_kda {

class Sgemm {
 public:
  explicit Sgemm(int size);
  ~Sgemm();
  void run();  // 2 size^3 operations

 private:
  struct Matrices;
  std::unique_ptr<Matrices> matrices_;
};

}  // namespace flash_kda
