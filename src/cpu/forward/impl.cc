// The CPU implementation: who runs which chunk of which head.
//
// Heads (a head of a sequence) are independent. With at least as many heads as threads, each thread
// takes a head at a time. With fewer, all threads share the heads: in rounds, the recurrence of
// kAhead chunks, in slices of V columns, and beside it the preparation of the next kAhead chunks.
// A head's arithmetic is the same either way, and for any number of threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "common/bf16.h"
#include "common/describe.h"
#include "cpu/forward/kernels.h"
#include "ops/forward/impls.h"
#include "ops/forward/sequences.h"

namespace flash_kda::cpu {
namespace {

int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Numbers below 2^-126 count as zero while this lives, on its thread. Decayed keys pass through
// that range on their way to zero, and many processors take a hundred times as long there.
class FlushDenormals {
 public:
#ifdef __SSE2__
  FlushDenormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero);
  }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  unsigned before_;
#else
  FlushDenormals() {}  // no such cost elsewhere
  ~FlushDenormals() {}
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

TokenRows token_rows(const Rows& rows, const SequenceSpan& span, int64_t head) {
  return {static_cast<uint16_t*>(rows.data) + span.batch * rows.batch_stride +
              span.begin * rows.token_stride + head * kHeadDim,
          rows.token_stride};
}

void* head_data(const Dense& dense, int64_t index, int64_t elements) {
  if (!dense) return nullptr;
  return static_cast<char*>(dense.data) + index * elements * dtype_size(dense.dtype);
}

// Pair `pair` is head pair % H of sequence pair / H.
Head head_of(const ForwardProblem& p, int64_t pair) {
  const int64_t head = pair % p.heads;
  const SequenceSpan span = sequence_span(p, pair / p.heads);
  const int64_t beta_offset = span.batch * p.beta.batch_stride + span.begin * p.beta.token_stride +
                              head * p.beta.head_stride;
  Head h;
  h.q = token_rows(p.q, span, head);
  h.k = token_rows(p.k, span, head);
  h.v = token_rows(p.v, span, head);
  h.g = token_rows(p.g, span, head);
  h.out = token_rows(p.out, span, head);
  h.beta = static_cast<const char*>(p.beta.data) + beta_offset * dtype_size(p.beta.dtype);
  h.beta_dtype = p.beta.dtype;
  h.beta_stride = p.beta.token_stride;
  h.tokens = span.length;
  h.dt_bias = head_data(p.dt_bias, head, kHeadDim);
  h.dt_bias_dtype = p.dt_bias.dtype;
  h.initial_state = head_data(p.initial_state, pair, kStateSize);
  h.initial_dtype = p.initial_state.dtype;
  h.final_state = head_data(p.final_state, pair, kStateSize);
  h.final_dtype = p.final_state.dtype;
  const float a_log = p.A_log ? load_float(p.A_log.data, p.A_log.dtype, head) : 0.0F;
  h.gate_rate = static_cast<float>(std::exp(static_cast<double>(a_log)));
  h.lower_bound = p.lower_bound;
  h.scale = p.scale;
  return h;
}

// A sequence without tokens: final state = initial state, to the bit where the dtypes agree.
void pass_state_through(const Head& head) {
  if (head.final_state == nullptr || head.final_state == head.initial_state) return;
  if (head.initial_state == nullptr) {
    std::memset(head.final_state, 0, kStateSize * dtype_size(head.final_dtype));
  } else if (head.initial_dtype == head.final_dtype) {
    std::memcpy(head.final_state, head.initial_state, kStateSize * dtype_size(head.final_dtype));
  } else {
    for (int64_t i = 0; i < kStateSize; ++i) {
      store_float(head.final_state, head.final_dtype, i,
                  load_float(head.initial_state, head.initial_dtype, i));
    }
  }
}

// True when the sequence was short enough to be finished at once.
bool run_short(const Kernels& kernels, const Head& head) {
  if (head.tokens > kDirectTokens) return false;
  if (head.tokens == 0) {
    pass_state_through(head);
  } else {
    const FlushDenormals flush;
    kernels.run_direct(head);
  }
  return true;
}

int64_t chunks_of(const Head& head) { return (head.tokens + kChunk - 1) / kChunk; }

// What one thread needs to run heads alone.
struct alignas(64) ThreadScratch {
  PrepareScratch prepare;
  RecurScratch recur;
  State state;
  ChunkTiles tiles;
};

void run_head(const Kernels& kernels, const Head& head, ThreadScratch* scratch) {
  if (run_short(kernels, head)) return;
  const FlushDenormals flush;
  State& state = scratch->state;
  for (int slice = 0; slice < kSlices; ++slice) {
    kernels.load_state(head, slice, &state.slices[slice]);
  }
  for (int64_t chunk = 0; chunk < chunks_of(head); ++chunk) {
    kernels.prepare(head, chunk, &scratch->tiles, &scratch->prepare);
    for (int slice = 0; slice < kSlices; ++slice) {
      kernels.recur(head, chunk, slice, scratch->tiles, &state.slices[slice], &scratch->recur);
    }
  }
  for (int slice = 0; slice < kSlices; ++slice) {
    kernels.store_state(head, slice, state.slices[slice]);
  }
}

// A head that all threads share: tiles of the round at hand and of the next.
struct alignas(64) SharedHead {
  ChunkTiles tiles[2][kAhead];
  State state;
  Head head;
};

// The tasks of a round are independent of each other: recurrences of its chunks, then preparations
// of the next round's. Round -1 only prepares.
void run_task(const Kernels& kernels, int64_t round, int64_t task, int64_t heads,
              SharedHead* shared, ThreadScratch* scratch) {
  const FlushDenormals flush;
  const int64_t recurrences = heads * kSlices;
  if (task < recurrences) {
    if (round < 0) return;
    SharedHead& s = shared[task / kSlices];
    const int slice = static_cast<int>(task % kSlices);
    const int64_t end = std::min((round + 1) * kAhead, chunks_of(s.head));
    for (int64_t chunk = round * kAhead; chunk < end; ++chunk) {
      kernels.recur(s.head, chunk, slice, s.tiles[round & 1][chunk % kAhead],
                    &s.state.slices[slice], &scratch->recur);
    }
    return;
  }
  SharedHead& s = shared[(task - recurrences) / kAhead];
  const int64_t ahead = (task - recurrences) % kAhead;
  const int64_t chunk = (round + 1) * kAhead + ahead;
  if (chunk >= chunks_of(s.head)) return;
  kernels.prepare(s.head, chunk, &s.tiles[(round + 1) & 1][ahead], &scratch->prepare);
}

void run_shared(const Kernels& kernels, const ForwardProblem& problem, int64_t heads,
                [[maybe_unused]] int threads, SharedHead* shared, ThreadScratch* scratch) {
  int64_t longest = 0;
  for (int64_t i = 0; i < heads; ++i) {
    shared[i].head = head_of(problem, i);
    if (run_short(kernels, shared[i].head)) shared[i].head.tokens = 0;
    longest = std::max(longest, chunks_of(shared[i].head));
    for (int slice = 0; slice < kSlices; ++slice) {
      if (shared[i].head.tokens == 0) continue;
      kernels.load_state(shared[i].head, slice, &shared[i].state.slices[slice]);
    }
  }
  const int64_t rounds = (longest + kAhead - 1) / kAhead;
  const int64_t tasks = heads * (kSlices + kAhead);
#pragma omp parallel num_threads(threads)
  for (int64_t round = -1; round < rounds; ++round) {
    // The barrier at the loop's end: a round's tiles are complete before anybody reads them.
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task) {
      run_task(kernels, round, task, heads, shared, &scratch[thread_index()]);
    }
  }
  for (int64_t i = 0; i < heads; ++i) {
    for (int slice = 0; slice < kSlices; ++slice) {
      if (shared[i].head.tokens == 0) continue;
      kernels.store_state(shared[i].head, slice, shared[i].state.slices[slice]);
    }
  }
}

template <class T>
struct AlignedDelete {
  void operator()(T* memory) const { ::operator delete (memory, std::align_val_t{alignof(T)}); }
};
// Null when there is no memory. The contents are not initialised.
template <class T>
std::unique_ptr<T, AlignedDelete<T>> allocate(int64_t count) {
  void* memory = ::operator new (static_cast<size_t>(count) * sizeof(T),
                                 std::align_val_t{alignof(T)}, std::nothrow);
  return std::unique_ptr<T, AlignedDelete<T>>(static_cast<T*>(memory));
}

struct Extent {
  int64_t longest = 0;  // tokens of the longest sequence
  int64_t tokens = 0;   // of all
};

Extent extent_of(const ForwardProblem& p) {
  if (!p.cu_seqlens) return {p.sequences == 0 ? 0 : p.tokens, p.tokens * p.sequences};
  Extent extent;
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t length = sequence_span(p, n).length;
    extent.longest = std::max(extent.longest, length);
    extent.tokens += length;
  }
  return extent;
}

Status accepts(const ForwardProblem& problem) {
  if (problem.device.type == DeviceType::kCpu) return {};
  return Status::unsupported("runs on CPU tensors only");
}

// Scratch is allocated by each call: its size depends on the threads at that time, not on tokens.
int64_t workspace_bytes(int64_t, int64_t, int64_t) { return 0; }

Status run(const ForwardProblem& problem, void*, int64_t) {
  return run_with(*usable_kernels().front(), problem);
}

// The build compiles each with exactly the extensions that are asked for here.
struct Usable {
  const Kernels* list[3];
  int count = 0;

  Usable() {
#ifdef FLASH_KDA_CPU_X86
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 =
        has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (has_avx512) list[count++] = &avx512::kKernels;
    if (has_avx2) list[count++] = &avx2::kKernels;
#endif
    list[count++] = &baseline::kKernels;
  }
};

}  // namespace

std::span<const Kernels* const> usable_kernels() {
  static const Usable usable;
  return {usable.list, static_cast<size_t>(usable.count)};
}

Status run_with(const Kernels& kernels, const ForwardProblem& problem) {
  const int64_t heads = problem.sequences * problem.heads;
  const Extent extent = extent_of(problem);
  // Empty sequences count as a token: their states are copied.
  const int64_t work = (extent.tokens + problem.sequences) * problem.heads;
  const bool direct = extent.longest <= kDirectTokens;
  int threads = work <= kSerialTokens ? 1 : max_threads();
  const bool share = heads < threads && !direct;
  const int64_t tasks = share ? heads * (kSlices + kAhead) : heads;  // at once
  threads = static_cast<int>(std::min<int64_t>(threads, tasks));

  std::unique_ptr<ThreadScratch, AlignedDelete<ThreadScratch>> scratch;
  std::unique_ptr<SharedHead, AlignedDelete<SharedHead>> shared;
  if (!direct) scratch = allocate<ThreadScratch>(threads);
  if (share) shared = allocate<SharedHead>(heads);
  if ((!direct && !scratch) || (share && !shared)) {
    return Status::runtime("cpu: no memory for the scratch of " + std::to_string(threads) +
                           " threads, " + std::to_string(sizeof(ThreadScratch)) + " bytes each");
  }
  if (share) {
    run_shared(kernels, problem, heads, threads, shared.get(), scratch.get());
  } else if (threads == 1) {
    for (int64_t i = 0; i < heads; ++i) run_head(kernels, head_of(problem, i), scratch.get());
  } else {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < heads; ++i) {
      run_head(kernels, head_of(problem, i), scratch.get() + thread_index());
    }
  }
  return {};
}

const ForwardImpl kForward = {"cpu", accepts, workspace_bytes, run};

}  // namespace flash_kda::cpu
