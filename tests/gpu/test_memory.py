"""What is read and written on the GPU: bounds, offsets beyond 32 bits, and how much memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import flash_kda
import pytest
import support
import torch
from flash_kda.cases import HEAD_DIM, Inputs
from flash_kda.cli import timing
from guarded import GuardedMemory
from support import Target

CHECK_ENV = "FLASH_KDA_CHECK"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def needs_free_memory(size: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size / GIB:.0f} GiB of free memory, found {free / GIB:.0f}")


@pytest.mark.parametrize(
    "line",
    [
        "1x1 1 randn fp32 fp32",
        "3x5 3 randn bf16 bf16",
        "2x333 3 randn fp32 fp32",
        "1x1000 1 randn none fp32",
        "0,5,0,16,0 2 randn fp32 bf16",
        "1,63,64,65,128,129+77 5 bench bf16 fp32",
        "9*1 3 randn fp32 fp32",
        "700,1,1,3,40 2 half-fast none none",
    ],
)
def test_nothing_is_written_outside(target: Target, line: str) -> None:
    """Guard zones around every argument, the workspace exactly as large as promised."""
    inputs = target.make(line)
    expected = target.run(inputs)
    memory = GuardedMemory()
    guarded = memory.call(inputs)
    guarded.out.copy_(support.sentinels_like(guarded.out))
    target.call(guarded, workspace=memory.workspace(inputs))
    memory.check()
    rows = support.row_count(inputs)
    assert support.same_bits(guarded.out[:, :rows], expected.out[:, :rows])
    assert support.same_bits(guarded.final_state, expected.final)
    rest = guarded.out[:, rows:]
    assert support.same_bits(rest, support.sentinels_like(rest))


MALFORMED = [
    [5, 9, 20],
    [-7, 9, 20],
    [0, 15, 3],
    [20, 10, 0],
    [0, 9, 21],
    [0, 9, 1 << 20],
    [0, -(1 << 30), 20],
    [(1 << 31) - 1, -(1 << 31), (1 << 31) - 1],
    [0, 1 << 40, 1 << 62],
    [0, -(1 << 62), (1 << 63) - 1],
]
TOKENS = 20


def _legal(target: Target) -> Inputs:
    # Twice as many sequences as mean tokens allow where implementations ask for short ones.
    inputs = target.make("13,7 2 randn fp32 fp32")
    if target.implementation == "cuda.recurrent":
        inputs = target.make("13,7,8*0 2 randn fp32 fp32")
    return inputs


def _with_offsets(inputs: Inputs, offsets: list[int], dtype: torch.dtype) -> Inputs:
    extra = len(inputs.cu_seqlens) - len(offsets)
    return replace(
        inputs, cu_seqlens=torch.tensor(offsets + offsets[-1:] * extra, dtype=dtype, device="cuda")
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("offsets", MALFORMED, ids=str)
def test_malformed_offsets_are_safe(
    target: Target, offsets: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An illegal access when a kernel saw impossible metadata (vllm-project/vllm#54317). Offsets on
    the device are not read by the host, so they are clamped; asked to check them, fwd raises."""
    if dtype == torch.int32 and max(map(abs, offsets)) > 1 << 31:
        pytest.skip("no int32")
    inputs = _legal(target)
    expected = target.run(inputs)
    memory = GuardedMemory()
    guarded = memory.call(inputs)
    guarded = replace(
        guarded, cu_seqlens=memory.like(_with_offsets(inputs, offsets, dtype).cu_seqlens, copy=True)
    )
    target.call(guarded, workspace=memory.workspace(inputs))
    torch.cuda.synchronize()
    memory.check()
    support.check_same(target.run(inputs), expected)

    monkeypatch.setenv(CHECK_ENV, "1")
    untouched = guarded.fresh()
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
        target.call(untouched)
    assert torch.isnan(untouched.out).all()
    assert torch.isnan(untouched.final_state).all()
    support.check_same(target.run(inputs), expected)


def test_more_than_2_to_31_elements(target: Target) -> None:
    """Offsets in 32 bits are finite and wrong beyond 2^31 elements
    (fla-org/flash-linear-attention#1080, #1082)."""
    heads, tokens, last = 96, 174800, 1037
    assert tokens * heads * HEAD_DIM > 1 << 31
    needs_free_memory(7 * tokens * heads * HEAD_DIM * 2)
    inputs = _drawn_on_the_device(1, tokens, heads)
    offsets = torch.tensor([0, tokens - last, tokens], device="cuda")
    whole = target.run(replace(inputs, cu_seqlens=offsets, final_state=_states(2, heads)))
    assert torch.isfinite(whole.out[0, tokens - last :]).all()
    solo = support.tokens_slice(inputs, tokens - last, tokens, final_state=_states(1, heads))
    alone = target.run(solo)
    assert support.same_bits(alone.out, whole.out[:, tokens - last :])
    assert support.same_bits(alone.final, whole.final[1:])


@pytest.mark.parametrize(
    ("batch", "tokens", "batch_stride", "token_stride"),
    [(2, 500, (1 << 31) + 1024, 256), (1, 4, 0, 1 << 30)],
    ids=["batch", "token"],
)
def test_strides_beyond_2_to_31(
    target: Target, batch: int, tokens: int, batch_stride: int, token_stride: int
) -> None:
    """The same class through the strides of views."""
    inputs = target.make(f"{batch}x{tokens} 2 randn fp32 fp32")
    elements = (batch - 1) * batch_stride + tokens * token_stride
    needs_free_memory(3 * elements * 2)
    expected = target.run(inputs)
    views = {}
    for name in ("k", "out"):
        memory = torch.empty(elements, dtype=torch.bfloat16, device="cuda")
        view = memory.as_strided(inputs.k.shape, (batch_stride, token_stride, HEAD_DIM, 1))
        views[name] = view.copy_(getattr(inputs, name))
    result = target.run(replace(inputs, k=views["k"]), out=views["out"])
    assert support.same_bits(result.out, expected.out)
    assert support.same_bits(result.final, expected.final)


def test_states_beyond_2_to_31_elements(target: Target) -> None:
    """The same class for states, with sequences times heads beyond 65535, an axis of a grid
    (fla-org/flash-linear-attention#1077, #1096): both halves alone have the same bits."""
    sequences, heads = 2050, 64
    length = 2 if target.implementation == "cuda.recurrent" else 16
    state_bytes = 4 * sequences * heads * HEAD_DIM * HEAD_DIM
    assert state_bytes // 4 > 1 << 31
    needs_free_memory(6 * state_bytes)
    inputs = _drawn_on_the_device(1, sequences * length, heads)
    offsets = torch.arange(sequences + 1, device="cuda") * length
    initial, final = _states(sequences, heads).normal_(), _states(sequences, heads)
    packed = replace(inputs, cu_seqlens=offsets, initial_state=initial, final_state=final)
    whole = target.run(packed)
    middle = sequences // 2
    for part in (slice(0, middle), slice(middle, sequences)):
        rows = slice(part.start * length, part.stop * length)
        half = support.tokens_slice(
            packed, rows.start, rows.stop, initial_state=initial[part], final_state=final[part]
        )
        result = target.run(replace(half, cu_seqlens=offsets[: middle + 1]))
        assert support.same_bits(result.out, whole.out[:, rows])
        assert support.same_bits(result.final, whole.final[part])


def _states(sequences: int, heads: int) -> torch.Tensor:
    return torch.empty(sequences, heads, HEAD_DIM, HEAD_DIM, device="cuda")


def _drawn_on_the_device(batch: int, tokens: int, heads: int) -> Inputs:
    one = support.case(f"{batch}x{tokens} {heads} bench none none")
    return replace(
        support.cases.make_inputs(one, "cuda", "cuda"), final_state=_states(batch, heads)
    )


# --- how much memory -----------------------------------------------------------------------------


def upstream_workspace(tokens_total: int, heads: int, sequences: int) -> int:
    """What MoonshotAI/FlashKDA's kernels want: 864 bytes per token and head."""
    per_tile = 3 * 16 * HEAD_DIM * 2 + HEAD_DIM * 4 + 2 * 16 * 16 * 2
    return heads * (-(-tokens_total // 16) + sequences) * per_tile


@pytest.mark.parametrize(
    ("tokens", "heads", "sequences"),
    [(1 << 20, 12, 1), (1 << 20, 64, 1), (32768, 96, 256), (174800, 96, 2)],
)
def test_workspace_of_large_calls_is_below_upstreams(
    tokens: int, heads: int, sequences: int
) -> None:
    """54 GiB for a million tokens of 64 heads (found by reading MoonshotAI/FlashKDA; class of
    vllm-project/vllm#51039)."""
    ours = flash_kda.get_workspace_size(tokens, heads, sequences)
    assert ours <= upstream_workspace(tokens, heads, sequences) / 2


@pytest.mark.parametrize(
    ("tokens", "heads", "sequences", "ratio"),
    [
        (16, 12, 1, 1.06),
        (256, 12, 1, 0.99),
        (1024, 12, 1, 1.77),
        (2048, 12, 1, 1.71),
        (8192, 12, 1, 1.30),
        (65536, 1, 1, 1.43),
        (8192, 64, 1, 1.10),
        (8192, 64, 8, 1.11),
        (8192, 96, 1, 1.08),
    ],
)
def test_workspace_of_small_calls(tokens: int, heads: int, sequences: int, ratio: float) -> None:
    """The figures in docs/architecture.md: the maps of segments cost more than upstream."""
    ours = flash_kda.get_workspace_size(tokens, heads, sequences)
    assert round(ours / upstream_workspace(tokens, heads, sequences), 2) <= ratio


def test_peak_memory_of_a_million_tokens(target: Target) -> None:
    """The same class, measured: nothing beside the workspace is allocated."""
    tokens, heads = 1 << 20, 12
    needs_free_memory(7 * tokens * heads * HEAD_DIM * 2)
    inputs = _drawn_on_the_device(1, tokens, heads)
    target.call(support.tokens_slice(inputs, 0, 64))  # whatever is allocated once
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    target.call(inputs)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    print(f"\n{target.implementation}: {extra / GIB:.3f} GiB beside the tensors at 1x1048576 H12")
    assert extra <= flash_kda.get_workspace_size(tokens, heads, 1) + (1 << 21)
    assert extra <= upstream_workspace(tokens, heads, 1)
    assert torch.isfinite(inputs.out[0, -1000:]).all()


@pytest.mark.parametrize("line", ["13,0,57 3 randn bf16 fp32", "1,0,2,1,0,3,1,0 3 randn bf16 fp32"])
def test_no_hidden_copies(target: Target, line: str) -> None:
    """A transposed beta, converted offsets or parameters: whatever is legal is read as it lies
    (vllm-project/FlashKDA#11)."""
    inputs = target.make(line)
    target.run(inputs)  # skips where the implementation refuses
    fused = torch.stack([inputs.q, inputs.k, inputs.v], 2)
    awkward = replace(
        inputs.fresh(),
        **{name: fused[:, :, i] for i, name in enumerate("qkv")},
        beta=inputs.beta.float().mT.contiguous().mT,
        A_log=inputs.A_log.bfloat16(),
        dt_bias=inputs.dt_bias.bfloat16().flatten(),
        cu_seqlens=inputs.cu_seqlens.int(),
    )
    names = timing.kernel_names(lambda: target.call(awkward))
    assert names and all("flash_kda" in name for name in names), names


def test_no_memory_for_the_workspace(target: Target) -> None:
    """A full GPU: an error that says so, and the next call works (class of
    vllm-project/vllm#51039)."""
    inputs = target.make("1x4096 16 bench fp32 fp32")
    expected = target.run(inputs)
    fresh = inputs.fresh()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    failed = None
    try:
        target.call(fresh)
        torch.cuda.synchronize()
    except RuntimeError as error:
        failed = error
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if failed is None:  # it needs no more memory than the allocator had left
        assert support.same_bits(fresh.out, expected.out)
    else:
        assert isinstance(failed, torch.OutOfMemoryError) or "workspace:" in str(failed)
        assert torch.isnan(fresh.out).all()
    support.check_same(target.run(inputs), expected)
