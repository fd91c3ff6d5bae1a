#include "cuda/portable/forward/layout.h"

#include <algorithm>

#include "cuda/portable/forward/config.h"
#include "cuda/portable/forward/sizes.h"

namespace flash_kda::cuda::portable {

Layout make_layout(int64_t tokens_total, int64_t heads, int64_t sequences, int64_t budget) {
  Layout layout;
  if (heads == 0 || sequences == 0) return layout;
  layout.slots = most_slots(tokens_total, sequences);
  const int64_t slot_bytes = heads * kRecordBytes;
  const int64_t most = std::max<int64_t>(budget / slot_bytes, 1);
  layout.windows = (layout.slots + most - 1) / most;
  layout.slots_per_window = (layout.slots + layout.windows - 1) / layout.windows;

  // Booked in full even where equal windows need less, or the size would not be monotone in heads.
  WorkspaceLedger ledger;
  layout.records =
      ledger.book<unsigned char>(std::min(layout.slots * slot_bytes, std::max(budget, slot_bytes)));
  layout.bounds = ledger.book<int64_t>(sequences + 1);
  layout.first_slots = ledger.book<int32_t>(sequences + 1);
  layout.slot_sequences = ledger.book<int32_t>(layout.slots);
  layout.order = ledger.book<int32_t>(std::min<int64_t>(sequences, kMostSorted));
  const int64_t carried = layout.windows > 1 ? heads * kHeadDim : 0;  // V rows
  for (int i = 0; i < 2; ++i) {
    layout.carry_state[i] = ledger.book<float>(carried * kHeadDim);
    layout.carry_unit[i] = ledger.book<float>(carried);
    layout.carry_bits[i] = ledger.book<uint32_t>(carried * 4);
  }
  layout.bytes = ledger.bytes();
  return layout;
}

}  // namespace flash_kda::cuda::portable
