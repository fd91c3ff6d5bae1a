"""Calls that users, or the library, got wrong: shapes, dtypes, optional arguments, errors."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace

import flash_kda
import pytest
import support
import torch
from flash_kda.cases import HEAD_DIM, Inputs
from flash_kda.cli import machine
from support import Target

UPSTREAM_ORDER = (
    *("q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound"),
    *("initial_state", "final_state", "cu_seqlens"),
)


def test_signature() -> None:
    """Callers pass up to 13 arguments by position and the rest by name, and read nothing but out
    from the call (every caller of MoonshotAI/FlashKDA)."""
    for function in (flash_kda.fwd, flash_kda.explain):
        names = tuple(inspect.signature(function).parameters)
        assert names[: len(UPSTREAM_ORDER)] == UPSTREAM_ORDER
    parameters = inspect.signature(flash_kda.fwd).parameters
    for name in ("initial_state", "final_state", "cu_seqlens", "workspace"):
        assert parameters[name].default is None
    assert flash_kda.get_workspace_size(8192, 96, 1) == flash_kda.get_workspace_size(
        T_total=8192, H=96, N=1
    )
    assert flash_kda.get_workspace_size(8192, 96) == flash_kda.get_workspace_size(8192, 96, 1)


def test_head_first_call_without_out(target: Target) -> None:
    """A user's first call: head-first tensors, a gate per head, no out. The message has to say
    which shapes are expected (MoonshotAI/FlashKDA#21)."""
    inputs = target.make("1x20 3 randn none none")
    # T and H change places: beta, which has them right, tells.
    swapped = {n: getattr(inputs, n).transpose(1, 2).contiguous() for n in ("q", "k", "v", "g")}
    words = ("beta:", "[B, T, H] = [1, 3, 20]", "[1, 20, 3]")
    support.expect_error(target, inputs, swapped, ValueError, *words)
    words = ("g:", "[B, T, H, 128] = [1, 20, 3, 128]", "[1, 20, 3]")
    support.expect_error(target, inputs, {"g": inputs.g[..., 0]}, ValueError, *words)
    fresh = inputs.fresh()
    out = target.call(fresh, out=None)
    assert support.same_bits(out, target.call(fresh))


def test_more_value_than_key_heads(target: Target) -> None:
    """Grouped values, 32 on 16 key heads, gave NaN from reading beyond q and k
    (fla-org/flash-linear-attention#624, inclusionAI/cuLA#55)."""
    inputs, wide = target.make("1x20 16 randn none none"), target.make("1x20 32 randn none none")
    keys = {"q": inputs.q, "k": inputs.k}
    words = ("v:", "[1, 20, 16, 128]", "[1, 20, 32, 128]")
    support.expect_error(target, wide, keys, ValueError, *words)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 512), (256, 128), (128, 64)])
def test_head_dimensions(target: Target, key_dim: int, value_dim: int) -> None:
    """Other head dimensions than 128 crashed, and the next call with them
    (MoonshotAI/FlashKDA#4, inclusionAI/cuLA#41, fla-org/flash-linear-attention#639)."""
    inputs = target.make("1x70 2 randn none none")

    def rows(dim: int) -> torch.Tensor:
        return torch.zeros(1, 70, 2, dim, dtype=torch.bfloat16, device=target.device)

    other = {name: rows(key_dim) for name in ("q", "k", "g")}
    other |= {name: rows(value_dim) for name in ("v", "out")}
    name, dim = ("q:", key_dim) if key_dim != HEAD_DIM else ("v:", value_dim)
    support.expect_error(target, inputs, other, ValueError, name, "128", f"[1, 70, 2, {dim}]")


ILLEGAL_SHAPES: dict[str, dict[str, Callable[[Inputs], torch.Tensor]]] = {
    "k": {"short": lambda i: i.k[:, :-1], "no batch": lambda i: i.k[0]},
    "g": {"other batch": lambda i: i.g[:1]},
    "out": {"other heads": lambda i: i.out[:, :, :1].contiguous()},
    "beta": {"one more axis": lambda i: i.beta[..., None], "head first": lambda i: i.beta.mT},
    "A_log": {"too long": lambda i: torch.zeros(4), "a matrix": lambda i: torch.zeros(3, 3)},
    "dt_bias": {
        "per head": lambda i: torch.zeros(3),
        "swapped": lambda i: torch.zeros(128, 3),
    },
    "initial_state": {
        "one sequence": lambda i: i.initial_state[:1],
        "flat": lambda i: i.initial_state.flatten(2),
    },
    "final_state": {"other heads": lambda i: i.final_state[:, :2].contiguous()},
    "cu_seqlens": {"a matrix": lambda i: torch.zeros(1, 3, dtype=torch.int64)},
    "workspace": {"a matrix": lambda i: torch.zeros(4, 4096, dtype=torch.uint8)},
}
SHAPE_PARAMS = [(name, how) for name, hows in ILLEGAL_SHAPES.items() for how in hows]


@pytest.mark.parametrize(("name", "how"), SHAPE_PARAMS)
def test_illegal_shapes(target: Target, name: str, how: str) -> None:
    """A wrong shape is answered before any launch, and by name (class of
    fla-org/flash-linear-attention#837)."""
    inputs = target.make("2x20 3 randn fp32 fp32")
    wrong = ILLEGAL_SHAPES[name][how](inputs).to(target.device)
    support.expect_error(target, inputs, {name: wrong}, ValueError, f"{name}:")


# --- dtypes --------------------------------------------------------------------------------------

WRONG_DTYPES = {
    "q": (torch.float32, torch.float16),
    "k": (torch.float16, torch.float32),
    "v": (torch.float16,),
    "g": (torch.float32, torch.float16),
    "beta": (torch.float16, torch.int64),
    "out": (torch.float32, torch.float16),
    "A_log": (torch.float16, torch.float64),
    "dt_bias": (torch.float64,),
    "initial_state": (torch.float16, torch.float64),
    "final_state": (torch.float16, torch.float64),
}
DTYPE_PARAMS = [(name, dtype) for name, dtypes in WRONG_DTYPES.items() for dtype in dtypes]


@pytest.mark.parametrize(("name", "dtype"), DTYPE_PARAMS)
def test_wrong_dtypes(target: Target, name: str, dtype: torch.dtype) -> None:
    """A check of q's dtype alone lets the others be read as something else
    (inclusionAI/cuLA#34)."""
    inputs = target.make("2x20 3 randn fp32 fp32")
    wrong = getattr(inputs, name).nan_to_num().to(dtype)
    expected, given = ("bfloat16", str(dtype).removeprefix("torch."))
    support.expect_error(target, inputs, {name: wrong}, TypeError, f"{name}:", expected, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
def test_wrong_dtype_of_offsets(target: Target, dtype: torch.dtype) -> None:
    """The same class for cu_seqlens and the workspace."""
    inputs = target.make("13,7 2 randn none none")
    wrong = inputs.cu_seqlens.to(dtype)
    support.expect_error(target, inputs, {"cu_seqlens": wrong}, TypeError, "cu_seqlens:", "int64")
    space = torch.zeros(1 << 20, dtype=torch.int8, device=target.device)
    support.expect_error(target, inputs, {"workspace": space}, TypeError, "workspace:", "uint8")


def test_mixed_legal_dtypes(target: Target) -> None:
    """The same class: dtypes that are legal together are converted, not reinterpreted. bf16
    parameters and an fp32 beta; a bf16 initial with an fp32 final state is test_state_dtypes."""
    inputs = target.make("1x70 3 bench fp32 fp32")
    narrow = {n: getattr(inputs, n).bfloat16() for n in ("A_log", "dt_bias")}
    mixed = replace(inputs, **narrow, beta=inputs.beta.float())
    wide = replace(mixed, **{n: t.float() for n, t in narrow.items()})
    support.check_same(target.run_and_check(mixed, "bench"), target.run(wide))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("q", None), ("beta", [0.0]), ("out", "out"), ("A_log", 1.0), ("dt_bias", 0)),
        *(("cu_seqlens", [0, 20]), ("initial_state", False), ("scale", "1"), ("scale", None)),
        *(("lower_bound", "low"), ("lower_bound", [1])),
    ],
)
def test_arguments_that_are_no_tensors(target: Target, name: str, value: object) -> None:
    """Anything else than a tensor or a number is a TypeError that names it."""
    inputs = target.make("1x20 1 randn none fp32")
    support.expect_error(target, inputs, {name: value}, TypeError, f"{name}:")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_scale_must_be_finite(target: Target, scale: float) -> None:
    inputs = target.make("1x20 1 randn none fp32")
    support.expect_error(target, inputs, {"scale": scale}, ValueError, "scale:", "finite")


# --- optional arguments --------------------------------------------------------------------------


def test_parameters_may_be_left_out(target: Target) -> None:
    """A_log may be None now, dt_bias flat or None (fla-org/flash-linear-attention#1107); both mean
    zeros. Extra axes of A_log, as layers keep it, are taken too."""
    inputs = target.make("1x70 3 bench fp32 fp32")
    expected = target.run(inputs)
    flat = replace(
        inputs, dt_bias=inputs.dt_bias.flatten(), A_log=inputs.A_log[None, None, :, None]
    )
    support.check_same(target.run(flat), expected)
    for names in (("A_log",), ("dt_bias",), ("A_log", "dt_bias")):
        zeros = {n: torch.zeros_like(getattr(inputs, n)) for n in names}
        left_out = target.run(replace(inputs, **dict.fromkeys(names)))
        support.check_same(left_out, target.run(replace(inputs, **zeros)))
        assert not torch.equal(left_out.out, expected.out)


def test_initial_state_left_out(target: Target) -> None:
    """None means zeros, not what was there before."""
    inputs = target.make("2x70 3 randn fp32 fp32")
    zeros = replace(inputs, initial_state=torch.zeros_like(inputs.initial_state))
    support.check_same(target.run(replace(inputs, initial_state=None)), target.run(zeros))


def test_return_type_is_always_the_same(target: Target) -> None:
    """The type returned changed with the options, and the caller crashed
    (sgl-project/sglang#39925). It is out, whatever the options."""
    states = ("fp32", "bf16", "none")
    for tokens, initial, final in itertools.product(("1x20", "13,0,7"), states, states):
        inputs = target.make(f"{tokens} 1 randn {initial} {final}")
        assert target.call(inputs) is inputs.out
        fresh = target.call(inputs, out=None)
        assert type(fresh) is torch.Tensor
        assert fresh.shape == inputs.v.shape
        assert fresh.dtype == torch.bfloat16
        assert fresh.is_contiguous()


@pytest.mark.parametrize("name", ["q", "beta", "A_log", "dt_bias", "initial_state"])
def test_inference_only(target: Target, name: str) -> None:
    """Users trained through it and got no gradient, or a crash (MoonshotAI/FlashKDA#4, #21)."""
    inputs = target.make("1x20 2 randn fp32 fp32")
    expected = target.run(inputs)
    leaf = replace(inputs, **{name: getattr(inputs, name).clone().requires_grad_()})
    fresh = leaf.fresh()
    with pytest.raises(NotImplementedError, match=rf"inference.*\b{name}\b"):
        target.call(fresh)
    assert torch.isnan(fresh.out).all()
    for verdict in flash_kda.explain(**fresh.kwargs()):
        assert not verdict.accepted and "inference" in verdict.reason
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert any(verdict.accepted for verdict in flash_kda.explain(**leaf.kwargs()))
            support.check_same(target.run(leaf), expected)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([1, 5, 20], "start at 0"),
        ([-1, 5, 20], "start at 0"),
        ([0, 9, 5], "never decrease"),
        ([0, 5, 21], "up to T = 20"),
        ([0, 1 << 40, 1 << 41], "up to T = 20"),
        ([], "[N + 1]"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_malformed_offsets(target: Target, offsets: list[int], words: str, dtype: type) -> None:
    """Offsets that lead outside the tensors (class of vllm-project/vllm#54317). On a GPU they stay
    unread: tests/gpu has that side."""
    if target.device == "cuda" and offsets:
        pytest.skip("offsets on a GPU are not read by the host")
    if dtype == torch.int32 and any(o > 1 << 31 for o in offsets):
        pytest.skip("no int32")
    inputs = target.make("13,7 2 randn none none")
    wrong = torch.tensor(offsets, dtype=dtype, device=target.device)
    support.expect_error(target, inputs, {"cu_seqlens": wrong}, ValueError, "cu_seqlens:", words)


def test_workspace_too_small(target: Target) -> None:
    """The size is checked, not trusted (the upstream kernel never looks at it)."""
    inputs = target.make("1x70 2 randn none none")
    needed = flash_kda.get_workspace_size(70, 2, 1)
    exact = torch.zeros(needed, dtype=torch.uint8, device=target.device)
    expected = target.run(inputs, workspace=exact)
    fresh = inputs.fresh()
    try:
        target.call(fresh, workspace=exact[:0])
    except ValueError as error:
        assert "workspace: expected at least" in str(error)
        assert torch.isnan(fresh.out).all()
    else:  # this one needs none
        assert support.same_bits(fresh.out, expected.out)


# --- explain -------------------------------------------------------------------------------------


def test_explain_says_what_runs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which implementation runs was a guess (class of MoonshotAI/FlashKDA#18)."""
    inputs = target.make("1x256 2 randn fp32 fp32").fresh()
    names = [v.name for v in flash_kda.explain(**inputs.kwargs())]
    assert target.implementation in names
    monkeypatch.setenv(machine.FORCE_ENV, target.implementation)
    for verdict in flash_kda.explain(**inputs.kwargs()):
        if verdict.accepted:
            assert (verdict.name, verdict.reason) == (target.implementation, "")
        elif verdict.name != target.implementation:
            assert target.implementation in verdict.reason
    assert torch.isnan(inputs.out).all(), "explain has written"


def test_explain_of_an_illegal_call(target: Target) -> None:
    """It gives the error that fwd raises, as everyone's reason."""
    inputs = target.make("1x20 2 randn fp32 fp32")
    wrong = replace(inputs, k=inputs.k.half())
    with pytest.raises(TypeError) as caught:
        flash_kda.fwd(**wrong.kwargs())
    for verdict in flash_kda.explain(**wrong.kwargs()):
        assert not verdict.accepted
        assert verdict.reason == str(caught.value)
    for verdict in flash_kda.explain(**replace(inputs, lower_bound=None).kwargs()):
        assert "softplus" in verdict.reason


def test_unknown_forced_implementation(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name must not mean the default."""
    monkeypatch.setenv(machine.FORCE_ENV, "cuda.sm91")
    inputs = target.make("1x20 2 randn none none")
    with pytest.raises(ValueError, match=r"FLASH_KDA_FORCE_IMPL: expected one of .*cpu.*cuda.sm91"):
        flash_kda.fwd(**inputs.kwargs())


def test_forced_implementation_for_another_device(target: Target) -> None:
    """Forcing an implementation that can't take the call is an error with its reason."""
    inputs = target.make("1x20 2 randn none none").fresh()
    able = machine.able(inputs.kwargs())
    others = [v.name for v in flash_kda.explain(**inputs.kwargs()) if v.name not in able]
    for name in others:
        with support.forced(name), pytest.raises(NotImplementedError, match=name):
            flash_kda.fwd(**inputs.kwargs())
    assert torch.isnan(inputs.out).all()
