"""The C ABI of libflash_kda (flash_kda/c_api.h) by ctypes.

It answers what needs no tensor memory, and runs the operator where torch is too old for its
stable ABI.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch

from flash_kda._errors import from_status

_ABI_VERSION = 1
_MAX_RANK = 6
_MESSAGE_BYTES = 4096

_DTYPES = {
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.uint8: 5,
    torch.float16: 6,
    torch.float64: 7,
}
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}
_OTHER_DTYPE = 0
_OTHER_DEVICE = 2


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("given", c_int32),
        ("dtype", c_int32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("data", c_void_p),
        ("rank", c_int64),
        ("shape", c_int64 * _MAX_RANK),
        ("stride", c_int64 * _MAX_RANK),
    ]


_TENSOR_NAMES = (
    *("q", "k", "v", "g", "beta", "out", "A_log", "dt_bias", "initial_state", "final_state"),
    *("cu_seqlens", "workspace"),
)


class _ForwardArgs(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        *((name, _Tensor) for name in _TENSOR_NAMES),
        ("scale", c_double),
        ("lower_bound", c_double),
        ("stream", c_void_p),
    ]


class _ForwardPlan(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("implementation", c_char_p),
        ("workspace_bytes", c_int64),
    ]


def find_binary(name: str) -> Path | None:
    """A file of the package that the build made."""
    # An editable install keeps these in another folder of the package than this file.
    folders = [Path(__file__).parent, *map(Path, sys.modules["flash_kda"].__path__)]
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _load() -> ctypes.CDLL:
    name = "libflash_kda.dylib" if sys.platform == "darwin" else "libflash_kda.so"
    path = find_binary(name)
    if path is None:
        raise ImportError(
            f"flash_kda: {name} is not in {Path(__file__).parent}. Install the package "
            "(pip install .) and import it from outside its source tree."
        )
    library = ctypes.CDLL(str(path))
    found = library.flash_kda_abi_version()
    if found != _ABI_VERSION:
        raise ImportError(f"flash_kda: expected ABI version {_ABI_VERSION} of {path}, got {found}")
    args, plan, text = POINTER(_ForwardArgs), POINTER(_ForwardPlan), (c_char_p, c_size_t)
    signatures = {
        "flash_kda_plan_forward": (c_int, (args, plan, *text)),
        "flash_kda_forward": (c_int, (args, *text)),
        "flash_kda_explain": (c_int, (args, *text, POINTER(c_size_t))),
        "flash_kda_workspace_size": (c_int64, (c_int64, c_int64, c_int64)),
        "flash_kda_version": (c_char_p, ()),
        "flash_kda_built_cuda_archs": (c_char_p, ()),
        "flash_kda_implementation_names": (c_char_p, ()),
    }
    for function, (result, arguments) in signatures.items():
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library


_library = _load()


def version() -> str:
    """The library's version, "major.minor.patch"."""
    return _library.flash_kda_version().decode()


def built_cuda_archs() -> list[str]:
    """CUDA architectures compiled in, ["80", "90a"]; empty for a CPU-only build."""
    text = _library.flash_kda_built_cuda_archs().decode()
    return text.split(",") if text else []


def implementation_names() -> list[str]:
    """All implementations in this build, in order of preference."""
    return _library.flash_kda_implementation_names().decode().split(",")


def workspace_size(tokens_total: int, heads: int, sequences: int) -> int:
    """An upper bound of the workspace's bytes, by integer arithmetic alone."""
    return _library.flash_kda_workspace_size(tokens_total, heads, sequences)


def _fill(target: _Tensor, name: str, tensor: torch.Tensor) -> None:
    rank = tensor.dim()
    if rank > _MAX_RANK:
        raise ValueError(f"{name}: expected at most {_MAX_RANK} axes, got {rank}")
    target.given = 1
    target.dtype = _DTYPES.get(tensor.dtype, _OTHER_DTYPE)
    target.device_type = _DEVICE_TYPES.get(tensor.device.type, _OTHER_DEVICE)
    target.device_index = tensor.device.index or 0
    target.data = tensor.data_ptr()
    target.rank = rank
    target.shape[:rank] = tensor.shape
    target.stride[:rank] = tensor.stride()


def _make_args(arguments: Mapping[str, torch.Tensor | float | None]) -> _ForwardArgs:
    args = _ForwardArgs(size=ctypes.sizeof(_ForwardArgs))
    for name, value in arguments.items():
        if isinstance(value, float):
            setattr(args, name, value)
        elif value is not None:
            _fill(getattr(args, name), name, value)
    return args


def explain(arguments: Mapping[str, torch.Tensor | float | None]) -> str:
    """The lines of flash_kda_explain for the arguments of fwd, by name."""
    args = _make_args(arguments)
    text, needed = ctypes.create_string_buffer(_MESSAGE_BYTES), c_size_t(0)
    _library.flash_kda_explain(byref(args), text, len(text), byref(needed))
    if needed.value > len(text):
        text = ctypes.create_string_buffer(needed.value)
        _library.flash_kda_explain(byref(args), text, needed, None)
    return text.value.decode()


def forward(arguments: Mapping[str, torch.Tensor | float | None]) -> None:
    """The operator flash_kda::fwd, its arguments by name."""
    args, device = _make_args(arguments), arguments["q"].device
    if device.type == "cuda":
        args.stream = torch.cuda.current_stream(device).cuda_stream
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)

    def check(code: int) -> None:
        if code != 0:
            raise from_status(code, message.value.decode(errors="replace"))

    if arguments.get("workspace") is None:
        plan = _ForwardPlan(size=ctypes.sizeof(_ForwardPlan))
        check(_library.flash_kda_plan_forward(byref(args), byref(plan), message, len(message)))
        if plan.workspace_bytes > 0:
            workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
            _fill(args.workspace, "workspace", workspace)
    check(_library.flash_kda_forward(byref(args), message, len(message)))
