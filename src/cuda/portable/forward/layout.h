// How the portable forward divides its work: windows of slots, and the workspace that they need.
#pragma once

#include <cstdint>

#include "common/workspace.h"

namespace flash_kda::cuda::portable {

struct Layout {
  int64_t slots = 0;             // upper bound of all
  int64_t slots_per_window = 0;  // equal but for the last
  int64_t windows = 0;

  WorkspaceBuffer<unsigned char> records;  // of one window
  WorkspaceBuffer<int64_t> bounds;         // tables of a TilePlan
  WorkspaceBuffer<int32_t> first_slots;
  WorkspaceBuffer<int32_t> slot_sequences;
  WorkspaceBuffer<int32_t> order;
  WorkspaceBuffer<float> carry_state[2];  // in turn from window to window
  WorkspaceBuffer<float> carry_unit[2];
  WorkspaceBuffer<uint32_t> carry_bits[2];
  int64_t bytes = 0;
};

// For problems of these totals; every extent is at least 0. Neither bytes nor any buffer shrinks
// when an argument grows. `budget`: most bytes of records, unless one slot of all heads takes more.
Layout make_layout(int64_t tokens_total, int64_t heads, int64_t sequences, int64_t budget);

}  // namespace flash_kda::cuda::portable
