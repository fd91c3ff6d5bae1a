"""What the tests of forward calls share: the implementations of this machine, the oracle, errors.

Inputs come from flash_kda.cases. A call is written as in a case file, without the name:
``target.make("13,27 2 randn fp32 bf16")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import flash_kda
import pytest
import torch
from flash_kda import cases
from flash_kda.cases import HEAD_DIM, Case, Inputs
from flash_kda.cli import errors, machine

ORACLE = machine.REFERENCE

# These run whatever is legal. The others may refuse a call with a reason, which skips a test.
UNIVERSAL = ("cpu", "reference", "cuda.portable")

SENTINEL = 0x7FC1  # a NaN of its own, for memory that must stay as it is


@contextmanager
def forced(implementation: str) -> Iterator[None]:
    """Makes every other implementation refuse. Where this one does too, the test is skipped."""
    with machine.forced(implementation):
        try:
            yield
        except Exception as refusal:
            if implementation in UNIVERSAL or "no implementation accepts" not in str(refusal):
                raise
            pytest.skip(f"refused: {refusal}")


@dataclass(frozen=True)
class Result:
    out: torch.Tensor
    final: torch.Tensor | None


CUT_BY_THE_CALL = ("cuda.sm90_split",)


@dataclass(frozen=True)
class Target:
    """One implementation on one device."""

    implementation: str
    device: str

    def make(self, line: str) -> Inputs:
        return cases.make_inputs(case(line), self.device)

    def call(self, inputs: Inputs, **changes: Any) -> torch.Tensor:  # noqa: ANN401
        """fwd with these inputs as they are, forced onto this implementation."""
        with forced(self.implementation):
            return flash_kda.fwd(**{**inputs.kwargs(), **changes})

    def run(self, inputs: Inputs, **changes: Any) -> Result:  # noqa: ANN401
        """fwd into outputs full of NaN."""
        fresh = inputs.fresh()
        returned = self.call(fresh, **changes)
        assert returned is changes.get("out", fresh.out)
        return Result(returned, changes.get("final_state", fresh.final_state))

    def limits(self, kind: str = "randn") -> tuple[float, float]:
        """Relative errors that the output and an fp32 state may have."""
        return errors.limits(self.device, kind)

    def check(
        self, inputs: Inputs, result: Result, expected: Result | None = None, kind: str = "randn"
    ) -> None:
        """Against the oracle: finite, and within the limits. Rows of no sequence are ignored."""
        expected = expected or oracle(inputs)
        out_limit, state_limit = self.limits(kind)
        rows = row_count(inputs)
        check_close("out", result.out[:, :rows], expected.out[:, :rows], out_limit)
        if result.final is not None:
            if result.final.dtype == torch.bfloat16:
                state_limit = max(state_limit, errors.BF16_STATE_LIMIT)
            check_close("final_state", result.final, expected.final, state_limit)

    def check_alike(self, found: Result, expected: Result, kind: str = "randn") -> None:
        """The same sequences in another company: the same bits, up to rounding where sequences
        are cut into segments by what else is in the call."""
        if self.implementation not in CUT_BY_THE_CALL:
            check_same(found, expected)
            return
        out_limit, state_limit = self.limits(kind)
        check_close("out", found.out, expected.out, out_limit)
        if expected.final is not None:
            check_close("final_state", found.final, expected.final, state_limit)

    def run_and_check(self, inputs: Inputs, kind: str = "randn") -> Result:
        result = self.run(inputs)
        self.check(inputs, result, kind=kind)
        return result


@cache
def targets() -> list[Target]:
    """Every implementation that runs something on this machine, on its device."""
    found = []
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for name in accepted(device):
            found.append(Target(name, device))
    return found


def accepted(device: str) -> list[str]:
    """Names of the implementations that take a single token or a longer sequence."""
    names: dict[str, None] = {}
    for tokens in (256, 1):
        inputs = cases.make_inputs(case(f"1x{tokens} 1 randn none none"), device)
        names |= dict.fromkeys(machine.able(inputs.kwargs()))
    return list(names)


def expect_error(
    target: Target,
    inputs: Inputs,
    changes: dict[str, Any],
    kind: type[Exception],
    *words: str,
) -> None:
    """The call with these changes raises this exception with these words and writes nothing; the
    next call works."""
    arguments = {**inputs.fresh().kwargs(), **changes}
    before = {n: t.clone() for n, t in arguments.items() if torch.is_tensor(t)}
    with pytest.raises(kind) as caught:
        target.call(inputs, **arguments)
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value), f"'{word}' is not in: {caught.value}"
    for name, tensor in before.items():
        assert same_bits(arguments[name], tensor), f"{name} was written"
    target.run_and_check(target.make("1x7 1 randn none fp32"))


def case(line: str) -> Case:
    (only,) = cases.parse(f"test {line}")
    return only


@lru_cache(maxsize=4)
def case_inputs(one: Case, device: str, drawn_on: str = "cpu") -> Inputs:
    return cases.make_inputs(one, device, drawn_on)


@lru_cache(maxsize=4)
def case_oracle(one: Case, device: str = "cpu", drawn_on: str = "cpu") -> Result:
    """The oracle's answer to a case, kept while other implementations run it."""
    return oracle(case_inputs(one, device, drawn_on))


def oracle(inputs: Inputs) -> Result:
    """The fp64 token loop on copies of the inputs in host memory; the state in fp32."""
    copy = inputs.to("cpu").fresh()
    if copy.final_state is not None:
        copy = replace(copy, final_state=copy.final_state.float())
    with forced(ORACLE):
        flash_kda.fwd(**copy.kwargs())
    return Result(copy.out, copy.final_state)


def row_count(inputs: Inputs) -> int:
    """Rows of T that belong to a sequence."""
    return inputs.q.shape[1] if inputs.cu_seqlens is None else int(inputs.cu_seqlens[-1])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    actual, expected = actual.double(), expected.to(actual.device).double()
    difference, norm = (actual - expected).norm().item(), expected.norm().item()
    return difference / norm if norm > 0 else difference


def check_close(name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    assert torch.isfinite(actual).all(), f"{name} is not finite everywhere"
    error = relative_error(actual, expected)
    assert error <= limit, f"{name}: relative error {error:.2e}, at most {limit:.1e} is allowed"


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Bitwise equality; NaNs compare by their bits."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    by_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(by_size[tensor.element_size()])


def check_same(a: Result, b: Result) -> None:
    assert same_bits(a.out, b.out)
    assert same_bits(a.final, b.final)


def sentinels_like(tensor: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor of that shape full of a NaN that no implementation writes."""
    bits = torch.full(tensor.shape, SENTINEL, dtype=torch.int16, device=tensor.device)
    return bits.view(torch.bfloat16)


def tokens_slice(inputs: Inputs, begin: int, end: int, **changes: Any) -> Inputs:  # noqa: ANN401
    """The call of tokens [begin, end) alone, without cu_seqlens."""
    rows = {n: getattr(inputs, n)[:, begin:end] for n in ("q", "k", "v", "g", "beta", "out")}
    return replace(inputs, **{**rows, "cu_seqlens": None, **changes})


def solo(inputs: Inputs, sequence: int) -> Inputs:
    """The call of one sequence of a packed call alone."""
    begin, end = inputs.cu_seqlens[sequence : sequence + 2].tolist()
    states = {
        name: None if state is None else state[sequence : sequence + 1]
        for name in ("initial_state", "final_state")
        for state in [getattr(inputs, name)]
    }
    return tokens_slice(inputs, begin, end, **states)


def pack(inputs: Inputs) -> Inputs:
    """The sequences of a batch one after the other in B = 1, with cu_seqlens."""
    batch, tokens = inputs.q.shape[:2]
    rows = {
        name: getattr(inputs, name).reshape(1, batch * tokens, *inputs.q.shape[2:])
        for name in ("q", "k", "v", "g", "out")
    }
    beta = inputs.beta.reshape(1, batch * tokens, inputs.beta.shape[2])
    offsets = torch.arange(batch + 1, device=inputs.q.device) * tokens
    return replace(inputs, **rows, beta=beta, cu_seqlens=offsets)


def clone(inputs: Inputs) -> Inputs:
    copies = {n: t.clone() if torch.is_tensor(t) else t for n, t in vars(inputs).items()}
    return replace(inputs, **copies)


def state(inputs: Inputs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uninitialised memory for a final state of these inputs."""
    sequences = inputs.q.shape[0] if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
    shape = (sequences, inputs.q.shape[2], HEAD_DIM, HEAD_DIM)
    return torch.empty(shape, dtype=dtype, device=inputs.q.device)
