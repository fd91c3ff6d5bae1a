"""The functions that the package offers."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from flash_kda import _ctypes, _errors
from flash_kda._operator import forward as _forward

_NO_BOUND = (
    "lower_bound: expected a float in [-5, 0], got None. Only the bounded gate, lower_bound * "
    "sigmoid(exp(A_log) * (g + dt_bias)), is supported; the softplus gate without a bound is not "
    "(flash-linear-attention's Triton kernels take it)."
)


@dataclass(frozen=True)
class Verdict:
    """Whether one implementation would run a call."""

    name: str
    accepted: bool
    reason: str  # why not; empty when accepted

    def __str__(self) -> str:
        return f"{self.name}: " + ("accepted" if self.accepted else f"refused, {self.reason}")


def fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes Kimi Delta Attention over whole sequences and returns ``out``.

    Per sequence and head, with a state S [V, K] and, per token, over K = 128 key channels::

        k^ = k * rsqrt(sum(k^2) + 1e-6)          q^ likewise
        S <- S * diag(exp(lower_bound * sigmoid(exp(A_log) * (g + dt_bias))))
        S <- S + sigmoid(beta) * (v - S k^) k^T
        o = scale * S q^

    All tensors lie on one device. B, T, H are batch, tokens and heads; N is the number of
    sequences: B, or ``len(cu_seqlens) - 1``. It is for inference only: no gradients.

    Args:
        q, k, v, g: [B, T, H, 128] bfloat16; g is the gate before its activation. The batch and
            token strides are free.
        beta: [B, T, H] bfloat16 or float32 logits, any strides.
        scale: multiplies the output.
        out: [B, T, H, 128] bfloat16, written; None allocates it. Rows that belong to no sequence
            are left as they are.
        A_log: [H] float32 or bfloat16; None means zeros.
        dt_bias: [H, 128] or [H * 128] float32 or bfloat16; None means zeros.
        lower_bound: of the natural-log decay of one token, in [-5, 0]. Must be given.
        initial_state: [N, H, V, K] float32 or bfloat16; None means zeros.
        final_state: likewise, written; None means not wanted. May be the same tensor as
            initial_state.
        cu_seqlens: [N + 1] int64 or int32, offsets of the sequences in T, from 0; B must then
            be 1.
        workspace: [bytes] uint8 of at least ``get_workspace_size(B * T, H, N)`` bytes; None
            allocates what is needed.

    Raises:
        ValueError: a shape, stride, device or value is not legal.
        TypeError: a dtype is not legal, or an argument is no tensor.
        NotImplementedError: no implementation here can run the call, or gradients are wanted.
        RuntimeError: the device or the system failed.
    """
    if lower_bound is None:
        raise ValueError(_NO_BOUND)
    try:
        if torch.is_grad_enabled():
            reason = _gradients_wanted(q, k, v, g, beta, A_log, dt_bias, initial_state)
            if reason is not None:
                raise NotImplementedError(reason)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        _forward(
            q,
            k,
            v,
            g,
            beta,
            scale,
            out,
            workspace,
            A_log,
            dt_bias,
            lower_bound,
            initial_state,
            final_state,
            cu_seqlens,
        )
    except Exception as error:
        raise _errors.translate(error, locals()) from None  # the arguments by name
    return out


_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def _gradients_wanted(*inputs: torch.Tensor | None) -> str | None:
    """Why a call with gradients enabled is refused; None where none of _INPUTS wants any."""
    if not any(x is not None and x.requires_grad for x in inputs):
        return None
    pairs = zip(_INPUTS, inputs, strict=True)
    names = [name for name, x in pairs if x is not None and x.requires_grad]
    return (
        f"flash_kda.fwd is for inference only, and gradients are wanted of {', '.join(names)}: "
        "call it under torch.inference_mode() or torch.no_grad(), or detach them."
    )


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of workspace that suffice for N sequences of T_total tokens in all and H heads.

    Integer arithmetic alone; it never falls when an argument grows.

    Raises:
        TypeError: an argument is no integer.
        ValueError: an argument is negative.
    """
    sizes = []
    for name, value in {"T_total": T_total, "H": H, "N": N}.items():
        try:
            sizes.append(operator.index(value))
        except TypeError:
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
        if sizes[-1] < 0:
            raise ValueError(f"{name}: expected at least 0, got {sizes[-1]}")
    return _ctypes.workspace_size(*sizes)


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> list[Verdict]:
    """Says of each implementation, best first, whether it would run ``fwd`` of these arguments.

    Nothing is run or written. Arguments that are not legal are every implementation's reason.
    """
    arguments = dict(locals())
    _errors.check_tensors(arguments)
    reason = _NO_BOUND if lower_bound is None else None
    if reason is None and torch.is_grad_enabled():
        reason = _gradients_wanted(q, k, v, g, beta, A_log, dt_bias, initial_state)
    if reason is not None:
        return [Verdict(name, False, reason) for name in _ctypes.implementation_names()]
    _errors.check_numbers(arguments)
    arguments |= {"scale": float(scale), "lower_bound": float(lower_bound)}
    if out is None:
        arguments["out"] = torch.empty_like(v, memory_format=torch.contiguous_format)
    verdicts = (line.split("\t", 2) for line in _ctypes.explain(arguments).splitlines())
    return [Verdict(name, word == "accepted", reason) for name, word, reason in verdicts]
