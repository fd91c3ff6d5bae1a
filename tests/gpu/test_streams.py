"""Order and repetition on the GPU: streams, threads, devices, graphs, memory that is reused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import flash_kda
import pytest
import support
import torch
from flash_kda.cases import Inputs
from support import Result, Target

ITERATIONS_ENV = (
    "FLASH_KDA_TEST_ITERATIONS"  # of the test under memory traffic; 10000 for a release
)
CALLS_IN_A_THREAD = 20
SLOW_PRODUCER_CYCLES = 50_000_000  # about 30 ms

LINES = [
    "1x1000 4 randn fp32 fp32",
    "13,0,547,204,96 3 bench none fp32",
    "2x65 2 randn bf16 bf16",
    "1,0,2,1,0,3,1,0 6 randn fp32 fp32",  # short enough for a loop over tokens
]


@pytest.fixture(params=LINES)
def line(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_same_bits_fifty_times(target: Target, line: str) -> None:
    """Results that depend on the order in which blocks or warps get on."""
    inputs = target.make(line)
    first = target.run(inputs)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        different += _differences(target.run(inputs), first)
    assert different.item() == 0


def _differences(a: Result, b: Result) -> torch.Tensor:
    """How many elements differ, without waiting for the device."""
    count = (support.bits(a.out) != support.bits(b.out)).sum()
    if a.final is not None:
        count = count + (support.bits(a.final) != support.bits(b.final)).sum()
    return count


@pytest.fixture
def traffic() -> Iterator[torch.cuda.Stream]:
    """A stream that moves memory about for as long as work is put on it."""
    stream = torch.cuda.Stream()
    yield stream
    torch.cuda.synchronize()


def test_repeats_under_memory_traffic(target: Target, traffic: torch.cuda.Stream) -> None:
    """Missing fences between the ways to shared memory show stale state once in thousands of runs
    (MoonshotAI/FlashKDA#24, #25)."""
    source = torch.ones(1 << 26, dtype=torch.uint8, device="cuda")
    sink = torch.empty_like(source)
    inputs = target.make(
        "1,0,2,1,0,3,1,0 6 randn none fp32"
        if target.implementation == "cuda.recurrent"
        else "100,0,33,0,0,64,7 6 randn none fp32"
    )
    first = target.run(inputs)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(int(os.environ.get(ITERATIONS_ENV, "300"))):
        with torch.cuda.stream(traffic):
            sink.copy_(source)
        different += _differences(target.run(inputs), first)
        if i % 100 == 99:  # keeps the queues short
            torch.cuda.synchronize()
    assert different.item() == 0


def test_arguments_given_up_after_the_call(target: Target) -> None:
    """A kernel that still reads metadata which the caller has freed and overwritten
    (vllm-project/vllm#54317)."""
    inputs = target.make("1,0,2,1,0,3,1,0 6 randn fp32 fp32")
    expected = target.run(inputs)
    lengths = inputs.cu_seqlens.tolist()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        final = torch.empty_like(inputs.final_state)
        out = target.call(
            inputs,
            out=None,
            final_state=final,
            cu_seqlens=torch.tensor(lengths).to("cuda", non_blocking=True),
            initial_state=inputs.initial_state.clone(),
        )
        for size in (len(lengths) * 8, inputs.initial_state.numel() * 4, 1 << 20):
            torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
        different += _differences(Result(out, final), expected)
    assert different.item() == 0


def test_side_stream_after_a_slow_producer(target: Target, line: str) -> None:
    """Launches on the legacy stream run before the producer on the current one is done
    (thu-ml/SageAttention#371)."""
    inputs = target.make(line)
    expected = target.run(inputs)
    late = replace(
        inputs.fresh(), **{n: torch.full_like(getattr(inputs, n), torch.nan) for n in ("q", "v")}
    )
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.call(late).clone()  # the allocator gets the stream's memory before it is busy
    torch.cuda.synchronize()
    late.out.fill_(torch.nan)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_PRODUCER_CYCLES)
        late.q.copy_(inputs.q)
        late.v.copy_(inputs.v)
        target.call(late)
        copied = late.out.clone()  # a consumer on the same stream
    assert not side.query(), "the call has waited for the device"
    side.synchronize()
    support.check_same(Result(copied, late.final_state), expected)


def test_two_streams_at_once(target: Target, line: str) -> None:
    """Two calls that share hidden memory (same report)."""
    both = [target.make(line), target.make(line)]
    both[1].q.copy_(both[1].k)
    expected = [target.run(inputs) for inputs in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results: list[list[Result]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(target.run(both[i]))
    torch.cuda.synchronize()
    for i in range(2):
        for result in results[i]:
            support.check_same(result, expected[i])


def _run_in_thread(inputs: Inputs, device: int, results: list[Result]) -> None:
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        for _ in range(CALLS_IN_A_THREAD):
            fresh = inputs.fresh()
            flash_kda.fwd(**fresh.kwargs())
            results.append(Result(fresh.out, fresh.final_state))
        torch.cuda.current_stream().synchronize()


def _in_threads(target: Target, calls: list[tuple[Inputs, int]]) -> list[list[Result]]:
    results: list[list[Result]] = [[] for _ in calls]
    torch.cuda.synchronize()
    with support.forced(target.implementation):
        threads = [
            threading.Thread(target=_run_in_thread, args=(inputs, device, kept))
            for (inputs, device), kept in zip(calls, results, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(kept) for kept in results] == [CALLS_IN_A_THREAD] * len(calls), "a thread raised"
    return results


def test_two_threads_on_one_device(target: Target, line: str) -> None:
    """The same class with a thread for each."""
    both = [target.make(line), target.make(line)]
    both[1].q.copy_(both[1].k)
    expected = [target.run(inputs) for inputs in both]
    for results, right in zip(_in_threads(target, [(i, 0) for i in both]), expected, strict=True):
        for result in results:
            support.check_same(result, right)


# --- devices -------------------------------------------------------------------------------------


def test_another_device_than_the_current_one(target: Target, line: str) -> None:
    """Tensors on cuda:1 while cuda:0 is current crashed (flashinfer-ai/flashinfer#452). The current
    device stays the current one."""
    last = torch.cuda.device_count() - 1
    inputs = target.make(line)
    expected = target.run(inputs)
    assert torch.cuda.current_device() == 0
    if last == 0:
        pytest.skip("one GPU: only that the current device stays the same was seen")
    there = inputs.to(f"cuda:{last}")
    result = target.run(there)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(last)
    support.check_same(Result(result.out.cuda(0), result.final.cuda(0)), expected)
    here, far = _in_threads(target, [(inputs, 0), (there, last)])
    for result in here + [Result(r.out.cuda(0), r.final.cuda(0)) for r in far]:
        support.check_same(result, expected)


def test_tensors_of_two_devices(target: Target) -> None:
    """One tensor left on the host, or on another GPU, is an error that names it."""
    inputs = target.make("1x7 2 randn fp32 fp32")
    others = ["cpu", *(f"cuda:{i}" for i in range(1, min(2, torch.cuda.device_count())))]
    for device in others:
        for name in ("k", "beta", "A_log", "initial_state", "final_state"):
            moved = {name: getattr(inputs, name).to(device)}
            words = (f"{name}:", "device cuda:0")
            support.expect_error(target, inputs, moved, ValueError, *words)


# --- graphs --------------------------------------------------------------------------------------

# T, N, and the offsets that replays get.
OFFSETS = {
    "long": (300, [[0, 100, 100, 300], [0, 0, 1, 299], [0, 64, 192, 256], [0, 0, 0, 0]]),
    "short": (8, [[0, 1, 1, 3, 8, 8], [0, 0, 0, 0, 0, 7], [0, 2, 4, 6, 8, 8], [0, 0, 0, 0, 0, 0]]),
}


@pytest.mark.parametrize("own_workspace", [True, False])
@pytest.mark.parametrize("lengths", OFFSETS)
def test_graph_replays_with_other_contents(
    target: Target, lengths: str, own_workspace: bool
) -> None:
    """A replayed graph kept offsets, states or pointers of its capture (vllm-project/vllm#52531,
    sgl-project/sglang#37902): everything is overwritten in place, outputs are poisoned."""
    tokens, choices = OFFSETS[lengths]
    packed = ",".join(str(b - a) for a, b in zip(choices[0], choices[0][1:], strict=False))
    static = target.make(f"{packed}+{tokens - choices[0][-1]} 3 randn fp32 fp32").fresh()
    size = flash_kda.get_workspace_size(tokens, 3, len(choices[0]) - 1)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if own_workspace else None
    target.run(static)  # skips where the implementation refuses
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.call(static, workspace=workspace)
    for i in range(10):
        for name in ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias"):
            getattr(static, name).normal_()
        static.cu_seqlens.copy_(torch.tensor(choices[i % len(choices)]))
        static.out.copy_(support.sentinels_like(static.out))
        static.final_state.fill_(torch.nan)
        if workspace is not None:
            workspace.fill_(0xFF)
        eager = support.clone(static)
        graph.replay()
        target.call(eager)
        support.check_same(
            Result(static.out, static.final_state), Result(eager.out, eager.final_state)
        )
        target.check(static, Result(static.out, static.final_state))


FIRST_CALL_CAPTURED = """
import support, torch
target = support.Target({implementation!r}, "cuda")
inputs = target.make({line!r}).fresh()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    target.call(inputs)
graph.replay()
target.check(inputs, support.Result(inputs.out, inputs.final_state))
print("captured")
"""


def test_first_call_is_captured(target: Target) -> None:
    """Compiling, loading or setting up at the first call fails inside a capture
    (vllm-project/vllm#55350): a fresh process captures at once."""
    short = target.implementation == "cuda.recurrent"
    line = "1,0,2,1 2 randn fp32 fp32" if short else "13,0,57 2 randn fp32 fp32"
    script = FIRST_CALL_CAPTURED.format(implementation=target.implementation, line=line)
    path = os.pathsep.join([os.path.dirname(support.__file__), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "captured" in done.stdout, done.stdout + done.stderr


# --- compiled ------------------------------------------------------------------------------------


def test_compiled_by_inductor(target: Target) -> None:
    """One graph for all T, with kernels of the compiler's before and after
    (Dao-AILab/flash-attention#849, deepseek-ai/FlashMLA#180)."""

    def layer(inputs: Inputs) -> torch.Tensor:
        out = torch.empty_like(inputs.v)
        with torch.no_grad():
            flash_kda.fwd(
                *(inputs.q * 0.5, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.scale, out),
                *(inputs.A_log, inputs.dt_bias, inputs.lower_bound, inputs.initial_state),
                inputs.final_state,
            )
        return out * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    lengths = (3, 5, 7) if target.implementation == "cuda.recurrent" else (20, 70, 131)
    with support.forced(target.implementation):
        for tokens in lengths:
            inputs = target.make(f"2x{tokens} 2 randn fp32 fp32")
            mine, theirs = inputs.fresh(), inputs.fresh()
            assert support.same_bits(compiled(mine), layer(theirs))
            assert support.same_bits(mine.final_state, theirs.final_state)


# --- architectures -------------------------------------------------------------------------------

NO_CODE_FOR_THE_DEVICE = """
import flash_kda, torch
rows = torch.empty(1, 7, 2, 128, dtype=torch.bfloat16, device="cuda")
beta = torch.empty(1, 7, 2, dtype=torch.bfloat16, device="cuda")
for verdict in flash_kda.explain(rows, rows, rows, rows, beta, 1.0, lower_bound=-5.0):
    print(verdict)
"""


def test_device_that_is_not_in_the_build() -> None:
    """ "No kernel image is available" tells nobody what to do (state-spaces/mamba#40,
    QwenLM/FlashQLA#27): the reason names the device and the architectures in the build. A driver
    that has to compile PTX finds none in this build, as on a device of another architecture."""
    done = subprocess.run(
        [sys.executable, "-c", NO_CODE_FOR_THE_DEVICE],
        env={**os.environ, "CUDA_FORCE_PTX_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    reasons = [line for line in done.stdout.splitlines() if line.startswith("cuda.")]
    assert reasons, done.stderr
    if any("accepted" in reason for reason in reasons):
        pytest.skip("this driver takes the binary code all the same")
    for reason in reasons:
        assert torch.cuda.get_device_name() in reason
        for arch in flash_kda._ctypes.built_cuda_archs():
            assert arch in reason
