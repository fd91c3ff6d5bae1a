"""The cases that are too large for a CPU: those that bench times, and those of many sequences.

tests/python/test_cases.py runs the others, on the GPU too."""

from __future__ import annotations

import pytest
import support
import torch
from flash_kda import _ctypes, cases
from flash_kda.cases import Case
from support import Target

# The gates that remember long are wrong in the same way at any number of heads.
FEW_ROW_HEADS = 1 << 20


def _wanted(one: Case) -> bool:
    return one.inputs == "bench" or one.rows * one.heads < FEW_ROW_HEADS


CASES = [one for one in cases.load("bench") if _wanted(one)]
CASES += [one for one in cases.load("shapes") if "gpu" in one.tags]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_case(one: Case, target: Target) -> None:
    inputs = support.case_inputs(one, "cuda", "cuda")
    result = target.run(inputs)
    target.check(inputs, result, support.case_oracle(one, "cuda", "cuda"), one.inputs)
    support.check_same(result, target.run(inputs))


def test_every_built_implementation_ran() -> None:
    """Something in the build that never accepts a call would pass all the other tests unseen."""
    built = {name for name in _ctypes.implementation_names() if name.startswith("cuda.")}
    assert built, "a build without CUDA implementations on a machine with a GPU"
    ran = {target.implementation for target in support.targets() if target.device == "cuda"}
    hopper = torch.cuda.get_device_capability() == (9, 0)
    hopper = hopper and "90a" in _ctypes.built_cuda_archs()
    elsewhere = set() if hopper else {"cuda.sm90", "cuda.sm90_split"}
    assert not built - ran - elsewhere
