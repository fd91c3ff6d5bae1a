// How the split forward divides its work into windows of slots, and the workspace that it needs.
#pragma once

#include <cstdint>

#include "common/workspace.h"

namespace flash_kda::cuda::sm90_split {

struct Layout {
  int64_t slots = 0;             // upper bound of all
  int64_t slots_per_window = 0;  // equal but for the last
  int64_t windows = 0;
  int64_t most_maps = 0;  // segments times heads of a window, with gaps in their numbers

  WorkspaceBuffer<unsigned char> records;  // of one window
  WorkspaceBuffer<uint32_t> ready;         // a flag per record
  WorkspaceBuffer<int64_t> bounds;         // tables of portable's TilePlan
  WorkspaceBuffer<int32_t> first_slots;
  WorkspaceBuffer<int32_t> slot_sequences;
  WorkspaceBuffer<float> maps;
  WorkspaceBuffer<float> carry[2];  // in turn from window to window
  int64_t bytes = 0;
};

// For problems of these totals; every extent is at least 0. Neither bytes nor any buffer shrinks
// when an argument grows, those on segments apart. `budget`: most bytes of records, unless one slot
// of all heads takes more. `least_segment`: the fewest chunks that a segment will have.
// `least_cut`: of a sequence that is cut. `most_maps`: a bound of the maps.
Layout make_layout(int64_t tokens_total, int64_t heads, int64_t sequences, int64_t budget,
                   int64_t least_segment, int64_t least_cut, int64_t most_maps);

}  // namespace flash_kda::cuda::sm90_split
