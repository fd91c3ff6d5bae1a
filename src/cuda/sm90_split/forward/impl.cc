// cuda.sm90_split: refusals, workspace and the sequence of launches.
#include "cuda/sm90_split/forward/impl.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <string>

#include "cuda/common/call_scope.h"
#include "cuda/common/device.h"
#include "cuda/portable/forward/launch.h"
#include "cuda/portable/forward/sizes.h"
#include "cuda/sm90_split/forward/cost.h"
#include "cuda/sm90_split/forward/launch.h"
#include "cuda/sm90_split/forward/layout.h"
#include "ops/forward/impls.h"

namespace flash_kda::cuda::sm90_split {
namespace {

Layout layout_with(const Options& options, int64_t tokens_total, int64_t heads, int64_t sequences) {
  const bool chosen = options.segment_chunks == 0;
  return make_layout(tokens_total, heads, sequences, options.record_budget,
                     chosen ? kLeastSegment : options.segment_chunks,
                     chosen ? 2 * kLeastSegment : options.segment_chunks,
                     chosen ? kMostMaps : std::numeric_limits<int64_t>::max());
}

Layout layout_of(const ForwardProblem& p, const Options& options) {
  return layout_with(options, p.tokens_total(), p.heads, p.sequences);
}

Status accepts(const ForwardProblem& p) {
  FLASH_KDA_RETURN_IF_ERROR(check_hopper(p, entry()));
  const Layout layout = layout_of(p, {});
  const int64_t blocks =
      std::max(layout.slots_per_window * p.heads,
               portable::sequences_per_window(p.sequences, layout.slots_per_window) * p.heads * 2);
  return portable::check_counts(layout.slots, blocks);
}

int64_t workspace_bytes(int64_t tokens_total, int64_t heads, int64_t sequences) {
  return workspace_bytes_with({}, tokens_total, heads, sequences);
}

Division division_of(const ForwardProblem& p, const Layout& layout, const Options& options,
                     const DeviceProperties& device) {
  const int64_t sequences = portable::sequences_per_window(p.sequences, layout.slots_per_window);
  Work work;
  work.chunks = layout.slots_per_window / sequences;
  work.pairs = sequences * p.heads;
  work.heads = p.heads;
  work.most_maps = layout.most_maps;
  work.multiprocessors = device.multiprocessors;
  work.even = !p.cu_seqlens;
  Division division =
      options.beside && fits_beside(work) ? divide_beside(work) : choose_division(work);
  if (options.segment_chunks != 0) division.segment_chunks = options.segment_chunks;
  if (options.groups != 0) division.groups = options.groups;
  if (division.groups == 2 || division.segment_chunks <= layout.slots_per_window) {
    division.preparing = 0;
  }
  return division;
}

Status run(const ForwardProblem& p, void* workspace, int64_t workspace_size) {
  return run_with({}, p, workspace, workspace_size);
}

}  // namespace

int64_t workspace_bytes_with(const Options& options, int64_t tokens_total, int64_t heads,
                             int64_t sequences) {
  return layout_with(options, tokens_total, heads, sequences).bytes;
}

Status run_with(const Options& options, const ForwardProblem& p, void* workspace,
                int64_t workspace_size) {
  const Layout layout = layout_of(p, options);
  if (layout.slots == 0) return {};
  CallScope scope;
  FLASH_KDA_RETURN_IF_ERROR(scope.enter(p, workspace_size, layout.bytes));
  auto* stream = static_cast<cudaStream_t>(p.stream);

  const TilePlan plan =
      portable::make_plan(p, layout.bounds.in(workspace), layout.first_slots.in(workspace),
                          layout.slot_sequences.in(workspace));
  if (p.cu_seqlens) {
    FLASH_KDA_RETURN_IF_ERROR(portable::launch_plan({p.cu_seqlens, plan}, stream));
  }
  const Division division = division_of(p, layout, options, scope.device());
  const int64_t sequences = portable::sequences_per_window(p.sequences, layout.slots_per_window);
  const int64_t cuts = layout.slots_per_window / division.segment_chunks;
  RecordParams records;
  records.prepare = portable::prepare_params(p, plan);
  records.prepare.records = layout.records.in(workspace);
  if (division.preparing > 0 && p.tokens > 0) records.ready = layout.ready.in(workspace);
  const int64_t chunks =
      p.cu_seqlens ? (layout.slots + p.sequences - 1) / p.sequences : portable::slots_of(p.tokens);
  records.piece = static_cast<int32_t>(
      std::min(cuts > 0 ? division.segment_chunks : chunks, layout.slots_per_window));
  SplitParams split;
  portable::fill_params(p, plan, &split);
  split.segments = {static_cast<int32_t>(division.segment_chunks),
                    static_cast<int32_t>(sequences + cuts)};
  if (cuts > 0 && split.segments.most * p.heads > layout.most_maps) {
    return Status::invalid_value("segment_chunks: expected longer segments, at most " +
                                 std::to_string(layout.most_maps) + " maps, got " +
                                 std::to_string(split.segments.most * p.heads));
  }
  split.records = records.prepare.records;
  split.ready = records.ready;
  split.maps = layout.maps.in(workspace);
  for (int64_t i = 0; i < layout.windows; ++i) {
    const int64_t begin = i * layout.slots_per_window;
    split.window = {static_cast<int32_t>(begin),
                    static_cast<int32_t>(std::min(layout.slots_per_window, layout.slots - begin))};
    records.prepare.window = split.window;
    split.carry_in = layout.carry[i % 2].in(workspace);
    split.carry_out = layout.carry[(i + 1) % 2].in(workspace);
    if (p.tokens > 0) {
      FLASH_KDA_RETURN_IF_ERROR(launch_records(records, division.preparing, stream));
    }
    if (cuts > 0) {
      FLASH_KDA_RETURN_IF_ERROR(launch_maps(split, stream));
      if (layout.slots_per_window > 2 * division.segment_chunks) {  // else two segments at most
        FLASH_KDA_RETURN_IF_ERROR(launch_merge(split, static_cast<int32_t>(sequences), stream));
      }
    }
    FLASH_KDA_RETURN_IF_ERROR(launch_recurrence(split, division.groups, stream));
  }
  return {};
}

const ForwardImpl kForward = {"cuda.sm90_split", accepts, workspace_bytes, run};

}  // namespace flash_kda::cuda::sm90_split
