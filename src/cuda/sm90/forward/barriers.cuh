// The barriers of the Hopper forward kernel and the cursors that count through their slots.
//
//   barrier     slots   arrivals per phase     meaning
//   raw         stage   1 + bytes of copies    q, k, g of a chunk are in the stage
//   normed      stage   1 norming warp         and the norms; rows past the end are blank
//   partial     pair    2 preparation warps    kd, qd, kr and d are in the stage, L and M in parts
//   unpartial   pair    1 finishing warp       the parts have been read
//   full        stage   1 finishing warp       T and M too: all of the chain's operands
//   value_full  v tile  1 + bytes of copies    v of a chunk is in the tile
//   value_free  v tile  8 chain warps          and has been read
//   drained     tile    8 chain warps          a chunk's stage is free
//   out_full    tile    8 chain warps          out of a chunk is in the tile
//   out_free    tile    1 copying warp         and has been read
//
// Every waiter sees every phase of its barriers: a slot's next phase needs the copy, the finished
// chunk or the freed tile that follows an arrival of everyone who waited for the last.
//
// Nobody waits in a circle. What a chunk c waits for belongs to earlier chunks, or to c itself
// further up in the table, but for one thing: preparation awaits the tiles of chunk c + kPairs, and
// their blank rows, before it hands c on. They need the stage of chunk c + kPairs - kStages, which
// is earlier (prepare_role.cuh).
//
// Between ordinary writes and the tensor cores or the copy engine stands a fence of those who
// wrote: preparation before `partial` (also for the blank rows, which lie under its tiles),
// finishing before `full`, the chain before `out_full`. What is only read ordinarily (v, d, the
// norms) needs none, and neither does `drained`: the chain has waited for its products.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/forward/config.h"

namespace flash_kda::cuda::sm90 {

// A slot of a ring and how often the ring has been round: what consumers wait for. A producer waits
// for the phase before, which a fresh barrier counts as complete.
template <int kSlots>
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};
using StageCursor = Cursor<kStages>;
using ValueCursor = Cursor<kValueTiles>;
using OutputCursor = Cursor<kOutputTiles>;

struct Barriers {
  uint32_t base;  // shared address

  static constexpr int kRaw = 0;
  static constexpr int kNormed = kRaw + kStages;
  static constexpr int kPartial = kNormed + kStages;
  static constexpr int kUnpartial = kPartial + kPairs;
  static constexpr int kFull = kUnpartial + kPairs;
  static constexpr int kValueFull = kFull + kStages;
  static constexpr int kValueFree = kValueFull + kValueTiles;
  static constexpr int kDrained = kValueFree + kValueTiles;
  static constexpr int kOutFull = kDrained + kOutputTiles;
  static constexpr int kOutFree = kOutFull + kOutputTiles;
  static constexpr int kCount = kOutFree + kOutputTiles;
  static_assert(kSharedBarriers + kCount * ptx::kMbarrierBytes <= kSharedBytes);

  __device__ __forceinline__ uint32_t at(int index) const {
    return base + index * ptx::kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t raw(int slot) const { return at(kRaw + slot); }
  __device__ __forceinline__ uint32_t normed(int slot) const { return at(kNormed + slot); }
  __device__ __forceinline__ uint32_t partial(int pair) const { return at(kPartial + pair); }
  __device__ __forceinline__ uint32_t unpartial(int pair) const { return at(kUnpartial + pair); }
  __device__ __forceinline__ uint32_t full(int slot) const { return at(kFull + slot); }
  __device__ __forceinline__ uint32_t value_full(int slot) const { return at(kValueFull + slot); }
  __device__ __forceinline__ uint32_t value_free(int slot) const { return at(kValueFree + slot); }
  __device__ __forceinline__ uint32_t drained(int slot) const { return at(kDrained + slot); }
  __device__ __forceinline__ uint32_t out_full(int slot) const { return at(kOutFull + slot); }
  __device__ __forceinline__ uint32_t out_free(int slot) const { return at(kOutFree + slot); }

  // By one thread, before the barrier that starts the roles.
  __device__ __forceinline__ void init() const {
    constexpr int kLanes = 32;  // of a warp
    for (int slot = 0; slot < kStages; ++slot) {
      ptx::mbarrier_init(raw(slot), 1);
      ptx::mbarrier_init(normed(slot), kLanes);
      ptx::mbarrier_init(full(slot), kLanes);
    }
    for (int pair = 0; pair < kPairs; ++pair) {
      ptx::mbarrier_init(partial(pair), 2 * kLanes);
      ptx::mbarrier_init(unpartial(pair), kLanes);
    }
    for (int slot = 0; slot < kValueTiles; ++slot) {
      ptx::mbarrier_init(value_full(slot), 1);
      ptx::mbarrier_init(value_free(slot), kChainThreads / kLanes);
    }
    for (int slot = 0; slot < kOutputTiles; ++slot) {
      ptx::mbarrier_init(drained(slot), kChainThreads / kLanes);
      ptx::mbarrier_init(out_full(slot), kChainThreads);
      ptx::mbarrier_init(out_free(slot), kLanes);
    }
    ptx::fence_async_shared();
  }
};

// All lanes: racecheck does not follow one lane's arrival for its warp.
__device__ __forceinline__ void lanes_arrive(uint32_t barrier) {
  __syncwarp();
  ptx::mbarrier_arrive(barrier);
}
__device__ __forceinline__ void lanes_arrive(uint32_t first, uint32_t second) {
  __syncwarp();
  ptx::mbarrier_arrive(first);
  ptx::mbarrier_arrive(second);
}

}  // namespace flash_kda::cuda::sm90
