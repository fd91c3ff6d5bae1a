"""Registers torch.ops.flash_kda.fwd.

With torch >= 2.10 it is python/binding/torch_binding.cc; with an older torch, or with
FLASH_KDA_BINDING=ctypes in the environment, it is _ctypes.forward under the same schema.
"""

from __future__ import annotations

import os
import re
import warnings

import torch

from flash_kda import _build_info, _ctypes

MIN_TORCH = (2, 4)
MIN_TORCH_FOR_BINDING = (2, 10)
BINDING_ENV = "FLASH_KDA_BINDING"

# torch_binding.cc has the same; a test compares them.
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
    "Tensor(c!)? workspace, Tensor? A_log, Tensor? dt_bias, float lower_bound, "
    "Tensor? initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None) -> ()"
)

_ARGUMENTS = re.findall(r"(\w+)(?:=None)?[,)]", SCHEMA)
_HEAD_DIM = 128


def _torch_version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def _load_binding() -> bool:
    wanted = os.environ.get(BINDING_ENV, "auto")
    if wanted not in ("auto", "torch", "ctypes"):
        raise ImportError(f"{BINDING_ENV}: expected auto, torch or ctypes, got {wanted}")
    found = _torch_version()
    if found < MIN_TORCH:
        raise ImportError(
            f"flash_kda: expected torch >= {'.'.join(map(str, MIN_TORCH))}, "
            f"found {torch.__version__}"
        )
    if wanted == "ctypes" or (wanted == "auto" and found < MIN_TORCH_FOR_BINDING):
        return False
    path = _ctypes.find_binary("_torch.so")
    if path is None and wanted == "torch":
        raise ImportError(f"{BINDING_ENV}=torch: this installation was built without the binding")
    if path is None:
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        message = (
            f"flash_kda: its torch operator, built with torch {_build_info.TORCH}, does not load "
            f"in torch {torch.__version__}: {error}"
        )
        if wanted == "torch":
            raise ImportError(message) from error
        warnings.warn(
            f"{message}. Calls go through ctypes, with a higher overhead.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _register_with_ctypes() -> torch.library.Library:
    def forward(*given: torch.Tensor | float | None) -> None:  # optional ones may be left out
        _ctypes.forward(dict(zip(_ARGUMENTS, given, strict=False)))

    library = torch.library.Library("flash_kda", "DEF")
    library.define(SCHEMA)
    for key in ("CPU", "CUDA"):
        library.impl("fwd", forward, key)
    return library


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float,
    initial_state: torch.Tensor | None = None,
    final_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> None:
    """Checks what shapes and dtypes alone can tell; the core checks everything at each call."""
    if q.dim() != 4 or q.shape[3] != _HEAD_DIM:
        raise ValueError(f"q: expected shape [B, T, H, {_HEAD_DIM}], got {tuple(q.shape)}")
    for name, rows in {"q": q, "k": k, "v": v, "g": g, "out": out}.items():
        if rows.dtype != torch.bfloat16:
            raise TypeError(f"{name}: expected dtype bfloat16, got {rows.dtype}")
        _check_shape(name, rows, q.shape)
    _check_shape("beta", beta, q.shape[:3])
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for name, state in {"initial_state": initial_state, "final_state": final_state}.items():
        if state is not None:
            _check_shape(name, state, (sequences, q.shape[2], _HEAD_DIM, _HEAD_DIM))


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    same = tensor.dim() == len(expected)
    if not same or any(a != b for a, b in zip(tensor.shape, expected, strict=True)):
        raise ValueError(f"{name}: expected shape {tuple(expected)}, got {tuple(tensor.shape)}")


USES_BINDING = _load_binding()
# Kept: the registration lives as long as this object.
_library = None if USES_BINDING else _register_with_ctypes()
torch.library.register_fake("flash_kda::fwd", _fake)
forward = torch.ops.flash_kda.fwd.default
