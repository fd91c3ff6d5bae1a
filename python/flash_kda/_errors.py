"""From the core's status codes to Python's exceptions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

# The numbers of enum flash_kda_status in flash_kda/c_api.h, and the binding's own one for a
# workspace that torch can't allocate (torch < 2.5 has the exception in torch.cuda alone).
EXCEPTIONS: dict[int, type[Exception]] = {
    1: ValueError,
    2: TypeError,
    3: NotImplementedError,
    4: RuntimeError,
    5: getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError),
}

# How python/binding/torch_binding.cc puts the code in front of the message.
_CODED = re.compile(r"\[flash_kda:(\d)\] (.*)", re.DOTALL)


def from_status(code: int, message: str) -> Exception:
    """The exception that a status other than OK becomes."""
    return EXCEPTIONS.get(code, RuntimeError)(message)


# The arguments of fwd: tensors, tensors or None, numbers.
_TENSORS = ("q", "k", "v", "g", "beta")
_OPTIONAL = ("out", "A_log", "dt_bias", "initial_state", "final_state", "cu_seqlens", "workspace")
_NUMBERS = ("scale", "lower_bound")


def check_tensors(arguments: Mapping[str, object]) -> None:
    """Raises TypeError for the first argument of fwd, by name, that should be a tensor."""
    for name in (*_TENSORS, *_OPTIONAL):
        value, optional = arguments[name], name in _OPTIONAL
        if isinstance(value, torch.Tensor) or (value is None and optional):
            continue
        expected = "a torch.Tensor or None" if optional else "a torch.Tensor"
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def check_numbers(arguments: Mapping[str, object]) -> None:
    """Raises TypeError for the first argument of fwd, by name, that should be a number."""
    for name in _NUMBERS:
        value = arguments[name]
        try:
            math.isnan(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise TypeError(f"{name}: expected a float, got {type(value).__name__}") from None


def translate(error: Exception, arguments: Mapping[str, object]) -> Exception:
    """What to raise for an exception out of the operator or of the code around it, called with
    these arguments of fwd."""
    coded = _CODED.match(str(error))
    if coded:
        return from_status(int(coded[1]), coded[2])
    try:
        check_tensors(arguments)
        check_numbers(arguments)
    except TypeError as wrong_type:
        return wrong_type
    return error
