// Every CUDA implementation as part of a system: graphs, streams, repetition, sizes beyond 32 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "gpu/cpp/target.h"

namespace flash_kda {
namespace {

using testing::check_cuda;
using testing::DeviceCall;
using testing::Exact;
using testing::exact_forward;
using testing::ForwardInputs;
using testing::output_error;
using testing::Target;
using testing::Tolerance;

using System = testing::GpuTest;
FLASH_KDA_GPU_SUITE(System);

class Stream {
 public:
  Stream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { (void)cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

TEST_P(System, RepeatsBitForBit) {
  ForwardInputs x(1, 700, 8, {0, 300, 301, 700});
  ForwardArgs args = x.args();
  DeviceCall call(args);
  queue(&call);
  call.fetch();
  const std::vector<uint16_t> out = x.out;
  const std::vector<float> state = x.final_state;
  for (int i = 0; i < 50; ++i) {
    queue(&call);
    call.fetch();
    ASSERT_EQ(x.out, out) << i;
    ASSERT_EQ(x.final_state, state) << i;
  }
}

TEST_P(System, GraphReplaysWithNewContents) {
  ForwardInputs x(1, 200, 2, {0, 50, 120, 200});
  ForwardArgs args = x.args();
  DeviceCall call(args);
  const Stream stream;
  ForwardProblem p;
  call.args().stream = stream.get();
  ASSERT_TRUE(call.problem(&p).ok());
  const int64_t bytes = GetParam().workspace_bytes(p.tokens_total(), p.heads, p.sequences);
  void* workspace = call.workspace(bytes);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  const Status status = GetParam().run(p, workspace, bytes);
  check_cuda(cudaStreamEndCapture(stream.get(), &graph));
  ASSERT_TRUE(status.ok()) << status.message();
  check_cuda(cudaGraphInstantiate(&replay, graph, 0));
  const std::vector<std::vector<int64_t>> contents = {
      {0, 50, 120, 200}, {0, 0, 33, 200}, {0, 199, 200, 200}};
  for (uint32_t i = 0; i < contents.size(); ++i) {
    ForwardInputs next(1, 200, 2, contents[i], 100 + i);
    x.q = next.q;
    x.k = next.k;
    x.v = next.v;
    x.g = next.g;
    x.beta = next.beta;
    x.initial_state = next.initial_state;
    x.cu_seqlens = next.cu_seqlens;
    std::fill(x.out.begin(), x.out.end(), ForwardInputs::kPoison);
    args = x.args();  // the same memory: the vectors have kept their sizes
    const Exact exact = exact_forward(args);
    DeviceCall fresh(args);
    queue(&fresh);
    fresh.fetch();
    const std::vector<uint16_t> out = x.out;
    const std::vector<float> state = x.final_state;
    EXPECT_LE(output_error(args, exact), Tolerance{}.output);
    // The mirror of `call` belongs to the vectors it was made from; bring the contents there.
    for (const auto& [host, device] :
         {std::pair<const TensorRef&, const TensorRef&>{args.q, call.args().q},
          {args.k, call.args().k},
          {args.v, call.args().v},
          {args.g, call.args().g},
          {args.beta, call.args().beta},
          {args.initial_state, call.args().initial_state},
          {args.cu_seqlens, call.args().cu_seqlens}}) {
      int64_t count = dtype_size(host.dtype);
      for (int axis = 0; axis < host.rank; ++axis) count *= host.shape[axis];
      check_cuda(
          cudaMemcpy(device.data, host.data, static_cast<size_t>(count), cudaMemcpyHostToDevice));
    }
    check_cuda(cudaMemset(call.args().out.data, 0xff, x.out.size() * 2));
    check_cuda(cudaGraphLaunch(replay, stream.get()));
    check_cuda(cudaStreamSynchronize(stream.get()));
    std::vector<uint16_t> replayed(out.size());
    std::vector<float> replayed_state(state.size());
    check_cuda(
        cudaMemcpy(replayed.data(), call.args().out.data, out.size() * 2, cudaMemcpyDeviceToHost));
    check_cuda(cudaMemcpy(replayed_state.data(), call.args().final_state.data, state.size() * 4,
                          cudaMemcpyDeviceToHost));
    EXPECT_EQ(replayed, out) << "replay " << i;
    EXPECT_EQ(replayed_state, state) << "replay " << i;
  }
  check_cuda(cudaGraphExecDestroy(replay));
  check_cuda(cudaGraphDestroy(graph));
}

TEST_P(System, TwoStreamsAtOnce) {
  ForwardInputs a(1, 1500, 4, {}, 1), b(2, 700, 4, {}, 2);
  ForwardArgs args_a = a.args(), args_b = b.args();
  DeviceCall call_a(args_a), call_b(args_b);
  const Stream stream_a, stream_b;
  queue(&call_a);
  queue(&call_b);
  call_a.fetch();
  call_b.fetch();
  const ForwardInputs alone_a = a, alone_b = b;
  for (int i = 0; i < 20; ++i) {
    queue(&call_a, stream_a.get());
    queue(&call_b, stream_b.get());
    call_a.fetch();
    call_b.fetch();
    ASSERT_EQ(a.out, alone_a.out);
    ASSERT_EQ(b.out, alone_b.out);
    ASSERT_EQ(a.final_state, alone_a.final_state);
    ASSERT_EQ(b.final_state, alone_b.final_state);
  }
}

// Tensors in device memory alone, for sizes that a host copy would make slow.
class DeviceProblem {
 public:
  DeviceProblem(int64_t batch, int64_t tokens, int64_t heads, const std::vector<int64_t>& offsets)
      : batch_(batch), tokens_(tokens), heads_(heads) {
    const int64_t rows = batch * tokens * heads;
    for (TensorRef* tensor : {&args_.q, &args_.k, &args_.v, &args_.g, &args_.out}) {
      *tensor = dense_tensor(allocate(rows * kHeadDim * 2), DType::kBFloat16,
                             {batch, tokens, heads, kHeadDim}, kDevice);
    }
    args_.beta =
        dense_tensor(allocate(rows * 2), DType::kBFloat16, {batch, tokens, heads}, kDevice);
    const int64_t sequences = offsets.empty() ? batch : static_cast<int64_t>(offsets.size()) - 1;
    args_.final_state =
        dense_tensor(allocate(sequences * heads * kHeadDim * kHeadDim * 2), DType::kBFloat16,
                     {sequences, heads, kHeadDim, kHeadDim}, kDevice);
    if (!offsets.empty()) {
      args_.cu_seqlens = dense_tensor(allocate(static_cast<int64_t>(offsets.size()) * 8),
                                      DType::kInt64, {sequences + 1}, kDevice);
      check_cuda(cudaMemcpy(args_.cu_seqlens.data, offsets.data(), offsets.size() * 8,
                            cudaMemcpyHostToDevice));
    }
    args_.scale = 0.08838834764831845;
    args_.lower_bound = -5.0;
    fill();
  }
  ~DeviceProblem() {
    for (void* memory : memories_) (void)cudaFree(memory);
  }
  DeviceProblem(const DeviceProblem&) = delete;
  DeviceProblem& operator=(const DeviceProblem&) = delete;

  ForwardArgs& args() { return args_; }
  int64_t row_elements() const { return heads_ * kHeadDim; }

  void run(const Target& target) {
    ForwardProblem p;
    ASSERT_TRUE(validate(args_, &p).ok());
    const int64_t bytes = target.workspace_bytes(p.tokens_total(), p.heads, p.sequences);
    void* workspace = allocate(bytes);
    const Status status = target.run(p, workspace, bytes);
    ASSERT_TRUE(status.ok()) << status.message();
    check_cuda(cudaDeviceSynchronize());
  }

  // bf16 elements [begin, begin + count) of a tensor.
  static std::vector<uint16_t> part(const TensorRef& tensor, int64_t begin, int64_t count) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    check_cuda(cudaMemcpy(values.data(), static_cast<uint16_t*>(tensor.data) + begin,
                          values.size() * 2, cudaMemcpyDeviceToHost));
    return values;
  }

  // This problem's inputs from token `begin` of another's (B = 1).
  void take_inputs(const DeviceProblem& from, int64_t begin) {
    const int64_t offset = begin * row_elements();
    const auto bytes = static_cast<size_t>(tokens_ * row_elements() * 2);
    for (auto tensor : {&ForwardArgs::q, &ForwardArgs::k, &ForwardArgs::v, &ForwardArgs::g}) {
      check_cuda(cudaMemcpy((args_.*tensor).data,
                            static_cast<uint16_t*>((from.args_.*tensor).data) + offset, bytes,
                            cudaMemcpyDeviceToDevice));
    }
    check_cuda(cudaMemcpy(args_.beta.data,
                          static_cast<uint16_t*>(from.args_.beta.data) + begin * heads_,
                          static_cast<size_t>(tokens_ * heads_ * 2), cudaMemcpyDeviceToDevice));
  }

 private:
  static constexpr Device kDevice = {DeviceType::kCuda, 0};

  void* allocate(int64_t bytes) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 256))));
    memories_.push_back(memory);
    return memory;
  }

  // Random numbers, repeated with a period that shares no factor with a row.
  void fill() {
    constexpr size_t kPeriod = 3999971;
    uint32_t seed = 1;
    for (const TensorRef* tensor : {&args_.q, &args_.k, &args_.v, &args_.g, &args_.beta}) {
      std::mt19937 engine(seed++);
      std::normal_distribution<float> normal;
      const std::vector<uint16_t> block =
          testing::bf16_vector(kPeriod, [&] { return normal(engine); });
      size_t count = 1;
      for (int axis = 0; axis < tensor->rank; ++axis) {
        count *= static_cast<size_t>(tensor->shape[axis]);
      }
      auto* data = static_cast<uint16_t*>(tensor->data);
      size_t done = std::min(count, kPeriod);
      check_cuda(cudaMemcpy(data, block.data(), done * 2, cudaMemcpyHostToDevice));
      while (done < count) {
        const size_t more = std::min(done, count - done);
        check_cuda(cudaMemcpy(data + done, data, more * 2, cudaMemcpyDeviceToDevice));
        done += more;
      }
    }
    check_cuda(cudaMemset(args_.out.data, 0xff,
                          static_cast<size_t>(batch_ * tokens_ * row_elements() * 2)));
  }

  int64_t batch_, tokens_, heads_;
  ForwardArgs args_;
  std::vector<void*> memories_;
};

TEST(Workspace, GrowsWithEveryArgument) {
  for (const ForwardImpl* impl : forward_impls()) {
    const auto bytes_of = impl->workspace_bytes;
    for (int64_t tokens = 0; tokens < 300; tokens += 7) {
      for (int64_t heads : {1, 2, 3, 50, 96, 36000, 37000, 39000, 40000}) {
        for (int64_t sequences : {1, 2, 5, 40, 1000}) {
          const int64_t bytes = bytes_of(tokens, heads, sequences);
          EXPECT_LE(bytes, bytes_of(tokens + 1, heads, sequences)) << impl->name;
          EXPECT_LE(bytes, bytes_of(tokens, heads + 1, sequences)) << impl->name;
          EXPECT_LE(bytes, bytes_of(tokens, heads, sequences + 1)) << impl->name;
        }
      }
    }
  }
}

// Not in segments that a test chooses, whose maps would outgrow the workspace, and not token by
// token.
using Sizes = testing::GpuTest;
INSTANTIATE_TEST_SUITE_P(
    All, Sizes,
    ::testing::Values(testing::whole_target("portable", cuda::portable::kForward),
                      testing::whole_target("sm90", cuda::sm90::kForward),
                      testing::whole_target("split", cuda::sm90_split::kForward)),
    [](const ::testing::TestParamInfo<Target>& i) { return i.param.name; });

// Offsets beyond 2^31 elements: the last sequence alone gives the same bits.
TEST_P(Sizes, MoreThanTwoBillionElements) {
  constexpr int64_t kTokens = 174800, kLast = 1037, kHeads = 96;
  DeviceProblem all(1, kTokens, kHeads, {0, kTokens - kLast, kTokens});
  all.run(GetParam());
  DeviceProblem last(1, kLast, kHeads, {});
  last.take_inputs(all, kTokens - kLast);
  last.run(GetParam());
  const int64_t row = all.row_elements(), state = kHeads * kHeadDim * kHeadDim;
  EXPECT_EQ(DeviceProblem::part(all.args().out, (kTokens - kLast) * row, kLast * row),
            DeviceProblem::part(last.args().out, 0, kLast * row));
  EXPECT_EQ(DeviceProblem::part(all.args().final_state, state, state),
            DeviceProblem::part(last.args().final_state, 0, state));
}

TEST_P(Sizes, MoreThan65535SequencesTimesHeads) {
  constexpr int64_t kSequences = 2050, kLength = 16, kHeads = 32;
  const auto offsets = [](int64_t sequences) {
    std::vector<int64_t> values;
    for (int64_t n = 0; n <= sequences; ++n) values.push_back(n * kLength);
    return values;
  };
  DeviceProblem all(1, kSequences * kLength, kHeads, offsets(kSequences));
  all.run(GetParam());
  for (int64_t half = 0; half < 2; ++half) {
    DeviceProblem part(1, kSequences / 2 * kLength, kHeads, offsets(kSequences / 2));
    part.take_inputs(all, half * kSequences / 2 * kLength);
    part.run(GetParam());
    const int64_t rows = kSequences / 2 * kLength * part.row_elements();
    ASSERT_EQ(DeviceProblem::part(all.args().out, half * rows, rows),
              DeviceProblem::part(part.args().out, 0, rows));
    const int64_t states = kSequences / 2 * kHeads * kHeadDim * kHeadDim;
    ASSERT_EQ(DeviceProblem::part(all.args().final_state, half * states, states),
              DeviceProblem::part(part.args().final_state, 0, states));
  }
}

// 70000 sequences of one token give what 70000 batch entries of one token give.
TEST_P(Sizes, ManySingleTokens) {
  constexpr int64_t kSequences = 70000;
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= kSequences; ++n) offsets.push_back(n);
  DeviceProblem packed(1, kSequences, 1, offsets), batch(kSequences, 1, 1, {});
  packed.run(GetParam());
  batch.run(GetParam());
  EXPECT_EQ(DeviceProblem::part(packed.args().out, 0, kSequences * kHeadDim),
            DeviceProblem::part(batch.args().out, 0, kSequences * kHeadDim));
  const int64_t states = kSequences * kHeadDim * kHeadDim;
  EXPECT_EQ(DeviceProblem::part(packed.args().final_state, 0, states),
            DeviceProblem::part(batch.args().final_state, 0, states));
}

}  // namespace
}  // namespace flash_kda
