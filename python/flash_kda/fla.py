"""A backend of our own for flash-linear-attention's ``chunk_kda``.

FLA finds ``flash_kda`` by itself, with a backend of FLA's own that checks some of what
``flash_kda.fwd`` needs. ``register()`` puts this one in its place. It asks ``flash_kda.explain``: a
call that some implementation here can run goes there, any other goes to FLA's Triton kernels with
all reasons in FLA's log, and none fails for having been sent to the wrong place. FLA logs the first
such call of a process; ``python -m flash_kda doctor`` tells the reasons of any. This backend also
takes calls that FLA's never sends here: the [K, V] layout of states, A_log or dt_bias left out,
gradients enabled but wanted of no input.

Tested with fla-core 0.5.2 and 0.6.0.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

import flash_kda

MIN_FLA = "0.5.2"
BACKEND_TYPE = "flash_kda"  # FLA's own backend has the same, so that ours replaces it
OPT_OUT_ENV = "FLA_FLASH_KDA"  # 0: FLA never calls flash_kda
DISPATCH_OFF_ENV = "FLA_DISABLE_BACKEND_DISPATCH"  # 1, when FLA is imported: no backends at all
PRIORITY = 2  # FLA's own has 3; less comes first

_ALIGNMENT = 16  # bytes: of rows on CUDA, their strides included
_IN_KERNEL_FLAGS = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel")


def register() -> None:
    """Makes FLA's ``chunk_kda`` ask flash_kda first. Again is harmless.

    Raises:
        ImportError: FLA is not installed, or is too old to have backends.
        RuntimeError: FLA's dispatch is switched off, so that a backend would never be asked.
    """
    try:
        chunk = importlib.import_module("fla.ops.kda.chunk")
        importlib.import_module("fla.ops.kda.backends")
        # fla.backends from 0.6.0, fla.ops.backends before.
        machinery = sys.modules[chunk.dispatch.__module__]
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"flash_kda.fla.register: expected fla-core >= {MIN_FLA}, and with it einops, "
            f"packaging and triton; importing fla.ops.kda failed: {error}"
        ) from error
    if getattr(machinery, "_DISPATCH_DISABLED", False):
        raise RuntimeError(
            f"{DISPATCH_OFF_ENV}: expected unset or 0 when FLA was imported, got 1, which makes it "
            "ask no backend"
        )
    backend = _make_backend(machinery.BaseBackend, inspect.unwrap(chunk.chunk_kda))
    if hasattr(machinery, "register"):  # from 0.6.0
        machinery.register(chunk.chunk_kda)(backend)
    else:
        importlib.import_module("fla.ops.kda.backends").kda_registry.register(backend())


def _make_backend(base: type, chunk_kda: Any) -> type:  # noqa: ANN401
    # The order of positional arguments differs between versions of FLA.
    names = tuple(
        name
        for name, parameter in inspect.signature(chunk_kda).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )

    class FlashKDABackend(base):
        backend_type = BACKEND_TYPE
        package_name = "flash_kda"
        env_var = OPT_OUT_ENV
        default_enable = True
        priority = PRIORITY

        def chunk_kda_verifier(self, *args: object, **kwargs: object) -> tuple[bool, str | None]:
            reasons = refusals({**dict(zip(names, args, strict=False)), **kwargs})
            return not reasons, "; ".join(reasons) or None

        def chunk_kda(
            self, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return run({**dict(zip(names, args, strict=False)), **kwargs})

    return FlashKDABackend


def refusals(call: Mapping[str, Any]) -> list[str]:
    """Why flash_kda can't run a call of ``chunk_kda``, given by argument names; empty when it can.

    Only the last reason, of the shapes, dtypes and devices, may hide others of its kind.
    """
    reasons = []
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    if torch.is_grad_enabled():
        wanted = [name for name, tensor in tensors.items() if tensor.requires_grad]
        if wanted:
            reasons.append(f"inference only, and gradients are wanted of {', '.join(wanted)}")
    missing = [flag for flag in _IN_KERNEL_FLAGS if not call.get(flag)]
    reasons += [f"{flag}: expected True, got False" for flag in missing]
    if call.get("allow_neg_eigval"):
        reasons.append("allow_neg_eigval: expected False, got True")
    if call.get("cp_context") is not None:
        reasons.append("cp_context: context parallelism is not supported")
    if call.get("return_intermediate_states"):
        reasons.append("return_intermediate_states: expected False, got True")
    if call.get("lower_bound") is None:
        reasons.append("lower_bound: expected a number in [-5, 0], got None, the softplus gate")
    q, v = call["q"], call["v"]
    if q.dim() == v.dim() == 4 and q.shape[2] != v.shape[2]:
        reasons.append(f"grouped values: expected v of {q.shape[2]} heads as q, got {v.shape[2]}")
    elif call.get("lower_bound") is not None:
        reasons += _forward_refusal(forward_arguments(call, copy=False))
    return reasons


def run(call: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs a call of ``chunk_kda`` that has no refusals: its output and final state."""
    arguments = forward_arguments(call, copy=True)
    out = flash_kda.fwd(**arguments)
    final = arguments["final_state"]
    if final is not None and not _state_v_first(call):
        final = final.transpose(-1, -2).contiguous()
    return out, final


def _state_v_first(call: Mapping[str, Any]) -> bool:
    return bool(call.get("state_v_first") or call.get("transpose_state_layout"))


def forward_arguments(call: Mapping[str, Any], copy: bool) -> dict[str, Any]:
    """The arguments of ``flash_kda.fwd``; without copy they are for ``explain`` alone."""
    q, v, cu_seqlens = call["q"], call["v"], call.get("cu_seqlens")
    initial = call.get("initial_state")
    if initial is not None:
        initial = initial if _state_v_first(call) else initial.transpose(-1, -2)
        initial = _dense(initial, initial.is_contiguous(), copy)
    final = None
    if call.get("output_final_state"):
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        shape = (sequences, v.shape[2], v.shape[3], q.shape[3])
        final = torch.empty(shape, dtype=torch.float32, device=q.device)
    scale = call.get("scale")
    parameters = {name: call.get(name) for name in ("A_log", "dt_bias")}
    return {
        **{name: _dense(call[name], _has_dense_rows(call[name]), copy) for name in "qkvg"},
        **{
            name: None if tensor is None else _dense(tensor, tensor.is_contiguous(), copy)
            for name, tensor in parameters.items()
        },
        "beta": call["beta"],
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "out": torch.empty(v.shape, dtype=v.dtype, device=v.device) if copy else None,
        "lower_bound": call["lower_bound"],
        "initial_state": initial,
        "final_state": final,
        "cu_seqlens": cu_seqlens,
    }


def _dense(tensor: torch.Tensor, already: bool, copy: bool) -> torch.Tensor:
    if already:
        return tensor
    dense = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return dense.copy_(tensor) if copy else dense


def _has_dense_rows(tensor: torch.Tensor) -> bool:
    """Whether fwd takes these [B, T, H, 128] as they lie."""
    if tensor.dim() != 4 or tensor.stride()[2:] != (tensor.shape[3], 1):
        return tensor.dim() == 4 and tensor.is_contiguous()
    if tensor.device.type != "cuda":
        return True
    offsets = (tensor.data_ptr(), *(s * tensor.element_size() for s in tensor.stride()[:2]))
    return all(offset % _ALIGNMENT == 0 for offset in offsets)


def _forward_refusal(arguments: Mapping[str, Any]) -> list[str]:
    """No or one reason why no implementation runs these arguments of ``flash_kda.fwd``."""
    with torch.no_grad():  # refusals() looks at gradients itself
        verdicts = flash_kda.explain(**arguments)
    if any(verdict.accepted for verdict in verdicts):
        return []
    if len({verdict.reason for verdict in verdicts}) == 1:  # the arguments themselves are wrong
        return [verdicts[0].reason]
    return [", ".join(f"{verdict.name}: {verdict.reason}" for verdict in verdicts)]
