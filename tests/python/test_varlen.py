"""Faults of shapes, of packed sequences and of buffers, met by users in the field."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import flash_kda
import pytest
import support
import torch
from flash_kda.cases import Inputs
from support import Target

STATES = ["fp32", "bf16"]


@pytest.mark.parametrize("initial", ["fp32", "bf16", "none"])
@pytest.mark.parametrize("final", STATES)
@pytest.mark.parametrize("lengths", ["0,5,0,16,0", "0,0,0", "0", "3*0,300,2*0"])
def test_empty_sequences(target: Target, lengths: str, initial: str, final: str) -> None:
    """Sequences without tokens hang a kernel that waits for their first chunk, or keep their final
    state unwritten (MoonshotAI/FlashKDA#29, #32)."""
    inputs = target.make(f"{lengths} 2 randn {initial} {final}")
    begin = time.monotonic()
    result = target.run_and_check(inputs)
    assert time.monotonic() - begin < 10
    empty = (inputs.cu_seqlens.diff() == 0).nonzero().flatten().tolist()
    assert empty
    for n in empty:
        if inputs.initial_state is None:
            assert (result.final[n] == 0).all()
        else:
            assert torch.equal(result.final[n], inputs.initial_state[n].to(result.final))


@pytest.mark.parametrize("initial", ["fp32", "none"])
def test_no_tokens(target: Target, initial: str) -> None:
    """The same class at fixed length: T = 0, B = 0 and cu_seqlens of no sequence."""
    inputs = target.make(f"3x0 2 randn {initial} fp32")
    final = target.run(inputs).final
    expected = torch.zeros_like(final) if initial == "none" else inputs.initial_state
    assert torch.equal(final, expected)
    assert target.run(target.make(f"0x7 2 randn {initial} fp32")).final.shape[0] == 0
    rows = target.make("1x7 2 randn none none")
    nothing = replace(rows, cu_seqlens=torch.zeros(1, dtype=torch.int64, device=target.device))
    out = support.sentinels_like(rows.out)
    assert target.call(replace(nothing, out=out)) is out
    assert support.same_bits(out, support.sentinels_like(out))


def test_fewer_tokens_than_sequences(target: Target) -> None:
    """A grid sized from the tokens loses sequences when most are empty
    (Dao-AILab/flash-attention#1619)."""
    inputs = target.make("777*0,1,222*0 1 randn fp32 fp32")
    result = target.run_and_check(inputs)
    untouched = torch.arange(1000, device=target.device) != 777
    assert torch.equal(result.final[untouched], inputs.initial_state[untouched])
    assert not torch.equal(result.final[777], inputs.initial_state[777])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("poisoned", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_stays_in_its_sequence(
    target: Target, packed: bool, poisoned: int, value: float
) -> None:
    """A tile that reaches over the end of a sequence multiplies its neighbour's NaN by zero
    (flashinfer-ai/flashinfer#942)."""
    inputs = target.make(f"{'13,27' if packed else '2x27'} 2 randn fp32 fp32")
    expected = target.run(inputs)
    spoiled = support.clone(inputs)
    bounds = [0, 13, 40]
    mine, other = _sequence(bounds, poisoned, packed), _sequence(bounds, 1 - poisoned, packed)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(spoiled, name)[mine] = value
    spoiled.initial_state[poisoned] = value
    result = target.run(spoiled)
    assert support.same_bits(result.out[other], expected.out[other])
    assert support.same_bits(result.final[1 - poisoned], expected.final[1 - poisoned])
    assert not torch.isfinite(result.final[poisoned]).all()


def _sequence(bounds: list[int], n: int, packed: bool) -> tuple[int | slice, ...]:
    return (0, slice(bounds[n], bounds[n + 1])) if packed else (n,)


@pytest.mark.parametrize("heads", [2, 5])
def test_nan_stays_in_its_head(target: Target, heads: int) -> None:
    """The same class across heads, which share rows of every tensor."""
    inputs = target.make(f"13,27,90 {heads} randn fp32 fp32")
    expected = target.run(inputs)
    spoiled = support.clone(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(spoiled, name)[:, :, 1] = math.nan
    spoiled.initial_state[:, 1] = math.nan
    spoiled.A_log[1] = math.nan
    spoiled.dt_bias[1] = math.nan
    result = target.run(spoiled)
    others = torch.arange(heads, device=target.device) != 1
    assert support.same_bits(result.out[:, :, others], expected.out[:, :, others])
    assert support.same_bits(result.final[:, others], expected.final[:, others])
    assert torch.isnan(result.out[:, :, 1]).all()


@pytest.mark.parametrize("line", ["1x130 3 randn fp32 bf16", "0,70,1,64,0 2 randn none fp32"])
def test_dirty_buffers(target: Target, line: str) -> None:
    """Rows that a kernel skips show what lay in the buffer: NaN of an earlier layer spreads
    (vllm-project/vllm#37442)."""
    inputs = target.make(line)
    expected = target.run_and_check(inputs)  # into NaN
    clean = inputs.fresh()
    clean.out.zero_()
    clean.final_state.zero_()
    needed = flash_kda.get_workspace_size(
        inputs.q.shape[0] * inputs.q.shape[1], inputs.q.shape[2], len(clean.final_state)
    )
    for fill in (0x00, 0xFF, 0x7F):  # zeros, NaN, huge numbers, in every dtype
        workspace = torch.full((needed + 4096,), fill, dtype=torch.uint8, device=target.device)
        out = target.call(clean, workspace=workspace)
        support.check_same(support.Result(out, clean.final_state), expected)
        assert (workspace[needed:] == fill).all(), "written beyond get_workspace_size"


def test_rows_of_no_sequence(target: Target) -> None:
    """Serving pads the tensors beyond the last sequence; rows there may hold anything and must be
    left alone (sgl-project/sgl-flash-attn#47, Ascend fla-npu#266)."""
    inputs = target.make("100+28 2 randn fp32 fp32")
    for name in ("q", "k", "v", "g", "beta"):
        getattr(inputs, name)[:, 100:] = math.nan
    inputs.out.copy_(support.sentinels_like(inputs.out))
    out = target.call(inputs)
    target.check(inputs, support.Result(out, inputs.final_state))
    assert support.same_bits(out[:, 100:], support.sentinels_like(out[:, 100:]))
    alone = support.tokens_slice(inputs, 0, 100, out=torch.empty_like(out[:, :100]))
    assert support.same_bits(target.run(alone).out, out[:, :100])


def test_batch_with_offsets(target: Target) -> None:
    """B > 1 together with cu_seqlens was silently wrong (fla-org/flash-linear-attention#837,
    #844)."""
    inputs = target.make("2x64 2 randn none none")
    offsets = torch.tensor([0, 64, 128], device=target.device)
    changes = {"cu_seqlens": offsets}
    support.expect_error(target, inputs, changes, ValueError, "cu_seqlens:", "B = 1", "B = 2")


@pytest.mark.parametrize("line", ["2x70 2 randn fp32 fp32", "13,0,57 2 randn bf16 fp32"])
def test_offsets_of_32_bits(target: Target, line: str) -> None:
    """Callers send int32 as well as int64 (vLLM the one, FLA and SGLang the other)."""
    inputs = target.make(line)
    inputs = support.pack(inputs) if inputs.cu_seqlens is None else inputs
    narrow = replace(inputs, cu_seqlens=inputs.cu_seqlens.int())
    support.check_same(target.run(narrow), target.run(inputs))


def test_many_sequences_and_heads(fast_target: Target) -> None:
    """More sequences times heads than one axis of a grid holds, 65535
    (fla-org/flash-linear-attention#1077, #1096). Two halves have the same bits."""
    inputs = fast_target.make("8200*3 8 randn none none")
    whole = fast_target.run(inputs)
    assert torch.isfinite(whole.out).all()
    middle = 4100
    for sequences, rows in ((slice(0, middle), (0, 12300)), (slice(middle, 8200), (12300, 24600))):
        half = support.tokens_slice(inputs, *rows)
        offsets = inputs.cu_seqlens[sequences.start : sequences.stop + 1] - rows[0]
        result = fast_target.run(replace(half, cu_seqlens=offsets))
        assert support.same_bits(result.out, whole.out[:, slice(*rows)])


def test_seventy_thousand_single_tokens(fast_target: Target) -> None:
    """The same class with one head: N itself beyond 65535. A first token has a closed form."""
    inputs = fast_target.make("70000*1 1 randn none none")
    out = fast_target.run(inputs).out
    q, k, v = (getattr(inputs, name).double() for name in ("q", "k", "v"))
    qk = (q * k).sum(-1) * (q.square().sum(-1) + 1e-6).rsqrt() * (k.square().sum(-1) + 1e-6).rsqrt()
    expected = inputs.scale * (inputs.beta.double().sigmoid() * qk)[..., None] * v
    support.check_close("out", out, expected, fast_target.limits()[0])


@pytest.mark.parametrize("boundary", [64, 128, 13])
def test_state_at_an_interior_boundary(target: Target, boundary: int) -> None:
    """Prefix caching wants the state after some tokens (flashinfer-ai/flashinfer#4896,
    vllm-project/FlashKDA#7): cutting the call there gives it, and changes nothing."""
    inputs = target.make("1x130 2 fla-init fp32 fp32")
    once, expected = target.run(inputs), support.oracle(inputs)
    prefix = support.tokens_slice(inputs, 0, boundary)
    first = target.run(prefix)
    target.check(prefix, first, kind="fla-init")
    rest = target.run(support.tokens_slice(inputs, boundary, 130, initial_state=first.final))
    joined = support.Result(torch.cat([first.out, rest.out], 1), rest.final)
    target.check(inputs, joined, expected, "fla-init")
    target.check(inputs, once, expected, "fla-init")


def test_calls_of_changing_shape(target: Target) -> None:
    """The first call is right and later ones of another shape or dtype are not, because something
    was cached (GLM-5.3-Flash-NVFP4-DFlash2-2x-DGX-Spark#4, inclusionAI/cuLA#43)."""
    needed = flash_kda.get_workspace_size(256, 2, 3)
    workspace = torch.empty(needed, dtype=torch.uint8, device=target.device)
    seen: dict[str, support.Result] = {}
    for i, tokens in enumerate([256, 128, 256, 64, 192, 1] * 2):
        state = STATES[i % 2]
        packed = f"{tokens // 3},0,{tokens - tokens // 3}"
        for shape in (packed, f"1x{tokens}"):
            line = f"{shape} 2 randn {state} {state}"
            inputs = target.make(line)
            result = target.run(inputs, workspace=workspace)
            target.check(inputs, result)
            support.check_same(result, seen.setdefault(line, result))


@pytest.mark.parametrize("dtype", STATES)
def test_state_in_place(target: Target, dtype: str) -> None:
    """A pool updated in place: the final state goes where the initial one came from."""
    inputs = target.make(f"70,0,9 3 randn {dtype} {dtype}")
    expected = target.run(inputs)
    pool = inputs.initial_state.clone()
    result = target.run(replace(inputs, initial_state=pool), final_state=pool)
    support.check_same(result, expected)


@pytest.mark.parametrize(
    ("initial", "final"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")]
)
def test_state_dtypes(target: Target, initial: str, final: str) -> None:
    """Each state has its own dtype; rounding happens only where one is written as bf16."""
    inputs = target.make(f"70,9 2 randn {initial} {final}")
    wide: Inputs = replace(inputs, initial_state=inputs.initial_state.float())
    expected = target.run(replace(wide, final_state=support.state(wide)))
    result = target.run_and_check(inputs)
    assert support.same_bits(result.out, expected.out)
    assert support.same_bits(result.final, expected.final.to(result.final.dtype))
