// What a chunk of 64 tokens needs that does not depend on the state.
//
// With G_i the log2 decay from the chunk's start through token i:
//
//   kd_i = k^_i 2^(G_i)              qd_i = scale q^_i 2^(G_i)
//   kr_i = k^_i 2^(G_last - G_i)     d = 2^(G_last)
//   L_ij = beta_i sum_c k^_ic k^_jc 2^(G_ic - G_jc)     (j < i)
//   M_ij = scale sum_c q^_ic k^_jc 2^(G_ic - G_jc)      (j <= i)
//   T = (I + L)^-1 diag(beta)
//
// 2^(G_i - G_j) is split at an anchor between j and i into a row factor and a column factor, both
// at most 1. The anchor of two blocks of tokens is the border between them, in three levels:
// between halves of the chunk, between the two blocks of a half, and inside a block, where it is
// the middle, rounded to a power of two, and the factors may reach 2^58. The rounding makes moving
// the anchor exact: no bit of a token's output depends on the tokens after it. The rows of k^ and
// q^ are kept side by side, so that one product gives L and M, and are moved from anchor to anchor
// in place: start of their block, start of their half, start of the chunk.
#pragma once

#include "cpu/forward/gate.h"
#include "cpu/forward/inverse.h"
#include "cpu/forward/tiles.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

// 1 / |x| as the operation has it: x times this is x^.
inline float inverse_norm(const float* x) {
  return 1.0F / __builtin_sqrtf(sum_of_squares(x) + kNormEpsilon);
}

// Multiplies `rows` rows by a decay per channel.
inline void move_anchor(float (*x)[kHeadDim], int rows, const float* decay) {
  for (int i = 0; i < rows; ++i) {
#pragma omp simd
    for (int c = 0; c < kHeadDim; ++c) x[i][c] *= decay[c];
  }
}

// Block m: rows anchored at its start, columns at its end, and both at its middle.
[[gnu::noinline]] inline void load_block(const Head& head, int64_t first, int rows, int m,
                                         ChunkTiles* tiles, PrepareScratch* scratch) {
  const BlockDecay& gate = scratch->blocks[m];
  const float* to_end = gate.decay[kBlock - 1];
  alignas(64) float to_middle[kHeadDim];
  alignas(64) float from_middle[kHeadDim];
#pragma omp simd
  for (int c = 0; c < kHeadDim; ++c) {
    const float log2_middle = gate.log2[kBlock / 2 - 1][c];
    to_middle[c] = exp2_integer(kRounder + log2_middle);
    from_middle[c] = exp2_integer(kRounder - log2_middle);
  }
  for (int i = 0; i < kBlock; ++i) {
    const int token = kBlock * m + i;
    float* k_row = tiles->rows[kd_row(token)];
    float* q_row = tiles->rows[qd_row(token)];
    float* column = scratch->columns[token];
    float* k_middle = scratch->middle_rows[i];
    float* q_middle = scratch->middle_rows[kBlock + i];
    float* column_middle = scratch->middle_columns[i];
    float* k_hat = scratch->k_hat[token];
    alignas(64) float q_hat[kHeadDim] = {};
    if (i < rows) {
      load_row(head.k.row(first + i), k_hat, kHeadDim);
      load_row(head.q.row(first + i), q_hat, kHeadDim);
    } else {  // past the sequence's end
      for (int c = 0; c < kHeadDim; ++c) k_hat[c] = 0.0F;
    }
    const float k_factor = inverse_norm(k_hat);
    const float q_factor = inverse_norm(q_hat) * head.scale;
    const float* decay = gate.decay[i];
    const float* inverse = gate.inverse[i];
#pragma omp simd
    for (int c = 0; c < kHeadDim; ++c) {
      const float k = k_hat[c] * k_factor;
      const float q = q_hat[c] * q_factor;
      const float row_middle = decay[c] * from_middle[c];
      k_hat[c] = k;
      k_row[c] = k * decay[c];
      q_row[c] = q * decay[c];
      k_middle[c] = k * row_middle;
      q_middle[c] = q * row_middle;
      column[c] = k * (inverse[c] * to_end[c]);
      column_middle[c] = k * (inverse[c] * to_middle[c]);
    }
  }
}

// kr and d, in double and straight from the sums of the gates: both are factors near 1 when the
// decay is slow, and their rounding errors would be the same in every chunk.
[[gnu::noinline]] inline void load_state_factors(const PrepareScratch& scratch, ChunkTiles* tiles) {
  alignas(64) float after[kHeadDim] = {};  // log2 decay of the blocks after m
  for (int m = kBlocks - 1; m >= 0; --m) {
    const BlockDecay& gate = scratch.blocks[m];
    const float* total = gate.log2[kBlock - 1];
    for (int i = 0; i < kBlock; ++i) {
      const float* k_hat = scratch.k_hat[kBlock * m + i];
      double* kr = tiles->kr[kBlock * m + i];
#pragma omp simd
      for (int c = 0; c < kHeadDim; ++c) {
        const float log2_rest = (total[c] - gate.log2[i][c]) + after[c];
        kr[c] = static_cast<double>(k_hat[c]) * exp2_wide(log2_rest);
      }
    }
#pragma omp simd
    for (int c = 0; c < kHeadDim; ++c) after[c] += total[c];
  }
#pragma omp simd
  for (int c = 0; c < kHeadDim; ++c) tiles->d[c] = exp2_wide(after[c]);
}

// products[i] holds k rows, then q rows, of `row_blocks` blocks from block `row` on, times the
// columns of the tokens from `column` on: the blocks of L and M they belong to.
template <int Columns>
inline void place_products(const float (*products)[Columns], int row_blocks, int row, int column,
                           ChunkTiles* tiles, PrepareScratch* scratch) {
  for (int block = 0; block < row_blocks; ++block) {
    for (int i = 0; i < kBlock; ++i) {
      const float* kk = products[2 * kBlock * block + i];
      const float* qk = products[2 * kBlock * block + kBlock + i];
      const int token = kBlock * (row + block) + i;
      const float beta = scratch->beta[token];
      float* L = &scratch->L[token][column];
      float* M = &tiles->M[token][column];
      // By selection: what lies above the diagonal may be anything.
#pragma omp simd
      for (int j = 0; j < Columns; ++j) {
        L[j] = column + j < token ? beta * kk[j] : 0.0F;
        M[j] = column + j <= token ? qk[j] : 0.0F;
      }
    }
  }
}

// L and M of the rows of Count blocks, from block `row` on, against the columns of the Count blocks
// before them.
template <int Count>
inline void multiply_blocks(int row, ChunkTiles* tiles, PrepareScratch* scratch) {
  constexpr int kRows = 2 * kBlock * Count;
  constexpr int kColumns = kBlock * Count;
  const int column = kBlock * (row - Count);
  alignas(64) float products[kRows][kColumns];
  Matrix<kRows, kColumns>(products[0]).noalias() =
      ConstMatrix<kRows, kHeadDim>(tiles->rows[2 * kBlock * row]) *
      ConstMatrix<kColumns, kHeadDim>(scratch->columns[column]).transpose();
  place_products<kColumns>(products, Count, row, column, tiles, scratch);
}

// The same of block m against itself, anchored at its middle.
inline void multiply_diagonal(int m, ChunkTiles* tiles, PrepareScratch* scratch) {
  alignas(64) float products[2 * kBlock][kBlock];
  Matrix<2 * kBlock, kBlock>(products[0]).noalias() =
      ConstMatrix<2 * kBlock, kHeadDim>(scratch->middle_rows[0]) *
      ConstMatrix<kBlock, kHeadDim>(scratch->middle_columns[0]).transpose();
  place_products<kBlock>(products, 1, m, m * kBlock, tiles, scratch);
}

// Chunk `chunk` of the head.
inline void prepare(const Head& head, int64_t chunk, ChunkTiles* tiles, PrepareScratch* scratch) {
  const int64_t start = chunk * kChunk;
  const int64_t left = head.tokens - start;
  const int tokens = left < kChunk ? static_cast<int>(left) : kChunk;
  GateParameters gate;
  load_gate(head, &gate);
  for (int i = 0; i < kChunk; ++i) {
    scratch->beta[i] = i < tokens ? beta_of(head, start + i) : 0.0F;
  }
  Matrix<kChunk, kChunk>(tiles->M[0]).setZero();

  for (int m = 0; m < kBlocks; ++m) {
    const int64_t first = start + m * kBlock;
    const int rows = tokens - m * kBlock;
    gate_block(head, gate, first, rows, &scratch->blocks[m]);
    load_block(head, first, rows, m, tiles, scratch);
    multiply_diagonal(m, tiles, scratch);
  }
  load_state_factors(*scratch, tiles);

  multiply_blocks<1>(1, tiles, scratch);
  multiply_blocks<1>(3, tiles, scratch);

  // From blocks to halves.
  const float* total[kBlocks];  // decay over each block
  for (int m = 0; m < kBlocks; ++m) total[m] = scratch->blocks[m].decay[kBlock - 1];
  move_anchor(&tiles->rows[2 * kBlock * 1], 2 * kBlock, total[0]);
  move_anchor(&tiles->rows[2 * kBlock * 3], 2 * kBlock, total[2]);
  move_anchor(&scratch->columns[0], kBlock, total[1]);
  multiply_blocks<2>(2, tiles, scratch);

  // From halves to the chunk: the rows are kd and qd now.
  alignas(64) float half[kHeadDim];
  for (int c = 0; c < kHeadDim; ++c) half[c] = total[0][c] * total[1][c];
  move_anchor(&tiles->rows[2 * kBlock * 2], 4 * kBlock, half);

  invert(scratch->L, scratch->beta, tiles->T);
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
