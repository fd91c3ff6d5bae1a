// The steps as compiled for one instruction set, and the choice among them.
#pragma once

#include <span>

#include "cpu/forward/head.h"
#include "cpu/forward/tiles.h"
#include "ops/forward/problem.h"

namespace flash_kda::cpu {

struct Kernels {
  const char* isa;
  // A whole sequence of at most kDirectTokens tokens.
  void (*run_direct)(const Head&);
  void (*load_state)(const Head&, int slice, StateSlice*);
  void (*prepare)(const Head&, int64_t chunk, ChunkTiles*, PrepareScratch*);
  void (*recur)(const Head&, int64_t chunk, int slice, const ChunkTiles&, StateSlice*,
                RecurScratch*);
  void (*store_state)(const Head&, int slice, const StateSlice&);
};

namespace baseline {
extern const Kernels kKernels;
}
#ifdef FLASH_KDA_CPU_X86
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

// Those that this machine can run, best first. The first one runs.
std::span<const Kernels* const> usable_kernels();

// Runs a problem in host memory with one of them.
Status run_with(const Kernels& kernels, const ForwardProblem& problem);

}  // namespace flash_kda::cpu
