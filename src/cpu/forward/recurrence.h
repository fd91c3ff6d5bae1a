// One chunk's step of the state, for a slice of V columns (rows of S are independent of each
// other). The state is kept transposed, [K, V], which makes every product plain row-major:
//
//   P = [kd; qd] S'      X = V - P_k      R = T X      O = P_q + M R      S' = diag(d) S' + kr' R
#pragma once

#include "cpu/forward/head.h"
#include "cpu/forward/tiles.h"
#include "cpu/forward/vectors.h"

namespace flash_kda::cpu::FLASH_KDA_ISA {

inline void load_state(const Head& head, int slice, StateSlice* state) {
  if (head.initial_state == nullptr) {
    Matrix<kHeadDim, kSlice>(*state[0]).setZero();
    return;
  }
  for (int v = 0; v < kSlice; ++v) {
    alignas(64) float row[kHeadDim];
    load_values(head.initial_state, head.initial_dtype, int64_t{kHeadDim} * (slice * kSlice + v),
                row, kHeadDim);
    for (int c = 0; c < kHeadDim; ++c) (*state)[c][v] = row[c];
  }
}

inline void store_state(const Head& head, int slice, const StateSlice& state) {
  if (head.final_state == nullptr) return;
  for (int v = 0; v < kSlice; ++v) {
    alignas(64) float row[kHeadDim];
    for (int c = 0; c < kHeadDim; ++c) row[c] = state[c][v];
    store_values(head.final_state, head.final_dtype, int64_t{kHeadDim} * (slice * kSlice + v), row,
                 kHeadDim);
  }
}

// Writes the chunk's rows of out.
inline void recur(const Head& head, int64_t chunk, int slice, const ChunkTiles& tiles,
                  StateSlice* state, RecurScratch* scratch) {
  const int64_t start = chunk * kChunk;
  const int64_t left = head.tokens - start;
  const int tokens = left < kChunk ? static_cast<int>(left) : kChunk;
  Matrix<kHeadDim, kSlice> S((*state)[0]);
  Matrix<2 * kChunk, kSlice> P(scratch->P[0]);
  Matrix<kChunk, kSlice> X(scratch->X[0]);
  Matrix<kChunk, kSlice> R(scratch->R[0]);

  P.noalias() = ConstMatrix<2 * kChunk, kHeadDim>(tiles.rows[0]) * S;
  for (int i = 0; i < kChunk; ++i) {
    float* __restrict x = scratch->X[i];
    if (i >= tokens) {
      for (int c = 0; c < kSlice; ++c) x[c] = 0.0F;
      continue;
    }
    const float* __restrict recalled = scratch->P[kd_row(i)];
    const uint16_t* __restrict v = head.v.row(start + i) + slice * kSlice;
    for (int c = 0; c < kSlice; ++c) x[c] = to_float(v[c]) - recalled[c];
  }
  R.noalias() = ConstMatrix<kChunk, kChunk>(tiles.T[0]) * X;

  X.noalias() = ConstMatrix<kChunk, kChunk>(tiles.M[0]) * R;
  for (int i = 0; i < tokens; ++i) {
    const float* __restrict inside = scratch->X[i];
    const float* __restrict before = scratch->P[qd_row(i)];
    uint16_t* __restrict out = head.out.row(start + i) + slice * kSlice;
    for (int c = 0; c < kSlice; ++c) out[c] = to_bf16(before[c] + inside[c]);
  }

  for (int k = 0; k < kHeadDim; ++k) {
    float* __restrict row = (*state)[k];
    const float decay = tiles.d[k];
    for (int c = 0; c < kSlice; ++c) row[c] *= decay;
  }
  S.noalias() += ConstMatrix<kChunk, kHeadDim>(tiles.kr[0]).transpose() * R;
}

}  // namespace flash_kda::cpu::FLASH_KDA_ISA
