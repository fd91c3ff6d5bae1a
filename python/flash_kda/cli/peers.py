"""Other people's kernels beside ours: flash-linear-attention (FLA), where it is installed."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator

import torch

from flash_kda.cases import Inputs
from flash_kda.cli.machine import environment, installed
from flash_kda.fla import OPT_OUT_ENV

FLA_TRITON = "fla triton"
FLA_NAIVE = "fla naive_recurrent_kda"

Result = tuple[torch.Tensor, torch.Tensor | None]


def missing_fla() -> str | None:
    """Why FLA can't be called here; None when it can."""
    if installed("fla-core") is None:
        return "fla-core is not installed (pip install fla-core einops packaging)"
    try:
        logging.getLogger("fla").setLevel(logging.ERROR)
        importlib.import_module("fla.ops.kda")
    except Exception as error:  # whatever its own imports raise
        return f"fla-core does not import: {type(error).__name__}: {error}"
    return None


def fla_triton(x: Inputs) -> Result:
    """FLA's Triton kernels on our inputs, with its dispatch to flash_kda switched off."""
    from fla.ops.kda import chunk_kda

    with environment(OPT_OUT_ENV, "0"), torch.inference_mode():
        return chunk_kda(**fla_arguments(x))


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Triton compiles the first configuration of a kernel instead of all of them to time each:
    seconds, not minutes. It changes how fast a kernel is, so this is for everything but times."""
    tuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune = tuner.prune_configs
    tuner.prune_configs = lambda self, given: prune(self, given)[:1]
    try:
        yield
    finally:
        tuner.prune_configs = prune


def fla_arguments(x: Inputs) -> dict[str, object]:
    """The arguments of FLA's ``chunk_kda`` for the call that ``x`` describes."""
    return {
        **{name: getattr(x, name) for name in ("q", "k", "v", "g", "beta", "A_log")},
        "dt_bias": x.dt_bias.flatten(),
        "scale": x.scale,
        "initial_state": None if x.initial_state is None else x.initial_state.float(),
        "output_final_state": x.final_state is not None,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": x.lower_bound,
        "state_v_first": True,
        "cu_seqlens": x.cu_seqlens,
    }


def activated(x: Inputs, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """q, k, v, g and beta after the activations that ``naive_recurrent_kda`` leaves out."""
    q, k, v, g, beta = (t.to(dtype) for t in (x.q, x.k, x.v, x.g, x.beta))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    rate = x.A_log.to(dtype).exp()[:, None]
    gate = x.lower_bound * torch.sigmoid(rate * (g + x.dt_bias.to(dtype)))
    return {"q": q, "k": k, "v": v, "g": gate, "beta": beta.sigmoid()}
