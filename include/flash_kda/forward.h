// The forward pass (prefill) of Kimi Delta Attention. docs/algorithm.md derives it.
//
// Per sequence and head, with a state S [V, K] and, per token, over K = 128 key channels:
//
//   k^ = k * rsqrt(sum(k^2) + 1e-6)                  q^ likewise
//   gamma = lower_bound * sigmoid(exp(A_log) * (g + dt_bias))     natural-log decay per channel
//   beta = sigmoid(beta logit)
//   S <- S * diag(exp(gamma))
//   S <- S + beta * (v - S k^) k^T
//   o = scale * S q^
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "flash_kda/export.h"
#include "flash_kda/status.h"
#include "flash_kda/types.h"

namespace flash_kda {

inline constexpr int kHeadDim = 128;  // K = V, the one head dimension there is

// All tensors lie on one device. B, T, H are batch, tokens and heads; N is the number of
// sequences: B, or the length of cu_seqlens minus one.
struct ForwardArgs {
  // [B, T, H, 128] bfloat16. [H, 128] is dense; the batch and token strides are free (on CUDA
  // multiples of 8 elements, data aligned to 16 bytes). g is the raw gate.
  TensorRef q, k, v, g;
  // [B, T, H] bfloat16 or float32 logits, any strides.
  TensorRef beta;
  // [B, T, H, 128] bfloat16, written. Rows that belong to no sequence are left as they are.
  TensorRef out;
  // [H] (extra axes of extent 1 are fine), bfloat16 or float32, dense. Not given means zeros.
  TensorRef A_log;
  // [H, 128] or [H * 128], bfloat16 or float32, dense. Not given means zeros.
  TensorRef dt_bias;
  // [N, H, V, K] bfloat16 or float32 each, dense, on CUDA aligned to 16 bytes. Not given means
  // zeros, or not wanted. Both may be the same memory if their dtype is the same.
  TensorRef initial_state, final_state;
  // [N + 1] int32 or int64, dense: offsets of the sequences in T, from 0, never decreasing, at
  // most T. B must then be 1.
  TensorRef cu_seqlens;
  // [bytes] uint8, dense, at least ForwardPlan::workspace_bytes, 256-byte aligned on CUDA; its
  // contents do not matter.
  TensorRef workspace;
  double scale = 0.0;        // multiplies the output; finite
  double lower_bound = 0.0;  // of the log decay of one token, in [-5, 0]
  void* stream = nullptr;    // a cudaStream_t; the CPU ignores it
};

struct ForwardPlan {
  const char* implementation = "";  // the entry of the list that will run, e.g. "cuda.sm90"
  int64_t workspace_bytes = 0;
};

struct Verdict {
  std::string implementation;
  bool accepted = false;
  std::string reason;  // why not; empty when accepted
};

// Which implementation would run, and how much workspace it wants. Reads no memory but that of a
// cu_seqlens on the host; all other data pointers may be null. kInvalid… for illegal arguments,
// kUnsupported with every implementation's reason where none can run.
FLASH_KDA_API Status plan_forward(const ForwardArgs& args, ForwardPlan* plan);

// Computes out and final_state. On CUDA the work is queued on args.stream, with no allocation and
// no host synchronisation (but for a check of cu_seqlens, which FLASH_KDA_CHECK=1 asks for: without
// it, offsets that are not legal are clamped). Nothing is written when the Status is not ok, unless
// it is kRuntime.
FLASH_KDA_API Status forward(const ForwardArgs& args);

// Every implementation in order of preference with its reason for refusing, plus the Status of
// the arguments themselves (when that is not ok, every implementation gives it as its reason).
FLASH_KDA_API Status explain(const ForwardArgs& args, std::vector<Verdict>* verdicts);

// An upper bound of workspace_bytes over every implementation in this build for sequences of
// tokens_total tokens in all. Integer arithmetic only; never falls when an argument grows. Negative
// arguments count as 0.
FLASH_KDA_API int64_t workspace_size(int64_t tokens_total, int64_t heads, int64_t sequences = 1);

}  // namespace flash_kda
