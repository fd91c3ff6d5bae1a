"""Kimi Delta Attention, the forward pass (prefill), for CPU and CUDA tensors of PyTorch.

>>> out = flash_kda.fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound)

``python -m flash_kda doctor`` says what this installation can run.
"""

from flash_kda._api import Verdict, explain, fwd, get_workspace_size
from flash_kda._ctypes import version as _version
from flash_kda._operator import forward as _fwd_raw  # noqa: F401, for callers of that name

__version__ = _version()

__all__ = ["Verdict", "__version__", "explain", "fwd", "get_workspace_size"]
