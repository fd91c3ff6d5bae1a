"""Strides, storage offsets and overlaps: read and written in place, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import support
import torch
from flash_kda.cases import HEAD_DIM, Inputs
from support import Target


def _between_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with other memory between the tokens."""
    batch, tokens, heads = tensor.shape[:3]
    wide = torch.full((batch, tokens + 3, heads + 2, HEAD_DIM), torch.nan).to(tensor)
    view = wide[:, 1 : tokens + 1, 1 : heads + 1]
    view.copy_(tensor)
    return view


def test_splits_of_a_fused_projection(target: Target) -> None:
    """q, k and v as splits of one [1, T, 3 * H * 128] tensor were read as if contiguous
    (fla-org/flash-linear-attention#627, jd-opensource/xllm#2311)."""
    inputs = target.make("1x150 3 randn fp32 fp32")
    fused = torch.cat([t.flatten(2) for t in (inputs.q, inputs.k, inputs.v)], -1)
    q, k, v = (part.unflatten(-1, (3, HEAD_DIM)) for part in fused.chunk(3, -1))
    assert not q.is_contiguous()
    support.check_same(target.run(replace(inputs, q=q, k=k, v=v)), target.run(inputs))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out"])
@pytest.mark.parametrize("line", ["2x70 3 randn fp32 fp32", "13,0,57 3 randn none fp32"])
def test_strided_tokens(target: Target, name: str, line: str) -> None:
    """The same class for each tensor: free batch and token strides, and an offset into storage."""
    inputs = target.make(line)
    view = _between_rows(getattr(inputs, name))
    expected = target.run(inputs)
    if name == "out":
        view.fill_(torch.nan)
        around = view._base.clone()
        result = target.run(inputs, out=view)
        around[:, 1:-2, 1:-1] = result.out
        assert support.same_bits(view._base, around), "written between the rows of out"
        result = support.Result(result.out.contiguous(), result.final)
    else:
        result = target.run(replace(inputs, **{name: view}))
    support.check_same(result, expected)


@pytest.mark.parametrize("offset", [8, 1])
def test_storage_offset(target: Target, offset: int) -> None:
    """The same class: data that begin inside a storage. A GPU reads 16 bytes at a time and says so
    where that can't be."""
    inputs = target.make("1x70 2 randn fp32 fp32")
    storage = torch.zeros(inputs.k.numel() + offset, dtype=torch.bfloat16, device=target.device)
    k = storage[offset:].view(inputs.k.shape).copy_(inputs.k)
    if target.device == "cuda" and offset % 8 != 0:
        support.expect_error(target, inputs, {"k": k}, ValueError, "k:", "16 bytes")
    else:
        support.check_same(target.run(replace(inputs, k=k)), target.run(inputs))


def _strided_betas(beta: torch.Tensor) -> dict[str, torch.Tensor]:
    batch, tokens, heads = beta.shape
    projection = torch.zeros(batch, tokens, heads + 13, dtype=beta.dtype, device=beta.device)
    projection[..., 5 : 5 + heads] = beta
    head_first = beta.transpose(1, 2).contiguous().transpose(1, 2)
    every_other = torch.zeros(batch, tokens, heads, 2, dtype=beta.dtype, device=beta.device)
    every_other[..., 1] = beta
    return {
        "slice of a projection": projection[..., 5 : 5 + heads],
        "head first": head_first,
        "every other": every_other[..., 1],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strided_beta(target: Target, dtype: torch.dtype) -> None:
    """beta is a slice of a wider projection in serving (vllm-project/FlashKDA#11)."""
    inputs = target.make("2x70 3 randn fp32 fp32")
    inputs = replace(inputs, beta=inputs.beta.to(dtype))
    expected = target.run_and_check(inputs)
    for name, beta in _strided_betas(inputs.beta).items():
        assert torch.equal(beta, inputs.beta), name
        support.check_same(target.run(replace(inputs, beta=beta)), expected)


def _neighbours(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Two states out of one pool, one slot apart."""
    pool = torch.zeros(4, 3, HEAD_DIM, HEAD_DIM, device=inputs.q.device)
    return {"initial_state": pool[:-1], "final_state": pool[1:]}


# What is changed of a legal call, and words of the message.
ILLEGAL_LAYOUTS: dict[str, tuple[Callable[[Inputs], dict[str, torch.Tensor]], str, str]] = {
    "heads strided": (
        lambda i: {"k": i.k.transpose(1, 2).contiguous().transpose(1, 2)},
        *("k:", "strides"),
    ),
    "channels strided": (
        lambda i: {"v": torch.stack([i.v, i.v], -1)[..., 0]},
        *("v:", "strides"),
    ),
    "out expanded": (
        lambda i: {"out": i.out[:, :1].clone().expand_as(i.out)},
        *("out:", "overlap"),
    ),
    "state transposed": (
        lambda i: {"initial_state": i.initial_state.transpose(2, 3)},
        *("initial_state:", "contiguous"),
    ),
    "out is v": (lambda i: {"out": i.v}, "out:", "overlaps v"),
    "states a slot apart": (_neighbours, "final_state:", "overlaps initial_state"),
}


@pytest.mark.parametrize("name", ILLEGAL_LAYOUTS)
def test_illegal_layouts(target: Target, name: str) -> None:
    """The same class: what can't be read or written in place is an error, never a wrong read
    (fla-org/flash-linear-attention#627)."""
    inputs = target.make("3x20 3 randn fp32 fp32")
    spoil, *words = ILLEGAL_LAYOUTS[name]
    support.expect_error(target, inputs, spoil(inputs), ValueError, *words)
