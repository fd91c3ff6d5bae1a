"""Performance cliffs met in the field: ratios of times on this GPU, with --run-slow.

The benchmark driver has the absolute figures; these are the shapes of the curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import support
import torch
from flash_kda.cases import Inputs
from flash_kda.cli import machine, peers, timing

pytestmark = pytest.mark.slow

BUDGET_SECONDS = 0.3


def _draw(line: str) -> Inputs:
    return support.cases.make_inputs(support.case(line), "cuda", "cuda")


def _call(inputs: Inputs) -> Callable[[], object]:
    return machine.forced_call(None, inputs.kwargs())


def _seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    return timing.cuda_seconds(calls, None, BUDGET_SECONDS)


@pytest.mark.parametrize("tokens", [65536, 262144])
def test_one_long_sequence(tokens: int) -> None:
    """Blocks only for sequences times heads leave the machine empty: slower than FLA's kernels
    (MoonshotAI/FlashKDA#8)."""
    missing = peers.missing_fla()
    if missing:
        pytest.skip(missing)
    inputs = _draw(f"1x{tokens} 16 fla-init fp32 fp32")
    times = _seconds({"ours": _call(inputs), "fla": lambda: peers.fla_triton(inputs)})
    assert times["ours"] <= times["fla"]


def test_cost_of_a_token_among_many_sequences() -> None:
    """Every block scanned cu_seqlens from its start (MoonshotAI/FlashKDA#13, #29)."""
    few = _draw("8*1024 96 bench fp32 fp32")
    seconds_few = _seconds({"few": _call(few)})["few"]
    del few
    many = _draw("256*1024 96 bench fp32 fp32")
    seconds_many = _seconds({"many": _call(many)})["many"]
    assert seconds_many / 256 <= 1.15 * seconds_few / 8


# A miss: cu_seqlens is not the host's to read, which knows the mean length alone.
HIDDEN_LONG_SEQUENCES = "2000-3000-100x30-h12"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CHOICES = [
    pytest.param(
        one,
        id=one.name,
        marks=[pytest.mark.xfail(HOPPER, reason="1.25 on an H200 (docs/hopper.md)", strict=True)]
        if one.name == HIDDEN_LONG_SEQUENCES
        else [],
    )
    for one in support.cases.load("choice")
]


@pytest.mark.parametrize("one", CHOICES)
def test_choice_of_the_implementation(one: support.cases.Case) -> None:
    """An automatic choice made short calls ten times slower after an upgrade
    (flashinfer-ai/flashinfer#4607): it is within a tenth of the best forced one."""
    inputs = support.cases.make_inputs(one, "cuda", "cuda")
    accepted = machine.able(inputs.kwargs())
    calls = {name: machine.forced_call(name, inputs.kwargs()) for name in accepted}
    times = _seconds({"automatic": _call(inputs), **calls})
    best = min(times[name] for name in accepted)
    assert times["automatic"] <= 1.1 * best, times


def test_skewed_lengths() -> None:
    """Short sequences beside a long one hide behind it (NVIDIA/cudnn-frontend#1017)."""
    skewed = _draw("30000,100*64 12 bench fp32 fp32")
    alone = support.solo(skewed, 0)
    alone = replace(alone, out=torch.empty_like(alone.out))
    times = _seconds({"skewed": _call(skewed), "alone": _call(alone)})
    assert times["skewed"] <= 1.3 * times["alone"]
