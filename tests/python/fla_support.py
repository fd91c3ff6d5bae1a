"""What the tests with flash-linear-attention (FLA) share: its call, its dispatch, its log."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from flash_kda.cases import Inputs
from flash_kda.cli import peers


def need_fla() -> None:
    """Skips a module's tests where FLA is not installed."""
    pytest.importorskip("fla", reason="fla-core is not installed")
    if reason := peers.missing_fla():
        pytest.skip(reason, allow_module_level=True)


def chunk_kda(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    return importlib.import_module("fla.ops.kda").chunk_kda(*args, **kwargs)


def arguments(inputs: Inputs, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """FLA's call of a case, with changes; ... removes an argument."""
    call = {**peers.fla_arguments(inputs), **changes}
    return {name: value for name, value in call.items() if value is not ...}


def naive(x: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FLA's token loop in fp32, sequence after sequence, with activations applied before."""
    from fla.ops.kda.naive import naive_recurrent_kda

    rows = peers.activated(x)
    if x.cu_seqlens is None:
        sequences = [(slice(None), slice(None), slice(None))]
    else:
        ends = x.cu_seqlens.tolist()
        spans = zip(ends, ends[1:], strict=False)
        sequences = [(slice(None), slice(a, b), slice(n, n + 1)) for n, (a, b) in enumerate(spans)]
    out, finals = torch.zeros_like(rows["v"]), []
    for batch, tokens, state in sequences:
        initial = x.initial_state
        if initial is not None:
            initial = initial[state].float().transpose(-1, -2)
        part = {name: tensor[batch, tokens] for name, tensor in rows.items()}
        o, final = naive_recurrent_kda(
            **part, scale=x.scale, initial_state=initial, output_final_state=True
        )
        out[batch, tokens] = o
        finals.append(final.transpose(-1, -2))
    return out, torch.cat(finals) if x.final_state is not None else None


def registry() -> Any:  # noqa: ANN401
    """FLA's registry of backends of chunk_kda."""
    chunk = importlib.import_module("fla.ops.kda.chunk")
    machinery = sys.modules[chunk.dispatch.__module__]
    if hasattr(machinery, "register"):  # from 0.6.0
        return machinery._function_registries[inspect.unwrap(chunk.chunk_kda)]
    return importlib.import_module("fla.ops.kda.backends").kda_registry


@contextmanager
def shipped_backend() -> Iterator[None]:
    """Puts FLA's own flash_kda backend (back) in, before and after."""
    backend = importlib.import_module("fla.ops.kda.backends.flash_kda").FlashKDABackend
    registry().register(backend())
    try:
        yield
    finally:
        registry().register(backend())


class Log(logging.Handler):
    """FLA's log of what it dispatched, which it writes once for each outcome."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        importlib.import_module("fla.ops.kda")
        self._logger = logging.getLogger(type(registry()).__module__)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Log:
        registry()._logged.clear()
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    @property
    def hit(self) -> bool:
        older = importlib.import_module("fla").__version__ < "0.6"
        function = "kda.chunk_kda" if older else "fla.ops.kda.chunk.chunk_kda"
        return f"[FLA Backend] {function} -> flash_kda" in self.lines

    @property
    def rejection(self) -> str | None:
        """Why flash_kda was not chosen."""
        mark = "-> flash_kda rejected: "
        return next((line.split(mark)[1] for line in self.lines if mark in line), None)


def rms_ratio(found: torch.Tensor, expected: torch.Tensor) -> float:
    """FLA's measure: RMS of the difference by RMS of what is expected."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    return ((found - expected).square().mean() / expected.square().mean()).sqrt().item()
