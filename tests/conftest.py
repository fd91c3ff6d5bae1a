"""Options, and the parametrisation of tests over the implementations of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

GPU_FOLDER = "gpu"
NO_GPU = "no CUDA device"

sys.path.insert(0, str(Path(__file__).parent / "python"))  # support.py, for tests/gpu too


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: runs on a GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="takes minutes: run with --run-slow")
    for item in items:
        # By the marker: a keyword is also the name of a case.
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(slow)
        if item.path.parent.name == GPU_FOLDER:
            item.add_marker(pytest.mark.cuda)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(trylast=True)  # the innermost loop: all implementations of one case in a row
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`target`: every implementation that runs here, on each of its devices; `fast_target`: all
    but the oracle, for tests that compare with the oracle."""
    for name in ("target", "fast_target"):
        if name not in metafunc.fixturenames:
            continue
        import support

        targets = support.targets()
        if metafunc.definition.path.parent.name == GPU_FOLDER:
            targets = [t for t in targets if t.device == "cuda"]
        if name == "fast_target":
            targets = [t for t in targets if t.implementation != support.ORACLE]
        marks = {"cuda": [pytest.mark.cuda], "cpu": []}
        params = [pytest.param(t, id=t.implementation, marks=marks[t.device]) for t in targets]
        if not params:
            params = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=NO_GPU))]
        metafunc.parametrize(name, params)


@pytest.fixture(autouse=True)
def _no_forced_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_KDA_FORCE_IMPL", raising=False)
