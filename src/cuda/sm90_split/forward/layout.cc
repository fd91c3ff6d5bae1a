#include "cuda/sm90_split/forward/layout.h"

#include <algorithm>

#include "cuda/portable/forward/sizes.h"
#include "cuda/sm90_split/forward/config.h"

namespace flash_kda::cuda::sm90_split {

Layout make_layout(int64_t tokens_total, int64_t heads, int64_t sequences, int64_t budget,
                   int64_t least_segment, int64_t least_cut, int64_t most_maps) {
  Layout layout;
  if (heads == 0 || sequences == 0) return layout;
  layout.slots = portable::most_slots(tokens_total, sequences);
  const int64_t slot_bytes = heads * kRecordBytes;
  const int64_t most = std::max<int64_t>(budget / slot_bytes, 1);
  layout.windows = (layout.slots + most - 1) / most;
  layout.slots_per_window = (layout.slots + layout.windows - 1) / layout.windows;
  if (layout.slots >= least_cut) {
    layout.most_maps = std::min(most_maps, heads * (sequences + layout.slots / least_segment));
  }

  // Booked in full even where equal windows need less, or the size would not be monotone in heads.
  WorkspaceLedger ledger;
  layout.records =
      ledger.book<unsigned char>(std::min(layout.slots * slot_bytes, std::max(budget, slot_bytes)));
  layout.ready =
      ledger.book<uint32_t>(std::min(layout.slots * heads, std::max(budget / kRecordBytes, heads)));
  layout.bounds = ledger.book<int64_t>(sequences + 1);
  layout.first_slots = ledger.book<int32_t>(sequences + 1);
  layout.slot_sequences = ledger.book<int32_t>(layout.slots);
  layout.maps = ledger.book<float>(layout.most_maps * 2 * kMatrixElements);
  for (auto& carry : layout.carry) {
    carry = ledger.book<float>(layout.windows > 1 ? heads * kMatrixElements : 0);
  }
  layout.bytes = ledger.bytes();
  return layout;
}

}  // namespace flash_kda::cuda::sm90_split
