"""What there is on this machine: versions, devices, implementations."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flash_kda
from flash_kda import _ctypes
from flash_kda._operator import MIN_TORCH

FORCE_ENV = "FLASH_KDA_FORCE_IMPL"  # flash_kda/backends.h: kForceEnv
REFERENCE = "reference"

# The oldest that works. Without CUDA only the first two matter.
MIN_PYTHON = (3, 10)
MIN_CUDA = (12, 9)
MIN_CAPABILITY = (8, 0)
MIN_DRIVER_OF_CUDA = {12: 525, 13: 580}  # by CUDA's major version, for Linux


@dataclass(frozen=True)
class Finding:
    """One requirement: what was found and what is required."""

    what: str
    found: str
    required: str
    good: bool


def version_tuple(text: str) -> tuple[int, ...]:
    """(2, 11, 0) of "2.11.0+cu130"."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def findings() -> list[Finding]:
    rows = [
        _at_least("Python", platform.python_version(), MIN_PYTHON),
        _at_least("torch", torch.__version__, MIN_TORCH),
    ]
    of_torch = torch.version.cuda
    if of_torch is None or not _ctypes.built_cuda_archs():
        rows.append(Finding("CUDA of torch", of_torch or "none", "none (CPU only)", True))
    else:
        rows.append(_at_least("CUDA of torch", of_torch, MIN_CUDA))
        rows.append(_driver())
        for device in devices()[1:]:
            capability = dotted(torch.cuda.get_device_capability(device))
            rows.append(_at_least(f"capability of {device}", capability, MIN_CAPABILITY))
    return rows


def _at_least(what: str, found: str, required: tuple[int, ...]) -> Finding:
    return Finding(what, found, f">= {dotted(required)}", version_tuple(found) >= required)


def _driver() -> Finding:
    """The GPU driver, as the file that Linux' driver offers or nvidia-smi says."""
    major = version_tuple(torch.version.cuda or "13")[0]
    minimum = MIN_DRIVER_OF_CUDA.get(major, max(MIN_DRIVER_OF_CUDA.values()))
    found = driver_version()
    required = f">= {minimum} (CUDA {major})"
    if found is None:  # a machine that has no GPU to drive
        return Finding("NVIDIA driver", "none", required + ", for GPUs", True)
    return Finding("NVIDIA driver", found, required, version_tuple(found)[0] >= minimum)


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return answer.stdout.split()[0] if answer.stdout.split() else None
    return None


def devices() -> list[torch.device]:
    """The CPU, and every GPU that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(count))]


def device_of_option(text: str) -> torch.device:
    """What --device names; an ArgumentTypeError says which there are."""
    wanted = "cuda:0" if text == "cuda" else text
    found = devices()
    for device in found:
        if str(device) == wanted:
            return device
    why = f" ({why_no_cuda()})" if len(found) == 1 else ""
    raise argparse.ArgumentTypeError(f"expected {' or '.join(map(str, found))}, got {text}{why}")


def why_no_cuda() -> str:
    """What keeps torch from seeing a GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if (driver := driver_version()) is None:
        return "nvidia-smi finds no driver"
    return f"torch, built for CUDA {torch.version.cuda}, sees none with driver {driver}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def file_stem(device: torch.device) -> str:
    """What files about a device are called: "h200" for an NVIDIA H200."""
    name = device_name(device).lower().removeprefix("nvidia ")
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


def device_text(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device_name(device)}, {torch.get_num_threads()} threads"
    found = torch.cuda.get_device_properties(device)
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, "
        f"{found.multi_processor_count} SMs, {found.total_memory / 2**30:.0f} GiB"
    )


@contextlib.contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Sets, or with None removes, a variable of the environment for a while."""
    before = os.environ.get(name)
    _set_environment(name, value)
    try:
        yield
    finally:
        _set_environment(name, before)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def forced(implementation: str | None) -> contextlib.AbstractContextManager[None]:
    """Only this implementation runs meanwhile; None: as the environment says."""
    if implementation is None:
        return contextlib.nullcontext()
    return environment(FORCE_ENV, implementation)


def forced_call(implementation: str | None, arguments: Mapping[str, Any]) -> Callable[[], None]:
    """A call of fwd by this implementation; None: by the one that the list chooses."""

    def call() -> None:
        with forced(implementation):
            flash_kda.fwd(**arguments)

    return call


def able(call: Mapping[str, object]) -> list[str]:
    """The implementations that can run these arguments of fwd when forced, best first. One that is
    merely expected to be slower than another refuses otherwise."""
    names = []
    for name in (verdict.name for verdict in flash_kda.explain(**call)):
        with forced(name):
            names += [v.name for v in flash_kda.explain(**call) if v.name == name and v.accepted]
    return names


def chosen(call: Mapping[str, object]) -> str | None:
    """The implementation that would run these arguments of fwd; None where none can."""
    verdicts = flash_kda.explain(**call)
    return next((verdict.name for verdict in verdicts if verdict.accepted), None)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def commit() -> str:
    """The commit of the source tree around the working directory, with a mark for changes."""
    for folder in (Path.cwd(), Path(__file__).resolve().parent):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            git = ["git", "-C", str(folder)]
            run = {"capture_output": True, "text": True, "check": True, "timeout": 20}
            top = subprocess.run([*git, "rev-parse", "--show-toplevel"], **run).stdout.strip()
            if not (Path(top) / "include" / "flash_kda").is_dir():
                continue
            head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], **run).stdout.strip()
            changed = subprocess.run([*git, "status", "--porcelain", "-uno"], **run).stdout.strip()
            return head + (" with local changes" if changed else "")
    return os.environ.get("FLASH_KDA_COMMIT", "unknown")


def description(device: torch.device) -> dict[str, str]:
    """What a report says about where it was measured."""
    about = {
        "device": device_text(device),
        "flash_kda": f"{flash_kda.__version__}, commit {commit()}",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "command": "python -m flash_kda " + " ".join(sys.argv[1:]),
    }
    if device.type == "cuda":
        about["driver"] = driver_version() or "unknown"
        about["CUDA architectures built"] = ", ".join(_ctypes.built_cuda_archs())
    if (fla := installed("fla-core")) is not None:
        about["fla-core"] = fla
    if (triton := installed("triton")) is not None and device.type == "cuda":
        about["triton"] = triton
    return about
