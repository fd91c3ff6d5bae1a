// Which sequences and heads a CTA works on, and where their tokens lie. Every role walks the same
// list by itself; nothing is handed over.
#pragma once

#include "cuda/sm90/forward/config.h"
#include "cuda/sm90/forward/params.h"

namespace flash_kda::cuda::sm90 {

struct Item {
  int32_t sequence, head;
  int32_t batch, begin, length;  // tokens begin ... begin + length - 1 of this batch entry
  __device__ __forceinline__ int32_t chunks() const { return (length + kChunk - 1) / kChunk; }
};

// An offset of cu_seqlens, made harmless: between 0 and T whatever it says.
__device__ __forceinline__ int32_t sequence_offset(const Params& params, int32_t index) {
  const int64_t offset =
      params.cu_seqlens_int64
          ? __ldg(static_cast<const long long*>(params.cu_seqlens) + index)
          : static_cast<int64_t>(__ldg(static_cast<const int32_t*>(params.cu_seqlens) + index));
  const int64_t limit = params.tokens;
  return static_cast<int32_t>(offset < 0 ? 0 : offset > limit ? limit : offset);
}

__device__ __forceinline__ void locate(const Params& params, Item& item) {
  item.batch = item.sequence;
  item.begin = 0;
  item.length = params.tokens;
  if (params.cu_seqlens != nullptr) {
    item.batch = 0;
    item.begin = sequence_offset(params, item.sequence);
    item.length = max(sequence_offset(params, item.sequence + 1) - item.begin, 0);
  }
}

// The k-th item of this CTA, false past the last. The rounds run to and fro over the CTAs, so that
// the one with the longest item of a round gets the shortest of the next.
__device__ __forceinline__ bool nth_item(const Params& params, const uint16_t* order, uint32_t k,
                                         Item& item) {
  const uint32_t items = static_cast<uint32_t>(params.sequences) * params.heads;
  const uint32_t turn = (k & 1) != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t position = k * gridDim.x + turn;
  if (position >= items) return false;
  const uint32_t rank = position / params.heads;
  item.head = static_cast<int32_t>(position - rank * params.heads);
  item.sequence = static_cast<int32_t>(params.sort ? order[rank] : rank);
  locate(params, item);
  return true;
}

// order[rank] = sequence, longest first, by all threads of the CTA; lengths holds as many numbers.
// Needs sequences <= kMaxSorted and a barrier afterwards.
__device__ __forceinline__ void sort_sequences(const Params& params, uint16_t* order,
                                               int32_t* lengths) {
  for (int n = threadIdx.x; n < params.sequences; n += kThreads) {
    Item item;
    item.sequence = n;
    locate(params, item);
    lengths[n] = item.length;
  }
  __syncthreads();
  for (int n = threadIdx.x; n < params.sequences; n += kThreads) {
    const int32_t mine = lengths[n];
    int rank = 0;
    for (int m = 0; m < params.sequences; ++m) {
      rank += lengths[m] > mine || (lengths[m] == mine && m < n);
    }
    order[rank] = static_cast<uint16_t>(n);
  }
}

}  // namespace flash_kda::cuda::sm90
