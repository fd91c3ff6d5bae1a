// T = (I + L)^-1 diag(beta) of one chunk, in fp32 throughout: with nearly equal keys and beta near
// 1, any less is wrong by orders of magnitude. The 16 x 16 diagonal blocks are inverted by forward
// substitution; then neighbours are merged, 16 to 32 to 64:
//
//   [A 0]^-1   [     A^-1         0  ]
//   [B C]    = [-C^-1 B A^-1    C^-1 ]
#pragma once

#include "cpu/forward/config.h"
#include "cpu/forward/isa.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

// The diagonal block that starts at row `first`.
inline void invert_block(const float (*L)[kChunk], int first, float (*T)[kChunk]) {
  for (int i = first; i < first + kBlock; ++i) {
    float row[kBlock];
    for (int c = 0; c < kBlock; ++c) row[c] = first + c == i ? 1.0F : 0.0F;
    for (int j = first; j < i; ++j) {
      const float factor = L[i][j];
      for (int c = 0; c < kBlock; ++c) row[c] -= factor * T[j][first + c];
    }
    for (int c = 0; c < kBlock; ++c) T[i][first + c] = row[c];
  }
}

// The inverses of two neighbours of Size rows, from row `first` on, become one of 2 Size rows.
template <int Size>
inline void merge_blocks(const float (*L)[kChunk], int first, float (*T)[kChunk]) {
  const int second = first + Size;
  alignas(64) float product[Size][Size];
  Matrix<Size, Size> BA(product[0]);
  BA.noalias() = ConstMatrix<Size, Size, kChunk>(&L[second][first]) *
                 ConstMatrix<Size, Size, kChunk>(&T[first][first]);
  Matrix<Size, Size, kChunk>(&T[second][first]).noalias() =
      -ConstMatrix<Size, Size, kChunk>(&T[second][second]) * BA;
}

// Reads only what lies below L's diagonal.
inline void invert(const float (*L)[kChunk], const float* beta, float (*T)[kChunk]) {
  Matrix<kChunk, kChunk>(T[0]).setZero();
  for (int block = 0; block < kBlocks; ++block) invert_block(L, block * kBlock, T);
  for (int first = 0; first < kChunk; first += 2 * kBlock) merge_blocks<kBlock>(L, first, T);
  merge_blocks<2 * kBlock>(L, 0, T);
  for (int i = 0; i < kChunk; ++i) {
#pragma omp simd
    for (int j = 0; j < kChunk; ++j) T[i][j] *= beta[j];
  }
}

static_assert(kChunk == 4 * kBlock, "two levels of merging");

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
