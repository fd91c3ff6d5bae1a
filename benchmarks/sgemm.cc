#include "sgemm.h"

#include <Eigen/Core>

namespace flash_kda {

struct Sgemm::Matrices {
  Eigen::MatrixXf a, b, c;
};

Sgemm::Sgemm(int size) : matrices_(new Matrices) {
  matrices_->a = Eigen::MatrixXf::Random(size, size);
  matrices_->b = Eigen::MatrixXf::Random(size, size);
  matrices_->c = Eigen::MatrixXf::Zero(size, size);
}

Sgemm::~Sgemm() = default;

void Sgemm::run() { matrices_->c.noalias() = matrices_->a * matrices_->b; }

}  // namespace flash_kda
