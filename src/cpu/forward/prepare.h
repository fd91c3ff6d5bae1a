// What a chunk of 64 tokens needs that does not depend on the state.
//
// With G_i the log2 decay from the chunk's start through token i:
//
//   kd_i = k^_i 2^(G_i)    qd_i = scale q^_i 2^(G_i)    kr_i = k^_i 2^(G_last - G_i)    d =
//   2^(G_last) L_ij = beta_i sum_c k^_ic k^_jc 2^(G_ic - G_jc)     (j < i) M_ij =  scale sum_c
//   q^_ic k^_jc 2^(G_ic - G_jc)     (j <= i) T    = (I + L)^-1 diag(beta)
//
// 2^(G_i - G_j) is split at an anchor between j and i into a row factor and a column factor, both
// at most 1. The anchor of two blocks of tokens is the border between them, in three levels:
// between halves of the chunk, between the two blocks of a half, and inside a block, where it is
// the middle and the factors may reach 2^58. The rows of k^ and q^ are kept side by side, so that
// one product gives L and M, and are moved from anchor to anchor in place: start of their block,
// start of their half, start of the chunk. The columns go the other way, to the chunk's end.
#pragma once

#include "cpu/forward/gate.h"
#include "cpu/forward/inverse.h"
#include "cpu/forward/tiles.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

// x^ = x * factor; 1 / |x| in the sense of the operation.
inline float inverse_norm(const float* x) {
  return 1.0F / __builtin_sqrtf(sum_of_squares(x) + kNormEpsilon);
}

// Multiplies `rows` rows by a decay per channel.
inline void move_anchor(float (*x)[kHeadDim], int rows, const float* __restrict decay) {
  for (int i = 0; i < rows; ++i) {
    float* __restrict row = x[i];
    for (int c = 0; c < kHeadDim; ++c) row[c] *= decay[c];
  }
}

// Block m: rows anchored at its start, columns at its end, and both at its middle.
inline void load_block(const Head& head, int64_t first, int rows, const BlockDecay& gate, int m,
                       ChunkTiles* tiles, PrepareScratch* scratch) {
  const float* __restrict to_end = gate.decay[kBlock - 1];
  const float* __restrict to_middle = gate.decay[kBlock / 2 - 1];
  const float* __restrict from_middle = gate.inverse[kBlock / 2 - 1];
  for (int i = 0; i < kBlock; ++i) {
    float* __restrict k_row = tiles->rows[kd_row(kBlock * m + i)];
    float* __restrict q_row = tiles->rows[qd_row(kBlock * m + i)];
    float* __restrict column = tiles->kr[kBlock * m + i];
    float* __restrict k_middle = scratch->middle_rows[i];
    float* __restrict q_middle = scratch->middle_rows[kBlock + i];
    float* __restrict column_middle = scratch->middle_columns[i];
    if (i >= rows) {  // past the sequence's end: k = q = 0
      for (int c = 0; c < kHeadDim; ++c) {
        k_row[c] = q_row[c] = column[c] = 0.0F;
        k_middle[c] = q_middle[c] = column_middle[c] = 0.0F;
      }
      continue;
    }
    alignas(64) float k[kHeadDim];
    alignas(64) float q[kHeadDim];
    load_row(head.k.row(first + i), k, kHeadDim);
    load_row(head.q.row(first + i), q, kHeadDim);
    const float k_factor = inverse_norm(k);
    const float q_factor = inverse_norm(q) * head.scale;
    const float* __restrict decay = gate.decay[i];
    const float* __restrict inverse = gate.inverse[i];
    for (int c = 0; c < kHeadDim; ++c) {
      const float k_hat = k[c] * k_factor;
      const float q_hat = q[c] * q_factor;
      const float row_middle = decay[c] * from_middle[c];
      k_row[c] = k_hat * decay[c];
      q_row[c] = q_hat * decay[c];
      k_middle[c] = k_hat * row_middle;
      q_middle[c] = q_hat * row_middle;
      column[c] = k_hat * (inverse[c] * to_end[c]);
      column_middle[c] = k_hat * (inverse[c] * to_middle[c]);
    }
  }
}

// products[i] holds k rows, then q rows, of `row_blocks` blocks from block `row` on, times the
// columns of the tokens from `column` on: the blocks of L and M they belong to.
template <int Columns>
inline void place_products(const float (*products)[Columns], int row_blocks, int row, int column,
                           const float* beta, ChunkTiles* tiles, PrepareScratch* scratch) {
  for (int block = 0; block < row_blocks; ++block) {
    for (int i = 0; i < kBlock; ++i) {
      const float* kk = products[2 * kBlock * block + i];
      const float* qk = products[2 * kBlock * block + kBlock + i];
      const int token = kBlock * (row + block) + i;
      for (int j = 0; j < Columns; ++j) {
        // By selection: what lies above the diagonal may be anything.
        scratch->L[token][column + j] = column + j < token ? beta[token] * kk[j] : 0.0F;
        tiles->M[token][column + j] = column + j <= token ? qk[j] : 0.0F;
      }
    }
  }
}

// L and M of the rows of `RowBlocks` blocks from block `row` on against the 16 `ColumnBlocks`
// tokens before them.
template <int RowBlocks, int ColumnBlocks>
inline void multiply_blocks(int row, const float* beta, ChunkTiles* tiles,
                            PrepareScratch* scratch) {
  constexpr int kRows = 2 * kBlock * RowBlocks;
  constexpr int kColumns = kBlock * ColumnBlocks;
  const int column = kBlock * (row - ColumnBlocks);
  alignas(64) float products[kRows][kColumns];
  Matrix<kRows, kColumns>(products[0]).noalias() =
      ConstMatrix<kRows, kHeadDim>(tiles->rows[2 * kBlock * row]) *
      ConstMatrix<kColumns, kHeadDim>(tiles->kr[column]).transpose();
  place_products<kColumns>(products, RowBlocks, row, column, beta, tiles, scratch);
}

// Chunk `chunk` of the head.
inline void prepare(const Head& head, int64_t chunk, ChunkTiles* tiles, PrepareScratch* scratch) {
  const int64_t start = chunk * kChunk;
  const int64_t left = head.tokens - start;
  const int tokens = left < kChunk ? static_cast<int>(left) : kChunk;
  GateParameters gate;
  load_gate(head, &gate);
  float* beta = scratch->beta;
  for (int i = 0; i < kChunk; ++i) beta[i] = i < tokens ? beta_of(head, start + i) : 0.0F;
  Matrix<kChunk, kChunk>(tiles->M[0]).setZero();

  alignas(64) float log2_total[kHeadDim] = {};
  for (int m = 0; m < kBlocks; ++m) {
    const int rows = tokens - m * kBlock;
    BlockDecay* block = &scratch->blocks[m];
    gate_block(head, gate, start + m * kBlock, rows, block);
    for (int c = 0; c < kHeadDim; ++c) log2_total[c] += block->log2_total[c];
    load_block(head, start + m * kBlock, rows, *block, m, tiles, scratch);
    alignas(64) float products[2 * kBlock][kBlock];
    Matrix<2 * kBlock, kBlock>(products[0]).noalias() =
        ConstMatrix<2 * kBlock, kHeadDim>(scratch->middle_rows[0]) *
        ConstMatrix<kBlock, kHeadDim>(scratch->middle_columns[0]).transpose();
    place_products<kBlock>(products, 1, m, m * kBlock, beta, tiles, scratch);
  }
  for (int c = 0; c < kHeadDim; ++c) tiles->d[c] = exp2_bounded(log2_total[c]);

  multiply_blocks<1, 1>(1, beta, tiles, scratch);
  multiply_blocks<1, 1>(3, beta, tiles, scratch);

  // Blocks to halves: rows to the start of their half, columns to its end.
  const float* total[kBlocks];
  for (int m = 0; m < kBlocks; ++m) total[m] = scratch->blocks[m].decay[kBlock - 1];
  move_anchor(&tiles->rows[2 * kBlock * 1], 2 * kBlock, total[0]);
  move_anchor(&tiles->rows[2 * kBlock * 3], 2 * kBlock, total[2]);
  move_anchor(&tiles->kr[kBlock * 0], kBlock, total[1]);
  move_anchor(&tiles->kr[kBlock * 2], kBlock, total[3]);
  multiply_blocks<2, 2>(2, beta, tiles, scratch);

  // Halves to the chunk: rows become kd and qd, columns kr.
  alignas(64) float half[kHeadDim];
  for (int c = 0; c < kHeadDim; ++c) half[c] = total[0][c] * total[1][c];
  move_anchor(&tiles->rows[2 * kBlock * 2], 4 * kBlock, half);
  for (int c = 0; c < kHeadDim; ++c) half[c] = total[2][c] * total[3][c];
  move_anchor(&tiles->kr[0], 2 * kBlock, half);

  invert(scratch->L, beta, tiles->T);
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
