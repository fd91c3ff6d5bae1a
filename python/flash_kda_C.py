"""The names under which some callers know the operator itself, workspace eighth."""

from flash_kda import _fwd_raw as fwd
from flash_kda import get_workspace_size

__all__ = ["fwd", "get_workspace_size"]
