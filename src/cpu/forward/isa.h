// Every step of the CPU implementation is compiled once per instruction set, into one object file
// each, and chosen when the program runs. A function with a weak symbol would be merged over those
// files by the linker, and a machine without AVX could end up in an AVX copy of it. So the steps
// live in a namespace named after the instruction set, Eigen's namespace is renamed likewise, and
// the steps use nothing of the standard library that is not always inlined.
#pragma once

// baseline, avx2 or avx512: set by the build for each object file.
#ifndef FLASH_KDA_ISA
#define FLASH_KDA_ISA baseline
#endif

#define FLASH_KDA_JOIN_(a, b) a##_##b
#define FLASH_KDA_JOIN(a, b) FLASH_KDA_JOIN_(a, b)
#define Eigen FLASH_KDA_JOIN(flash_kda_eigen, FLASH_KDA_ISA)

#define EIGEN_DONT_PARALLELIZE  // one thread owns a head
#define EIGEN_MPL2_ONLY
#include <Eigen/Core>

namespace flash_kda::cpu::FLASH_KDA_ISA {

// A row-major matrix in memory that somebody else owns; Stride is its row pitch in elements.
template <int Rows, int Columns, int Stride = Columns, class T = float>
using Matrix = Eigen::Map<Eigen::Matrix<T, Rows, Columns, Eigen::RowMajor>, Eigen::Unaligned,
                          Eigen::OuterStride<Stride>>;
template <int Rows, int Columns, int Stride = Columns, class T = float>
using ConstMatrix = Eigen::Map<const Eigen::Matrix<T, Rows, Columns, Eigen::RowMajor>,
                               Eigen::Unaligned, Eigen::OuterStride<Stride>>;

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
