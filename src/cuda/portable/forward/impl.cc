// cuda.portable: refusals, workspace and the sequence of launches.
#include "cuda/portable/forward/impl.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "cuda/common/call_scope.h"
#include "cuda/common/device.h"
#include "cuda/portable/forward/config.h"
#include "cuda/portable/forward/launch.h"
#include "cuda/portable/forward/layout.h"
#include "cuda/portable/forward/sizes.h"
#include "ops/forward/impls.h"

namespace flash_kda::cuda::portable {
namespace {

constexpr int kMinCapability = 80;
constexpr int kMostParts = 4;

Layout layout_of(const ForwardProblem& p, const Options& options) {
  return make_layout(p.tokens_total(), p.heads, p.sequences, options.record_budget);
}

Status accepts(const ForwardProblem& p) {
  FLASH_KDA_RETURN_IF_ERROR(check_problem(p));
  const DeviceProperties* device = nullptr;
  FLASH_KDA_RETURN_IF_ERROR(device_properties(p.device.index, &device));
  if (device->capability() < kMinCapability) {
    return Status::unsupported("expected a device of compute capability 8.0 or higher, got " +
                               device_text(p.device.index, *device));
  }
  FLASH_KDA_RETURN_IF_ERROR(check_built_for(p.device.index, prepare_entry()));
  const Layout layout = layout_of(p, {});
  const int64_t blocks =
      std::max(layout.slots_per_window * p.heads,
               sequences_per_window(p.sequences, layout.slots_per_window) * p.heads * kMostParts);
  return check_counts(layout.slots, blocks);
}

int64_t workspace_bytes(int64_t tokens_total, int64_t heads, int64_t sequences) {
  return workspace_bytes_with({}, tokens_total, heads, sequences);
}

// Blocks that share the V rows of a head. Each reads all its records, so few spare the L2 cache;
// but as long as they all run at once, more are faster.
int choose_row_parts(const Options& options, int64_t sequence_heads,
                     const DeviceProperties& device) {
  if (options.row_parts != 0) return options.row_parts;
  const int64_t room = int64_t{kBlocksPerMultiprocessor} * device.multiprocessors;
  return sequence_heads * kMostParts <= room ? kMostParts : kMostParts / 2;
}

Carry carry_of(const Layout& layout, int64_t boundary, void* workspace) {
  const int64_t turn = boundary % 2;
  return {layout.carry_state[turn].in(workspace), layout.carry_unit[turn].in(workspace),
          layout.carry_bits[turn].in(workspace)};
}

Status run(const ForwardProblem& p, void* workspace, int64_t workspace_size) {
  return run_with({}, p, workspace, workspace_size);
}

}  // namespace

int64_t workspace_bytes_with(const Options& options, int64_t tokens_total, int64_t heads,
                             int64_t sequences) {
  return make_layout(tokens_total, heads, sequences, options.record_budget).bytes;
}

Status run_with(const Options& options, const ForwardProblem& p, void* workspace,
                int64_t workspace_size) {
  const Layout layout = layout_of(p, options);
  if (layout.slots == 0) return {};
  CallScope scope;
  FLASH_KDA_RETURN_IF_ERROR(scope.enter(p, workspace_size, layout.bytes));
  auto* stream = static_cast<cudaStream_t>(p.stream);

  TilePlan plan = make_plan(p, layout.bounds.in(workspace), layout.first_slots.in(workspace),
                            layout.slot_sequences.in(workspace));
  if (p.cu_seqlens && layout.windows == 1 && p.sequences <= kMostSorted) {
    plan.order = layout.order.in(workspace);
  }
  if (p.cu_seqlens) FLASH_KDA_RETURN_IF_ERROR(launch_plan({p.cu_seqlens, plan}, stream));
  PrepareParams prepare = prepare_params(p, plan);
  RecurrenceParams recurrence;
  fill_params(p, plan, &recurrence);
  prepare.records = layout.records.in(workspace);
  recurrence.records = prepare.records;
  const int64_t sequences = sequences_per_window(p.sequences, layout.slots_per_window);
  const int row_parts = choose_row_parts(options, sequences * p.heads, scope.device());
  for (int64_t i = 0; i < layout.windows; ++i) {
    const int64_t begin = i * layout.slots_per_window;
    prepare.window = {
        static_cast<int32_t>(begin),
        static_cast<int32_t>(std::min(layout.slots_per_window, layout.slots - begin))};
    recurrence.window = prepare.window;
    recurrence.carry_in = carry_of(layout, i, workspace);
    recurrence.carry_out = carry_of(layout, i + 1, workspace);
    if (p.tokens > 0) FLASH_KDA_RETURN_IF_ERROR(launch_prepare(prepare, stream));
    FLASH_KDA_RETURN_IF_ERROR(
        launch_recurrence(recurrence, row_parts, static_cast<int32_t>(sequences), stream));
  }
  return {};
}

const ForwardImpl kForward = {"cuda.portable", accepts, workspace_bytes, run};

}  // namespace flash_kda::cuda::portable
