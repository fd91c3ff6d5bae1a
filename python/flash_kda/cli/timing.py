"""Times of calls, on the CPU by its clock and on a GPU by events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]

_WARM_UPS = 3
_ROUNDS = 5  # every call has its turn in each, so that a drift of clocks meets all alike
_MIN_CALLS, _MAX_CALLS = 3, 30  # of one call in a round
_SETTLE_SECONDS = 0.1  # for threads of another OpenMP runtime to stop spinning
_FLUSH_BYTES_PER_L2 = 4
_CLOCK_HZ = 2.0e9  # about a GPU's: only for how long to hold the queue back
_LOOP_SECONDS = 3e-5  # of the host for one turn of the timed loop, beside the call


def cpu_seconds(calls: Mapping[str, Call], budget: float) -> dict[str, float]:
    """The best time of each call, which other work on the machine disturbs least.

    ``budget`` is what each of them may take together, in seconds.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            time.sleep(_SETTLE_SECONDS)
            samples[name] += _cpu_samples(call, budget / _ROUNDS)
    return {name: min(found) for name, found in samples.items()}


def _cpu_samples(call: Call, budget: float) -> list[float]:
    samples: list[float] = []
    while not samples or (sum(samples) < budget and len(samples) < _MAX_CALLS):
        samples.append(_seconds_of(call))
    return samples


def _seconds_of(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def host_seconds(call: Call, calls: int = 200, rounds: int = 20) -> float:
    """The time that one call keeps the host, the best mean of many; a GPU is not waited for."""
    best = float("inf")
    for _ in range(rounds):
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - began) / calls)
    synchronize()
    return best


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Flush:
    """Empties the L2 cache by writing more than it holds."""

    def __init__(self, device: torch.device) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(
            _FLUSH_BYTES_PER_L2 * max(l2, 1 << 26), dtype=torch.uint8, device=device
        )

    def __call__(self) -> None:
        self._buffer.zero_()


def cuda_seconds(calls: Mapping[str, Call], flush: Flush | None, budget: float) -> dict[str, float]:
    """The median time on the GPU of each call, with the L2 emptied before each or left warm.

    The queue is held back while the host fills it, so that no gap between launches is timed
    unless one call keeps the host longer than it keeps the GPU.
    """
    counts, holds = {}, {}
    for name, call in calls.items():
        for _ in range(_WARM_UPS):
            call()
        host = host_seconds(call, calls=5, rounds=1)
        whole = _events_of(call, None, 3, 0)
        counts[name] = int(min(_MAX_CALLS, max(_MIN_CALLS, budget / _ROUNDS / max(whole))))
        holds[name] = int(1.5 * (host + _LOOP_SECONDS) * counts[name] * _CLOCK_HZ)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            samples[name] += _events_of(call, flush, counts[name], holds[name])
    return {name: statistics.median(found) for name, found in samples.items()}


def _events_of(call: Call, flush: Flush | None, count: int, hold: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    if hold:
        torch.cuda._sleep(hold)
    for begin, end in pairs:
        if flush is not None:
            flush()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def peak_bytes(call: Call, device: torch.device) -> int:
    """The memory that torch hands out during one call at most, beside what it has already."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def kernel_names(call: Call) -> list[str]:
    """What ran on the GPU in one call, in order, copies and fills of memory included."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == DeviceType.CUDA]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]
