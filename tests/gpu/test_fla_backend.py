"""FLA's acceptance tests of its flash_kda backend, with the installed, unmodified FLA.

Same shapes, inputs and tolerance as FLA's own: bf16 q, k, v, raw g and beta, A_log the logarithm of
uniform numbers in [1, 16], an fp32 initial state, lower_bound -5, and an RMS error of output and
state below 0.006 of the RMS of the exact result. FLA takes fused_recurrent_kda on fp64 inputs for
exact, here so with --run-slow; else it is the fp64 token loop, which needs no compiler.

How long it takes: the tests above the line "Triton" run our kernels and a token loop of at most
4096 tokens, some launches each, seconds in all. Those below it, and all with --run-slow, wait for
Triton to compile FLA's kernels: about 8 forward and as many backward, for every number of heads and
kind of call. To tune each over its 4 to 36 configurations would alone take minutes, so all tests
take the first one (peers.untuned), and make few such calls without --run-slow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import flash_kda
import pytest
import torch
from fla_support import Log, arguments, chunk_kda, need_fla, rms_ratio, shipped_backend
from flash_kda import fla
from flash_kda.cli import errors, peers, timing
from support import case, cases, row_count

need_fla()

TOLERANCE = 0.006  # of FLA's tests
AGREEMENT = 1e-2  # of our output with Triton's
OUR_MARK = "flash_kda"
DEVICE = "cuda"
LINES = ["1x256 2 fla-test fp32 fp32", "56,100,100 2 fla-test fp32 fp32"]

Reference = Callable[[cases.Inputs], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def _shipped_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(fla.OPT_OUT_ENV, raising=False)
    with shipped_backend():
        yield


@pytest.fixture(autouse=True)
def _untuned() -> Iterator[None]:
    with peers.untuned():
        yield


def make(line: str) -> cases.Inputs:
    return cases.make_inputs(case(line), DEVICE)


def fused_recurrent(inputs: cases.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's recurrent kernel on fp64 inputs, with the activations applied before."""
    recurrent = importlib.import_module("fla.ops.kda").fused_recurrent_kda
    out, state = recurrent(
        **peers.activated(inputs, torch.float64),
        scale=inputs.scale,
        initial_state=inputs.initial_state.mT.contiguous(),
        output_final_state=True,
        cu_seqlens=inputs.cu_seqlens,
    )
    return out, state.mT


def ours(names: list[str]) -> list[str]:
    return [name for name in names if OUR_MARK in name]


def exact(inputs: cases.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return errors.exact(inputs, DEVICE)


@pytest.mark.parametrize(
    "reference", [exact, pytest.param(fused_recurrent, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("register", [False, True], ids=["shipped backend", "our backend"])
@pytest.mark.parametrize("one", cases.load("fla"), ids=lambda one: one.name)
def test_acceptance(one: cases.Case, register: bool, reference: Reference) -> None:
    if register:
        fla.register()
    inputs = cases.make_inputs(one, DEVICE)
    with torch.inference_mode(), Log() as log:
        out, state = chunk_kda(**arguments(inputs))
    assert log.hit, log.lines
    with torch.inference_mode():
        expected = reference(inputs)
    assert rms_ratio(out, expected[0]) < TOLERANCE
    assert rms_ratio(state, expected[1]) < TOLERANCE


def run(inputs: cases.Inputs, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return chunk_kda(**arguments(inputs, **changes))


@pytest.mark.parametrize("line", LINES)
def test_the_kernels_are_ours(line: str) -> None:
    inputs = make(line)
    run(inputs)
    assert ours(timing.kernel_names(lambda: run(inputs)))


WORKS: dict[str, dict[str, Any]] = {
    "strided": {
        name: lambda x, n=name: getattr(x, n).transpose(1, 2).contiguous().transpose(1, 2)
        for name in "qkvg"
    },
    "misaligned": {name: lambda x, n=name: shifted(getattr(x, n)) for name in "qkvg"},
    "fp32 beta": {"beta": lambda x: x.beta.float()},
    "bf16 A_log": {"A_log": lambda x: x.A_log.bfloat16()},
    "parts of a fused projection": {
        name: lambda x, n=name, i=i: fused(x)[:, :, i] for i, name in enumerate("qkv")
    },
}


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, two bytes off every alignment."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor)


def fused(x: cases.Inputs) -> torch.Tensor:
    return torch.stack([x.q, x.k, x.v], dim=2)


@pytest.mark.parametrize("what", WORKS)
def test_what_fla_lets_through_works(what: str) -> None:
    fla.register()
    inputs = make("1x300 2 fla-test fp32 fp32")
    inputs.A_log.copy_(inputs.A_log.bfloat16())  # the same numbers in either dtype
    changes = {n: c(inputs) for n, c in WORKS[what].items()}
    with torch.inference_mode(), Log() as log:
        out, state = chunk_kda(**arguments(inputs, **changes))
        expected, expected_state = chunk_kda(**arguments(inputs))
    assert log.hit, log.lines
    assert rms_ratio(out, expected) < AGREEMENT
    assert rms_ratio(state, expected_state) < AGREEMENT


def test_graph_of_padded_sequences() -> None:
    """A captured call replays with offsets that have changed in place."""
    if importlib.import_module("fla").__version__ < "0.6":
        pytest.skip("FLA has had use_graph since 0.6.0")
    fla.register()
    inputs = make("100,0,156,0 2 fla-test fp32 fp32")
    call = arguments(inputs, use_graph=True, max_num_seqs=4)
    with torch.inference_mode():
        chunk_kda(**call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, state = chunk_kda(**call)
        for offsets in ([0, 100, 100, 256, 256], [0, 30, 200, 256, 256], [0, 1, 2, 3, 200]):
            inputs.cu_seqlens.copy_(torch.tensor(offsets))
            graph.replay()
            expected, expected_state = chunk_kda(**call)
            rows = row_count(inputs)
            assert torch.equal(out[:, :rows], expected[:, :rows])
            assert torch.equal(state, expected_state)


# --- Triton -------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [LINES[0], pytest.param(LINES[1], marks=pytest.mark.slow)])
def test_none_are_ours_when_switched_off(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(line)
    out, state = run(inputs)
    monkeypatch.setenv(fla.OPT_OUT_ENV, "0")
    triton_out, triton_state = run(inputs)
    names = timing.kernel_names(lambda: run(inputs))
    assert names and not ours(names)
    assert rms_ratio(out, triton_out) < AGREEMENT
    assert rms_ratio(state, triton_state) < AGREEMENT


FALLS_BACK: dict[str, dict[str, Any]] = {
    "lower bound out of range": {"lower_bound": -7.0, "safe_gate": False},
    "softplus gate": {"lower_bound": None, "safe_gate": False},
    "negative eigenvalues": {"allow_neg_eigval": True},
    "fp32 rows": {name: lambda x, n=name: getattr(x, n).float() for name in "qkvg"},
    "grouped values": {
        "v": lambda x: x.v.repeat(1, 1, 2, 1),
        "g": lambda x: x.g.repeat(1, 1, 2, 1),
        "beta": lambda x: x.beta.repeat(1, 1, 2),
        "A_log": lambda x: x.A_log.repeat(2),
        "dt_bias": lambda x: x.dt_bias.repeat(2, 1).flatten(),
        "initial_state": None,
    },
}
USUAL = "softplus gate"  # what callers meet most
OTHERS = [pytest.param(what, marks=pytest.mark.slow) for what in FALLS_BACK if what != USUAL]


@pytest.mark.parametrize("what", [USUAL, *OTHERS])
def test_what_we_do_not_take_goes_to_triton(what: str) -> None:
    """With our backend: the reason in the log, Triton's answer, no exception."""
    if what == "negative eigenvalues" and importlib.import_module("fla").__version__ < "0.6":
        pytest.skip("FLA has had allow_neg_eigval since 0.6.0")
    fla.register()
    inputs = make(LINES[0])
    changes = {n: c(inputs) if callable(c) else c for n, c in FALLS_BACK[what].items()}
    call = arguments(inputs, **changes)
    with torch.inference_mode(), Log() as log:
        out, state = chunk_kda(**call)
        assert not ours(timing.kernel_names(lambda: chunk_kda(**call)))
    assert not log.hit and log.rejection, log.lines
    assert out.isfinite().all() and state.isfinite().all()


def test_an_unbuilt_architecture_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    fla.register()
    refused = [flash_kda.Verdict("cuda.portable", False, "this GPU's kernels are not built")]
    monkeypatch.setattr(flash_kda, "explain", lambda **_: refused)
    call = arguments(make(LINES[0]))
    with torch.inference_mode(), Log() as log:
        out, _ = chunk_kda(**call)
    assert log.rejection == "this GPU's kernels are not built"
    assert out.isfinite().all()


@pytest.mark.slow
def test_gradients_come_from_triton() -> None:
    fla.register()
    inputs = make(LINES[0])
    leaf = inputs.v.clone().requires_grad_()
    with Log() as log:
        out, _ = chunk_kda(**arguments(inputs, v=leaf))
        out.float().square().sum().backward()
    assert log.rejection is not None and "gradients" in log.rejection
    assert leaf.grad is not None and leaf.grad.isfinite().all()
