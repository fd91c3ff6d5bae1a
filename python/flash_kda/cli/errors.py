"""The exact result of a call, how far others are from it, and how far they may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_kda import cases
from flash_kda.cli import machine

_NORM_EPSILON = 1e-6

# Relative errors that are allowed, of the output and of an fp32 state. Rounding an exact output to
# bf16 alone makes about 1.7e-3.
REFERENCE_LIMITS = (3e-3, 1e-7)  # fp64, against ``exact``
_CPU_LIMITS = (3e-3, 1e-5)
# By kind of inputs. randn to half-fast: the errors of MoonshotAI/FlashKDA 1ce47ea on an H200
# (docs/numerics.md). fla-test: what FLA's own tests allow.
_CUDA_LIMITS = {
    "randn": (0.0057, 0.0046),
    "bench": (0.0057, 0.0046),
    "fla-test": (0.0060, 0.0060),
    "slow": (0.0067, 0.0057),
    "slower": (0.0067, 0.0057),
    "fla-init": (0.0067, 0.0057),
    "half-fast": (0.0072, 0.0066),
    "fastest": (0.0072, 0.0066),
    "tiny-v": (0.01, 0.01),
    "huge-v": (0.01, 0.01),
    "one-key": (0.03, 0.05),
    "near-6": (0.03, 0.05),
    "near-9": (0.03, 0.05),
}
BF16_STATE_LIMIT = 3e-3  # a state in bf16 may show at least that


def limits(device_type: str, inputs: str) -> tuple[float, float]:
    """The relative errors that output and fp32 state may have on these inputs."""
    return _CPU_LIMITS if device_type == "cpu" else _CUDA_LIMITS[inputs]


def exact(
    x: cases.Inputs, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and, where it is wanted, final state in fp64, token after token, nothing rounded.

    It is what the implementation ``reference`` computes before it rounds to bf16. A GPU is the
    faster device where there are many heads.
    """
    with machine.one_thread():  # its products are too small to share
        return _exact(x.to(device))


def _exact(x: cases.Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v, g, beta = (tensor.double() for tensor in (x.q, x.k, x.v, x.g, x.beta))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _NORM_EPSILON) for t in (q, k))
    rate = x.A_log.double().exp()[:, None]
    decay = (x.lower_bound * torch.sigmoid(rate * (g + x.dt_bias.double()))).exp()
    beta = beta.sigmoid()[..., None]
    batch, tokens, heads, dim = q.shape
    if x.cu_seqlens is None:
        spans = [(slice(None), 0, tokens)]  # all batch entries at once
    else:
        ends = x.cu_seqlens.tolist()
        spans = [(slice(0, 1), a, b) for a, b in zip(ends, ends[1:], strict=False)]
    out, finals = torch.zeros_like(v), []
    for n, (rows, begin, end) in enumerate(spans):
        state = v.new_zeros(batch * heads, dim, dim)
        if x.initial_state is not None:
            first = x.initial_state if x.cu_seqlens is None else x.initial_state[n : n + 1]
            state = first.double().flatten(0, 1)
        # [tokens, batch * heads, channels], so that a token is one contiguous slice.
        part = (t[rows, begin:end].transpose(0, 1).flatten(1, 2) for t in (q, k, v, decay, beta))
        for t, (q_t, k_t, v_t, decay_t, beta_t) in enumerate(zip(*part, strict=True), begin):
            state = state * decay_t[:, None]
            missing = v_t - torch.bmm(state, k_t[..., None])[..., 0]
            state.baddbmm_((beta_t * missing)[..., None], k_t[:, None])
            o_t = x.scale * torch.bmm(state, q_t[..., None])[..., 0]
            out[rows, t] = o_t.view(-1, heads, dim)
        if x.final_state is not None:
            finals.append(state.view(-1, heads, dim, dim))
    if x.final_state is None:
        return out, None
    return out, torch.cat(finals) if finals else v.new_zeros(0, heads, dim, dim)


@dataclass(frozen=True)
class Error:
    """Differences of one tensor from the exact one, computed in fp64."""

    largest: float
    mean: float  # of the absolute difference
    rms: float
    relative: float  # norm of the difference by the norm of the exact
    finite: bool

    @classmethod
    def between(cls, found: torch.Tensor, expected: torch.Tensor) -> Error:
        found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
        if expected.numel() == 0:
            return cls(0.0, 0.0, 0.0, 0.0, True)
        difference = found - expected
        # Norms of 1e20 and of 1e-20 alike: scaled by the largest number first.
        unit = expected.abs().max().item() or 1.0
        norm = (expected / unit).norm().item()
        distance = (difference / unit).norm().item()
        return cls(
            largest=difference.abs().max().item(),
            mean=difference.abs().mean().item(),
            rms=distance * unit / difference.numel() ** 0.5,
            relative=distance / norm if norm > 0 else distance,
            finite=bool(torch.isfinite(found).all()),
        )


def sequence_rows(case: cases.Case, out: torch.Tensor) -> torch.Tensor:
    """The rows of an output that belong to a sequence."""
    return out if case.lengths is None else out[:, : case.rows]


def differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Absolute differences by the root mean square of the exact: what histograms show."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    unit = expected.abs().max().item() or 1.0
    rms = unit * (expected / unit).square().mean().sqrt().item()
    return ((found - expected).abs() / (rms or 1.0)).flatten()
