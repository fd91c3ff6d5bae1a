// Where sequence n of a problem lies, for implementations that read cu_seqlens on the host.
#pragma once

#include "ops/forward/problem.h"

namespace flash_kda {

struct SequenceSpan {
  int64_t batch;   // batch entry
  int64_t begin;   // first token within it
  int64_t length;  // tokens
};

inline int64_t cu_seqlens_at(const Dense& cu_seqlens, int64_t index) {
  if (cu_seqlens.dtype == DType::kInt32) {
    return static_cast<const int32_t*>(cu_seqlens.data)[index];
  }
  return static_cast<const int64_t*>(cu_seqlens.data)[index];
}

inline SequenceSpan sequence_span(const ForwardProblem& problem, int64_t sequence) {
  if (!problem.cu_seqlens) return {sequence, 0, problem.tokens};
  const int64_t begin = cu_seqlens_at(problem.cu_seqlens, sequence);
  return {0, begin, cu_seqlens_at(problem.cu_seqlens, sequence + 1) - begin};
}

}  // namespace flash_kda
