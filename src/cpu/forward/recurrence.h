// One chunk's step of the state, for a slice of V columns (rows of S are independent of each
// other). The state is kept transposed, [K, V], which makes every product plain row-major:
//
//   P = [kd; qd] S'      X = V - P_k      R = T X      O = P_q + M R      S' = diag(d) S' + kr' R
//
// The update of S' is in double (tiles.h says why), all the rest in float.
#pragma once

#include "cpu/forward/head.h"
#include "cpu/forward/tiles.h"
#include "cpu/forward/vectors.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

// Both transpose with V innermost: 64 rows of 512 bytes stay in the first cache, 128 would not.
inline void load_state(const Head& head, int slice, StateSlice* state) {
  if (head.initial_state == nullptr) {
    Matrix<kHeadDim, kSlice, kSlice, double>((*state)[0]).setZero();
    return;
  }
  alignas(64) float rows[kSlice][kHeadDim];
  load_values(head.initial_state, head.initial_dtype, int64_t{kHeadDim} * kSlice * slice, rows[0],
              kSlice * kHeadDim);
  for (int k = 0; k < kHeadDim; ++k) {
    for (int v = 0; v < kSlice; ++v) (*state)[k][v] = rows[v][k];
  }
}

inline void store_state(const Head& head, int slice, const StateSlice& state) {
  if (head.final_state == nullptr) return;
  alignas(64) float rows[kSlice][kHeadDim];
  for (int k = 0; k < kHeadDim; ++k) {
    for (int v = 0; v < kSlice; ++v) rows[v][k] = static_cast<float>(state[k][v]);
  }
  store_values(head.final_state, head.final_dtype, int64_t{kHeadDim} * kSlice * slice, rows[0],
               kSlice * kHeadDim);
}

// Writes the chunk's rows of out.
inline void recur(const Head& head, int64_t chunk, int slice, const ChunkTiles& tiles,
                  StateSlice* state, RecurScratch* scratch) {
  const int64_t start = chunk * kChunk;
  const int64_t left = head.tokens - start;
  const int tokens = left < kChunk ? static_cast<int>(left) : kChunk;
  Matrix<kHeadDim, kSlice, kSlice, double> S((*state)[0]);
  Matrix<kHeadDim, kSlice> S_rounded(scratch->S[0]);
  Matrix<2 * kChunk, kSlice> P(scratch->P[0]);
  Matrix<kChunk, kSlice> X(scratch->X[0]);
  Matrix<kChunk, kSlice> R(scratch->R[0]);
  Matrix<kChunk, kSlice, kSlice, double> R_wide(scratch->R_wide[0]);

  for (int k = 0; k < kHeadDim; ++k) {
    double* row = (*state)[k];
    float* rounded = scratch->S[k];
    const double decay = tiles.d[k];
#pragma omp simd
    for (int c = 0; c < kSlice; ++c) {
      rounded[c] = static_cast<float>(row[c]);
      row[c] *= decay;
    }
  }
  P.noalias() = ConstMatrix<2 * kChunk, kHeadDim>(tiles.rows[0]) * S_rounded;
  for (int i = 0; i < kChunk; ++i) {
    float* x = scratch->X[i];
    if (i >= tokens) {
      for (int c = 0; c < kSlice; ++c) x[c] = 0.0F;
      continue;
    }
    const float* recalled = scratch->P[kd_row(i)];
    const uint16_t* v = head.v.row(start + i) + slice * kSlice;
#pragma omp simd
    for (int c = 0; c < kSlice; ++c) x[c] = to_float(v[c]) - recalled[c];
  }
  R.noalias() = ConstMatrix<kChunk, kChunk>(tiles.T[0]) * X;

  X.noalias() = ConstMatrix<kChunk, kChunk>(tiles.M[0]) * R;
  for (int i = 0; i < tokens; ++i) {
    const float* inside = scratch->X[i];
    const float* before = scratch->P[qd_row(i)];
    uint16_t* out = head.out.row(start + i) + slice * kSlice;
#pragma omp simd
    for (int c = 0; c < kSlice; ++c) out[c] = to_bf16(before[c] + inside[c]);
  }

  R_wide = R.cast<double>();
  S.noalias() += ConstMatrix<kChunk, kHeadDim, kHeadDim, double>(tiles.kr[0]).transpose() * R_wide;
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
