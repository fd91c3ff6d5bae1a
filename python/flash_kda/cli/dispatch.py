"""Whether FLA would send a call of ``chunk_kda`` to flash_kda, and all the reasons why not.

A verifier stops at its first reason. So a call is asked about once for each of its deviations from
a call that suits, with that deviation alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flash_kda import fla
from flash_kda.cases import HEAD_DIM, LOWER_BOUND
from flash_kda.cli import machine

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "none": None,
}


@dataclass(frozen=True)
class Problem:
    """A call of ``chunk_kda``; the defaults are one that suits."""

    device: str = "cpu"
    batch: int = 1
    tokens: int = 256
    lengths: tuple[int, ...] = ()
    heads: int = 4
    value_heads: int = 0  # 0: as heads
    head_dim: int = HEAD_DIM
    value_dim: int = HEAD_DIM
    dtype: str = "bf16"
    gate_dtype: str = "bf16"
    beta_dtype: str = "bf16"
    parameter_dtype: str = "fp32"
    state_dtype: str = "fp32"
    lower_bound: float | None = LOWER_BOUND
    strided: bool = False
    no_a_log: bool = False
    no_dt_bias: bool = False
    no_gate_in_kernel: bool = False
    no_l2norm_in_kernel: bool = False
    no_beta_sigmoid_in_kernel: bool = False
    no_safe_gate: bool = False
    allow_neg_eigval: bool = False
    state_k_first: bool = False
    context_parallel: bool = False
    intermediate_states: bool = False
    grad: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> Problem:
        given = {f.name: getattr(args, f.name) for f in fields(cls) if f.name != "lengths"}
        try:
            lengths = tuple(int(n) for n in args.lengths.split(",")) if args.lengths else ()
        except ValueError:
            wanted = "--lengths: expected whole numbers with commas between them"
            raise ValueError(f"{wanted}, got {args.lengths}") from None
        problem = cls(**{**given, "device": args.device or _default_device()}, lengths=lengths)
        if problem.lengths and problem.batch == 1:
            problem = replace(problem, tokens=max(problem.tokens, sum(lengths)))
        return problem

    def deviations(self) -> list[Problem]:
        """A call that suits, which this machine alone may refuse, and calls that suit but for one
        of this call's deviations each."""
        suits = Problem(device=self.device, heads=self.heads)
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(suits, f.name)]
        # cu_seqlens belongs to the extents.
        extents = {"batch", "tokens", "lengths"}
        alone = [replace(suits, **{n: getattr(self, n)}) for n in names if n not in extents]
        if extents & set(names):
            alone.append(replace(suits, **{n: getattr(self, n) for n in extents}))
        return [suits, *alone]

    def text(self) -> str:
        suits = Problem(device=self.device)
        shape = f"B={self.batch} T={self.tokens} H={self.heads} on {self.device}"
        shown = ("device", "batch", "tokens", "heads")
        given = [
            f"{f.name.replace('_', '-')}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in shown and getattr(self, f.name) != getattr(suits, f.name)
        ]
        return ", ".join([shape, *given])

    def call(self) -> dict[str, Any]:
        """The keyword arguments of ``chunk_kda``."""
        value_heads = self.value_heads or self.heads
        device = torch.device(self.device)
        dtype, gate, beta = (_DTYPES[n] for n in (self.dtype, self.gate_dtype, self.beta_dtype))
        parameter, state = _DTYPES[self.parameter_dtype], _DTYPES[self.state_dtype]

        def rows(heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (self.batch, self.tokens, heads, dim)
            if self.strided:  # head first, as a transposed view
                shape = (self.batch, heads, self.tokens, dim)
            made = torch.empty(shape, dtype=dtype, device=device, requires_grad=self.grad)
            return made.transpose(1, 2) if self.strided else made

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        cu_seqlens = None
        if self.lengths:
            ends = torch.tensor((0, *self.lengths)).cumsum(0)
            cu_seqlens = ends.to(device)
        sequences = len(self.lengths) or self.batch
        initial = None
        if state is not None:
            shape = (sequences, value_heads, self.value_dim, self.head_dim)
            initial = empty(*shape, dtype=state)
        a_log = None if self.no_a_log else empty(value_heads, dtype=parameter)
        bias = None if self.no_dt_bias else empty(value_heads * self.head_dim, dtype=parameter)
        return {
            "q": rows(self.heads, self.head_dim, dtype),
            "k": rows(self.heads, self.head_dim, dtype),
            "v": rows(value_heads, self.value_dim, dtype),
            "g": rows(value_heads, self.head_dim, gate),
            "beta": empty(self.batch, self.tokens, value_heads, dtype=beta),
            "initial_state": initial,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": not self.no_l2norm_in_kernel,
            "use_gate_in_kernel": not self.no_gate_in_kernel,
            "use_beta_sigmoid_in_kernel": not self.no_beta_sigmoid_in_kernel,
            "allow_neg_eigval": self.allow_neg_eigval,
            "safe_gate": not self.no_safe_gate,
            "lower_bound": self.lower_bound,
            "return_intermediate_states": self.intermediate_states,
            "state_v_first": not self.state_k_first,
            "cu_seqlens": cu_seqlens,
            "cp_context": object() if self.context_parallel else None,
            "A_log": a_log,
            "dt_bias": bias,
        }

    def forward_arguments(self) -> dict[str, Any]:
        """The arguments that ``flash_kda.fwd`` would get for it."""
        with torch.no_grad():
            return fla.forward_arguments(self.call(), copy=False)


def _default_device() -> str:
    return str(machine.devices()[:2][-1])


def add_call_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for the fields of ``Problem``."""
    group = parser.add_argument_group("the call")
    helps = {
        "device": "cpu, cuda, cuda:1 (default: the first GPU, else cpu)",
        "lengths": "of sequences told apart by cu_seqlens, as 100,200,300",
        "value_heads": "grouped values: heads of v (default: as --heads)",
        "dtype": "of q, k, v",
        "gate_dtype": "of g",
        "parameter_dtype": "of A_log and dt_bias",
        "state_dtype": "of the initial state; none: there is none",
        "lower_bound": "a number, or none for the softplus gate",
        "strided": "q, k, v, g are views of head-first tensors",
        "grad": "gradients are enabled and wanted",
        "no_a_log": "A_log is None",
    }
    default = Problem()
    for f in fields(Problem):
        value, option = getattr(default, f.name), "--" + f.name.replace("_", "-")
        text = helps.get(f.name)
        if isinstance(value, bool):
            group.add_argument(option, action="store_true", help=text)
        elif f.name.endswith("dtype"):
            group.add_argument(option, choices=list(_DTYPES), default=value, help=text)
        elif f.name == "lower_bound":
            group.add_argument(option, type=_number_or_none, default=value, help=text)
        elif isinstance(value, int):
            group.add_argument(option, type=int, default=value, help=text)
        else:
            group.add_argument(option, help=text)


def _number_or_none(text: str) -> float | None:
    return None if text.lower() == "none" else float(text)


# --- the verifiers ------------------------------------------------------------------------------


def own_refusals(problem: Problem) -> list[str]:
    """All reasons of the backend of ``flash_kda.fla.register()``."""
    return _all_reasons(problem, lambda call: fla.refusals(call))


@dataclass(frozen=True)
class Shipped:
    """What the backend that the installed FLA ships answers."""

    refusals: list[str]
    uncaught: list[str]  # what it lets through although flash_kda.fwd can't run it


def shipped(problem: Problem) -> Shipped:
    """Asks FLA's own backend, as it is, for all its reasons."""
    importlib.import_module("fla.ops.kda")
    backend = importlib.import_module("fla.ops.kda.backends.flash_kda").FlashKDABackend()

    def ask(call: dict[str, Any]) -> list[str]:
        accepted, reason = backend.verify("chunk_kda", **call)
        return [] if accepted else [reason or "no reason given"]

    def let_through(call: dict[str, Any]) -> list[str]:
        return [] if ask(call) else fla.refusals(call)

    return Shipped(_all_reasons(problem, ask), _all_reasons(problem, let_through))


def _all_reasons(problem: Problem, ask: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    reasons: list[str] = []
    for one in [*problem.deviations(), problem]:
        with torch.set_grad_enabled(one.grad):
            try:
                found = ask(one.call())
            except Exception as error:  # FLA takes an exception for a refusal
                found = [f"{type(error).__name__}: {error}"]
        reasons += [reason for reason in found if reason not in reasons]
    return reasons


def switched_off() -> list[str]:
    """What in the environment keeps FLA from asking any backend of this package."""
    reasons = []
    if os.environ.get(fla.OPT_OUT_ENV, "1") == "0":
        reasons.append(f"{fla.OPT_OUT_ENV}=0 in the environment")
    if os.environ.get(fla.DISPATCH_OFF_ENV) == "1":
        reasons.append(f"{fla.DISPATCH_OFF_ENV}=1 in the environment")
    return reasons
