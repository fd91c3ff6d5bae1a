"""The shared case list: every implementation against the oracle."""

from __future__ import annotations

import pytest
import support
from flash_kda import cases
from flash_kda.cases import Case
from support import Target

LISTS = ("accuracy", "shapes", "fla")
CASES = [one for name in LISTS for one in cases.load(name) if "gpu" not in one.tags]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_case(one: Case, fast_target: Target) -> None:
    """Right within the limits, the same bits twice, and nothing written that is not an output: an
    operator that changes g or v in place spoils the layers behind it (sgl-project/sglang#29472)."""
    inputs = support.case_inputs(one, fast_target.device)
    before = support.clone(inputs)
    unused = inputs.fresh()
    unused.out.copy_(support.sentinels_like(unused.out))

    result = fast_target.run(inputs)
    fast_target.check(inputs, result, support.case_oracle(one), one.inputs)
    support.check_same(result, fast_target.run(inputs))

    for name, tensor in inputs.kwargs().items():
        if isinstance(tensor, float) or name in ("out", "final_state"):
            continue
        assert support.same_bits(tensor, getattr(before, name)), f"{name} has changed"
    out = fast_target.call(unused)
    rows = support.row_count(inputs)
    assert support.same_bits(out[:, :rows], result.out[:, :rows])
    assert support.same_bits(out[:, rows:], support.sentinels_like(out[:, rows:]))


@pytest.mark.parametrize("one", [c for c in CASES if c.lengths], ids=lambda one: one.name)
def test_packed_is_each_alone(one: Case, fast_target: Target) -> None:
    """A sequence's result is the same alone and beside others."""
    inputs = support.case_inputs(one, fast_target.device)
    packed = fast_target.run(inputs)
    for n in [n for n, length in enumerate(one.lengths) if length > 0][:8]:
        begin, end = inputs.cu_seqlens[n : n + 2].tolist()
        final = None if packed.final is None else packed.final[n : n + 1]
        beside = support.Result(packed.out[:, begin:end], final)
        fast_target.check_alike(fast_target.run(support.solo(inputs, n)), beside, one.inputs)


@pytest.mark.parametrize("one", [c for c in CASES if not c.lengths], ids=lambda one: one.name)
def test_batch_is_packed(one: Case, fast_target: Target) -> None:
    """B sequences of T tokens give the same as one pack of them with cu_seqlens."""
    inputs = support.case_inputs(one, fast_target.device)
    result, expected = fast_target.run(support.pack(inputs)), fast_target.run(inputs)
    result = support.Result(result.out.reshape(expected.out.shape), result.final)
    fast_target.check_alike(result, expected, one.inputs)
