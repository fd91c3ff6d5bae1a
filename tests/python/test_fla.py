"""flash-linear-attention: the same numbers as its token loop, and its dispatch to us.

No GPU is needed: tensors lie on the CPU, which neither FLA's dispatch nor ours minds, and where FLA
falls back its Triton kernels are replaced by a mark.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flash_kda
import pytest
import torch
from fla_support import Log, arguments, chunk_kda, naive, need_fla, registry, shipped_backend
from flash_kda import fla
from flash_kda.cli.machine import one_thread
from support import Result, Target, case, cases, oracle, relative_error, row_count

need_fla()

LINE = "1x70 2 randn fp32 fp32"


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "1x1 1 randn fp32 fp32",
        "2x150 2 randn fp32 fp32",
        "1x130 2 slow none fp32",
        "2x64 1 half-fast bf16 fp32",
        "1x200 1 near-6 fp32 fp32",
        "256,1,63,64 2 bench fp32 fp32",
        "100,0,65 2 fla-test fp32 fp32",
        "33,90 1 fla-init none fp32",
    ],
)
def test_same_as_the_naive_loop(line: str, target: Target) -> None:
    inputs = target.make(line)
    result = target.run(inputs)
    with one_thread():
        expected = Result(*naive(inputs))
    target.check(inputs, result, expected, case(line).inputs)


# --- FLA as it is -------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """FLA's own backend in place, and a list of what then runs: flash_kda or triton."""
    monkeypatch.delenv(fla.OPT_OUT_ENV, raising=False)
    made: list[str] = []
    forward = flash_kda.fwd

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        made.append("flash_kda")
        return forward(*args, **kwargs)

    def triton(*args: Any) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        made.append("triton")
        return args[2], None

    chunk = importlib.import_module("fla.ops.kda.chunk")
    monkeypatch.setattr(flash_kda, "fwd", counted)
    monkeypatch.setattr(chunk.ChunkKDAFunction, "apply", triton)
    with shipped_backend():
        yield made


def make(line: str = LINE) -> cases.Inputs:
    return cases.make_inputs(case(line))


def check(inputs: cases.Inputs, out: torch.Tensor, state: torch.Tensor) -> None:
    expected, rows = oracle(inputs), row_count(inputs)
    assert relative_error(out[:, :rows], expected.out[:, :rows]) < 3e-3
    assert relative_error(state, expected.final) < 1e-5


@pytest.mark.parametrize("line", [LINE, "30,0,41 2 fla-test fp32 fp32"])
def test_fla_finds_us(line: str, calls: list[str]) -> None:
    inputs = make(line)
    with torch.inference_mode(), Log() as log:
        out, state = chunk_kda(**arguments(inputs))
    assert calls == ["flash_kda"]
    assert log.hit, log.lines
    check(inputs, out, state)


def test_fla_does_without_us(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fla.OPT_OUT_ENV, "0")
    with torch.inference_mode(), Log() as log:
        chunk_kda(**arguments(make()))
    assert calls == ["triton"]
    assert not log.hit


# --- our backend --------------------------------------------------------------------------------


@pytest.fixture
def registered(calls: list[str]) -> list[str]:
    fla.register()
    return calls


def test_registering_replaces_the_shipped_backend(registered: list[str]) -> None:
    fla.register()
    backends = [b for b in registry()._backends.values() if b.package_name == "flash_kda"]
    assert [type(backend).__module__ for backend in backends] == ["flash_kda.fla"]
    inputs = make()
    with torch.inference_mode(), Log() as log:
        out, state = chunk_kda(**arguments(inputs))
    assert registered == ["flash_kda"]
    assert log.hit, log.lines
    check(inputs, out, state)


def test_positional_arguments(registered: list[str]) -> None:
    inputs = make()
    named = arguments(inputs)
    first = [named.pop(name) for name in ("q", "k", "v", "g", "beta", "scale", "initial_state")]
    with torch.inference_mode():
        out, state = chunk_kda(*first, **named)
    assert registered == ["flash_kda"]
    check(inputs, out, state)


def test_opting_out_holds_for_ours(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fla.OPT_OUT_ENV, "0")
    with torch.inference_mode():
        chunk_kda(**arguments(make()))
    assert registered == ["triton"]


REJECTED = {
    "lower bound out of range": ({"lower_bound": -7.0, "safe_gate": False}, "lower_bound"),
    "no lower bound": ({"lower_bound": None, "safe_gate": False}, "softplus"),
    "fp32 gate": ({"g": lambda x: x.g.float()}, "g: expected dtype bfloat16"),
    "fp16 keys": ({"k": lambda x: x.k.half()}, "k: expected dtype bfloat16"),
    "fp64 bias": ({"dt_bias": lambda x: x.dt_bias.double()}, "dt_bias"),
    "negative eigenvalues": ({"allow_neg_eigval": True}, "allow_neg_eigval"),
    "intermediate states": ({"return_intermediate_states": True}, "return_intermediate_states"),
    "no norm": ({"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel"),
    "no gate": ({"use_gate_in_kernel": False, "safe_gate": False}, "use_gate_in_kernel"),
    "no sigmoid": ({"use_beta_sigmoid_in_kernel": False}, "use_beta_sigmoid_in_kernel"),
    "grouped values": (
        {
            "v": lambda x: x.v.repeat(1, 1, 2, 1),
            "g": lambda x: x.g.repeat(1, 1, 2, 1),
            "beta": lambda x: x.beta.repeat(1, 1, 2),
            "A_log": lambda x: x.A_log.repeat(2),
            "dt_bias": lambda x: x.dt_bias.repeat(2, 1),
            "initial_state": None,
        },
        "grouped values",
    ),
    "head dimension": (
        {name: lambda x, n=name: getattr(x, n)[..., :64].contiguous() for name in "qkvg"}
        | {"initial_state": None, "dt_bias": lambda x: x.dt_bias[:, :64].contiguous()},
        "128",
    ),
}


@pytest.mark.parametrize("what", REJECTED)
def test_falls_back_with_the_reason(what: str, registered: list[str]) -> None:
    changes, word = REJECTED[what]
    inputs = make()
    made = {n: change(inputs) if callable(change) else change for n, change in changes.items()}
    with torch.inference_mode(), Log() as log:
        chunk_kda(**arguments(inputs, **made))
    assert registered == ["triton"]
    assert log.rejection is not None and word in log.rejection, log.lines


WORKS = {
    "k, v, q, g strided": {
        name: lambda x, n=name: getattr(x, n).transpose(1, 2).contiguous().transpose(1, 2)
        for name in "qkvg"
    },
    "state strided": {"initial_state": lambda x: x.initial_state.mT.contiguous().mT},
    "beta strided": {"beta": lambda x: x.beta.mT.contiguous().mT},
    "fp32 beta": {"beta": lambda x: x.beta.float()},
    "bf16 A_log of four axes": {"A_log": lambda x: x.A_log.bfloat16()[None, None, :, None]},
    "without safe_gate": {"safe_gate": False},
    "default scale": {"scale": None},
    "another chunk size": {"chunk_size": 32},
}


@pytest.mark.parametrize("what", WORKS)
def test_works(what: str, registered: list[str]) -> None:
    inputs = make()
    changes = {n: c(inputs) if callable(c) else c for n, c in WORKS[what].items()}
    with torch.inference_mode():
        out, state = chunk_kda(**arguments(inputs, **changes))
    assert registered == ["flash_kda"]
    check(inputs, out, state)


def test_parameters_left_out_are_zeros(registered: list[str]) -> None:
    inputs = make()
    with torch.inference_mode():
        out, state = chunk_kda(**arguments(inputs, A_log=None, dt_bias=None))
        inputs.A_log.zero_()
        inputs.dt_bias.zero_()
    assert registered == ["flash_kda"]
    check(inputs, out, state)


def test_a_bf16_state(registered: list[str]) -> None:
    """It is read as it is; the final one is fp32, as FLA's."""
    inputs = make()
    inputs.initial_state.copy_(inputs.initial_state.bfloat16())
    with torch.inference_mode():
        call = arguments(inputs, initial_state=inputs.initial_state.bfloat16())
        out, state = chunk_kda(**call)
    assert registered == ["flash_kda"]
    assert state.dtype == torch.float32
    check(inputs, out, state)


def test_states_with_keys_first(registered: list[str]) -> None:
    inputs = make("20,0,51 2 randn fp32 fp32")
    transposed = inputs.initial_state.mT.contiguous()
    with torch.inference_mode():
        out, state = chunk_kda(**arguments(inputs, state_v_first=False, initial_state=transposed))
    assert registered == ["flash_kda"]
    assert state.is_contiguous()
    check(inputs, out, state.mT)


def test_final_state_only_when_asked_for(registered: list[str]) -> None:
    with torch.inference_mode():
        _, state = chunk_kda(**arguments(make(), output_final_state=False))
    assert registered == ["flash_kda"]
    assert state is None


def test_gradients(registered: list[str]) -> None:
    """Triton has them; without a tensor that wants one the call is ours."""
    inputs = make()
    chunk_kda(**arguments(inputs))
    assert registered == ["flash_kda"]
    registered.clear()
    with Log() as log:
        chunk_kda(**arguments(inputs, A_log=inputs.A_log.clone().requires_grad_()))
    assert registered == ["triton"]
    assert "gradients are wanted of A_log" in log.rejection
    registered.clear()
    with torch.no_grad():  # the parameters of a model
        chunk_kda(**arguments(inputs, A_log=inputs.A_log.clone().requires_grad_()))
    assert registered == ["flash_kda"]


def test_all_reasons_are_logged(registered: list[str]) -> None:
    with torch.inference_mode(), Log() as log:
        chunk_kda(
            **arguments(make(), use_beta_sigmoid_in_kernel=False, use_qk_l2norm_in_kernel=False)
        )
    assert "use_beta_sigmoid_in_kernel" in log.rejection
    assert "use_qk_l2norm_in_kernel" in log.rejection


def test_unbuilt_architecture(registered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "compute capability 9.0 is not in this build (80)"
    refused = [flash_kda.Verdict("cuda.portable", False, reason)]
    monkeypatch.setattr(flash_kda, "explain", lambda **_: refused)
    with torch.inference_mode(), Log() as log:
        chunk_kda(**arguments(make()))
    assert registered == ["triton"]
    assert log.rejection == reason


def test_an_exception_while_asking_falls_back(
    registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("no answer")

    monkeypatch.setattr(flash_kda, "explain", broken)
    with torch.inference_mode(), Log() as log:
        chunk_kda(**arguments(make()))
    assert registered == ["triton"]
    assert log.rejection == "no answer"


def test_padded_cu_seqlens(registered: list[str]) -> None:
    """As FLA's use_graph wants them: empty sequences at the end, rows beyond the last offset."""
    inputs = make("20,30,0,0+14 2 randn fp32 fp32")
    graph = {"use_graph": True, "max_num_seqs": 4} if fla_version() != OLDER else {}
    with torch.inference_mode():
        out, state = chunk_kda(**arguments(inputs, **graph))
    assert registered == ["flash_kda"]
    check(inputs, out, state)


def test_dispatch_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FLA has read it from the environment, whatever that says now."""
    chunk = importlib.import_module("fla.ops.kda.chunk")
    monkeypatch.setattr(sys.modules[chunk.dispatch.__module__], "_DISPATCH_DISABLED", True)
    with pytest.raises(RuntimeError, match=f"{fla.DISPATCH_OFF_ENV}: expected unset or 0 .*got 1"):
        fla.register()


def test_without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "fla" or n.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ImportError, match=f"expected fla-core >= {fla.MIN_FLA}"):
        fla.register()


# --- an older FLA -------------------------------------------------------------------------------

OLDER = fla.MIN_FLA
OLDER_TRITON = "3.6.0"  # it does not import with newer ones
VERSION_ENV = "FLASH_KDA_TEST_FLA_VERSION"  # that this run must have found


def fla_version() -> str:
    return importlib.import_module("fla").__version__


def test_the_version_is_the_wanted_one() -> None:
    assert fla_version() == os.environ.get(VERSION_ENV, fla_version())


GPU_TESTS = Path(__file__).parents[1] / "gpu" / "test_fla_backend.py"


@pytest.mark.slow
def test_an_older_fla(tmp_path: Path) -> None:
    """All of the above, and the tests of FLA's backend on a GPU, with the oldest FLA that is
    supported."""
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"fla-core=={OLDER}", f"triton=={OLDER_TRITON}"], check=True)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, VERSION_ENV: OLDER}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, GPU_TESTS]
    run = subprocess.run(tests, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
