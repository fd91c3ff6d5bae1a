"""The command line: doctor, check, bench and demo."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import flash_kda
import pytest
import torch
from flash_kda import cases, fla
from flash_kda.cli import (
    bench_cpu,
    bench_cuda,
    check,
    demo,
    dispatch,
    doctor,
    errors,
    machine,
    main,
    peers,
    plots,
    tables,
    timing,
)
from flash_kda.cli.memory import DeltaMemory, LinearMemory, Settings, Text
from support import case

has_fla = pytest.mark.skipif(machine.installed("fla-core") is None, reason="no fla-core")
has_matplotlib = pytest.mark.skipif(plots.missing() is not None, reason="no matplotlib")


def test_module_runs() -> None:
    command = [sys.executable, "-m", "flash_kda"]
    run = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    for name in ("doctor", "check", "bench", "demo"):
        assert name in run.stdout
    run = subprocess.run([*command, "nonsense"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "nonsense" in run.stderr


# --- doctor -------------------------------------------------------------------------------------


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-fla", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for word in (torch.__version__, ">= 2.4", "cpu: RUNS", "reference: could run", "dispatches"):
        assert word in text
    assert flash_kda.__version__ in text


def test_doctor_obeys_a_forced_implementation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.FORCE_ENV, "reference")
    assert main(["doctor", "--no-fla", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "reference: RUNS" in text and "cpu: refuses" in text


def test_doctor_fails_where_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-fla", "--device", "cpu", "--head-dim", "64"]) == 1
    text = capsys.readouterr().out
    assert "cpu: refuses: q: expected shape" in text and "RUNS" not in text


def test_doctor_of_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """The call's other faults show all the same."""
    assert main(["doctor", "--no-fla", "--device", "cuda:99", "--lower-bound", "-7"]) == 1
    text = capsys.readouterr().out
    for word in ("can't be made here", "tensors on the CPU", "rejected: lower_bound: expected"):
        assert word in text


@pytest.mark.parametrize(
    ("binding_env", "version", "text"),
    [
        ("ctypes", "2.15.0", "ctypes, as FLASH_KDA_BINDING wants"),
        ("auto", "2.9.1", "needs torch >= 2.10"),
        ("auto", "2.10.0+cpu", "not in this build or does not load"),
    ],
)
def test_doctor_says_why_ctypes(
    binding_env: str, version: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "USES_BINDING", False)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setenv("FLASH_KDA_BINDING", binding_env)
    assert text in doctor._build()


def test_cuda_of_torch_does_not_matter_to_a_cpu_only_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    for archs, good in ([], True), (["90a"], False):
        monkeypatch.setattr(machine._ctypes, "built_cuda_archs", lambda archs=archs: archs)
        found = {finding.what: finding for finding in machine.findings()}
        assert found["CUDA of torch"].found == "12.1"
        assert found["CUDA of torch"].good is good


def test_doctor_with_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-fla", "--device", "cpu", "--grad"]) == 1
    text = capsys.readouterr().out
    assert "cpu: refuses: flash_kda.fwd is for inference only" in text
    assert "rejected: inference only, and gradients are wanted of q, k, v, g" in text


def test_an_old_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.3.1+cu121")
    found = {finding.what: finding for finding in machine.findings()}
    assert not found["torch"].good and found["torch"].found == "2.3.1+cu121"


def test_an_old_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine._ctypes, "built_cuda_archs", lambda: ["90a"])
    monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
    monkeypatch.setattr(machine, "devices", lambda: [torch.device("cpu"), torch.device("cuda", 0)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    (found,) = (f for f in machine.findings() if f.what == "capability of cuda:0")
    assert (found.found, found.required, found.good) == ("7.5", ">= 8.0", False)


def test_doctor_names_wrong_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-fla", "--lengths", "1,x"]) == 2
    assert "--lengths: expected whole numbers" in capsys.readouterr().err


EVERYTHING_WRONG = [
    *("--dtype", "fp16", "--gate-dtype", "fp32", "--head-dim", "64", "--value-heads", "8"),
    *("--lower-bound", "-7", "--no-gate-in-kernel", "--no-l2norm-in-kernel"),
    *("--no-beta-sigmoid-in-kernel", "--no-safe-gate", "--state-k-first", "--allow-neg-eigval"),
    *("--context-parallel", "--intermediate-states", "--grad", "--batch", "2"),
    *("--lengths", "100,100", "--parameter-dtype", "fp64"),
]


def problem(*options: str) -> dispatch.Problem:
    import argparse

    parser = argparse.ArgumentParser()
    dispatch.add_call_arguments(parser)
    return dispatch.Problem.of(parser.parse_args(["--device", "cpu", *options]))


def test_all_reasons_of_our_backend() -> None:
    reasons = "\n".join(dispatch.own_refusals(problem(*EVERYTHING_WRONG)))
    for word in (
        *("gradients are wanted", "q: expected dtype", "g: expected dtype", "128", "grouped"),
        *("lower_bound: expected", "use_gate_in_kernel", "use_qk_l2norm_in_kernel"),
        *("use_beta_sigmoid_in_kernel", "allow_neg_eigval", "cp_context"),
        *("return_intermediate_states", "B = 1", "A_log: expected dtype"),
    ):
        assert word in reasons, word
    assert dispatch.own_refusals(problem()) == []
    assert dispatch.own_refusals(problem("--state-k-first", "--no-safe-gate", "--strided")) == []


def test_reasons_of_the_machine_show_beside_those_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is asked of a device before the call itself is legal."""
    unbuilt = "no code for this device in this build"
    forward = flash_kda.explain

    def explain(**call: Any) -> list[flash_kda.Verdict]:  # noqa: ANN401
        return [
            flash_kda.Verdict(v.name, False, unbuilt) if v.accepted else v for v in forward(**call)
        ]

    monkeypatch.setattr(flash_kda, "explain", explain)
    reasons = dispatch.own_refusals(problem("--lower-bound", "-7", "--gate-dtype", "fp32"))
    assert len(reasons) == 3
    for word in (unbuilt, "lower_bound: expected", "g: expected dtype"):
        assert any(word in reason for reason in reasons), word


@has_fla
def test_all_reasons_of_the_shipped_backend() -> None:
    if reason := peers.missing_fla():
        pytest.skip(reason)
    shipped = dispatch.shipped(problem(*EVERYTHING_WRONG))
    reasons = "\n".join(shipped.refusals)
    for word in (
        *("inference mode", "bfloat16", "K=128", "GVA", "use_gate_in_kernel"),
        *("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"),
        *("context parallel", "return_intermediate_states", "safe_gate"),
    ):
        assert word in reasons, word
    let_through = "\n".join(shipped.uncaught)
    for word in ("lower_bound: expected", "g: expected dtype", "B = 1"):
        assert word in let_through, word
    fine = dispatch.shipped(problem())
    assert fine.refusals == [] and fine.uncaught == []


def test_what_switches_dispatch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fla.OPT_OUT_ENV, "0")
    monkeypatch.setenv(fla.DISPATCH_OFF_ENV, "1")
    assert len(dispatch.switched_off()) == 2
    monkeypatch.setenv(fla.OPT_OUT_ENV, "1")
    monkeypatch.delenv(fla.DISPATCH_OFF_ENV)
    assert dispatch.switched_off() == []


# --- check --------------------------------------------------------------------------------------


@has_matplotlib
def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "--only", "tails", "--plot", "--no-peers", "--out", str(tmp_path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "0 failed" in text
    (path,) = tmp_path.glob("*-errors.json")
    rows = json.loads(path.read_text())["rows"]
    assert {"cpu", "reference"} <= {row["implementation"] for row in rows}
    assert all(row["passed"] and row["out"]["relative"] > 0 for row in rows)
    assert "tails/randn" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.01, "ABOVE LIMIT"), (float("nan"), "NOT FINITE")]
)
def test_check_finds_what_is_wrong(
    factor: float,
    outcome: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = flash_kda.fwd

    def wrong(**call: Any) -> torch.Tensor:  # noqa: ANN401
        return forward(**call).mul_(factor)

    monkeypatch.setattr(flash_kda, "fwd", wrong)
    assert main(["check", "--only", "past-chunk", "--no-peers"]) == 1
    assert outcome in capsys.readouterr().out


def test_check_reports_an_exception(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(flash_kda, "fwd", broken)
    assert main(["check", "--only", "past-chunk", "--no-peers"]) == 1
    captured = capsys.readouterr()
    assert "no such luck" in captured.err and "raised" in captured.out


def test_check_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check", "--only", "no such case"]) == 2
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert main(["check", "--plot"]) == 2
    assert "pip install 'flash_kda[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_cut_run_leaves_its_rows(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_inputs = cases.make_inputs

    def cut(one: cases.Case) -> cases.Inputs:
        if one.name == "second":
            raise KeyboardInterrupt
        return make_inputs(one)

    monkeypatch.setattr(cases, "make_inputs", cut)
    listed = tmp_path / "two.txt"
    listed.write_text("first 1x20 1 bench fp32 fp32\nsecond 1x20 1 bench fp32 fp32\n")
    options = {"check": ["--no-peers"], "bench": ["--device", "cpu", "--seconds", "0.01"]}
    arguments = [command, "--cases", str(listed), "--out", str(tmp_path), *options[command]]
    with pytest.raises(KeyboardInterrupt):
        main(arguments + (["--peers"] if command == "bench" else []))
    (path,) = tmp_path.glob("*.json")
    assert path.stem.endswith("-two" if command == "bench" else "-errors")
    assert {row["case"] for row in json.loads(path.read_text())["rows"]} == {"first"}
    assert path.with_suffix(".md").read_text().count("cpu") > 1
    assert "first" in capsys.readouterr().err


@pytest.mark.parametrize("kind", cases.INPUT_KINDS)
def test_every_kind_of_input_has_limits(kind: str) -> None:
    """Tighter on a CPU, whose products are in fp32."""
    on_cpu, on_gpu = (errors.limits(device, kind) for device in ("cpu", "cuda"))
    assert all(0 < a < b for a, b in zip(on_cpu, on_gpu, strict=True))


def test_ratio_to_fla() -> None:
    """A report with FLA's rows has the ratios of relative errors."""
    ours, theirs = (errors.Error(1.0, 1.0, 1.0, r, True) for r in (0.002, 0.004))
    place = {"case": "a", "tokens": "1x1", "heads": 1, "inputs": "randn", "device": "cuda"}
    rows = [
        check.Row(**place, implementation="cuda.sm90", out=ours, state=ours),
        check.Row(**place, implementation=peers.FLA_TRITON, out=theirs, state=theirs),
    ]
    report = check._body(rows)
    assert "o/FLA" in report and "0.50" in report
    assert "1 comparisons" in report


def test_errors() -> None:
    expected = torch.tensor([3.0, 4.0])
    error = errors.Error.between(expected + torch.tensor([0.0, 0.5]), expected)
    assert error.largest == 0.5 and error.mean == 0.25 and error.finite
    assert error.relative == pytest.approx(0.1)
    assert error.rms == pytest.approx(0.5 / 2**0.5)
    tiny = errors.Error.between(expected * 1.1e-30, expected * 1e-30)
    assert tiny.relative == pytest.approx(0.1, rel=1e-3)
    assert not errors.Error.between(torch.tensor([float("nan")]), torch.ones(1)).finite


# --- bench --------------------------------------------------------------------------------------


@has_matplotlib
def test_bench_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "few.txt"
    listed.write_text("few 1x128 2 bench fp32 fp32\ntokens-64 1x64 1 bench fp32 fp32\n")
    arguments = ["bench", "--device", "cpu", "--cases", str(listed), "--seconds", "0.01"]
    assert main([*arguments, "--peers", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert bench_cpu.SGEMM in text and "us per token and head" in text
    (path,) = (tmp_path / "out").glob("*.json")
    record = json.loads(path.read_text())
    assert set(record["rows"][0]["ms"]) == {"cpu", "reference", bench_cpu.SGEMM}
    assert all(ms > 0 for row in record["rows"] for ms in row["ms"].values())
    assert record["about"]["command"].startswith("python -m flash_kda")
    assert path.with_suffix(".md").exists() and path.with_suffix(".png").exists()


def test_operations_of_the_chunked_form() -> None:
    """Whole chunks of 64 tokens, 9.7 million each."""
    one = bench_cpu.chunked_operations(case("1x64 1 bench none none"))
    assert one == pytest.approx(9.7e6, rel=0.01)
    assert bench_cpu.chunked_operations(case("65,1,0 3 bench none none")) == 9 * one


@pytest.fixture
def cuda_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What needs a GPU in bench_cuda, replaced: times by the clock, and kernels by a list."""
    ours = ["void flash_kda::cpu::prepare(...)", "flash_kda::reference::loop(...)"]
    kernels = {"ours": ours}

    def seconds(calls: dict[str, timing.Call], flush: object, budget: float) -> dict[str, float]:
        return {name: timing._seconds_of(call) for name, call in calls.items()}

    monkeypatch.setattr(timing, "cuda_seconds", seconds)
    monkeypatch.setattr(timing, "Flush", lambda device: None)
    monkeypatch.setattr(timing, "kernel_names", lambda call: kernels["ours"])
    monkeypatch.setattr(timing, "peak_bytes", lambda call, device: call() or 3 << 20)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return kernels


def run_bench_cuda(*lines: str, implementations: tuple[str, ...] = ("auto",)) -> dict[str, Any]:
    chosen = [one for line in lines for one in cases.parse(line)]
    return bench_cuda.run(chosen, torch.device("cpu"), list(implementations), [], 0.01)


def test_bench_on_a_gpu_but_for_the_gpu(
    cuda_on_the_cpu: dict[str, list[str]], tmp_path: Path
) -> None:
    lines = "pair 1x64 2 bench,fla-init fp32 fp32"
    record = run_bench_cuda(lines, implementations=("auto", "all", "cuda.nonesuch"))
    first = record["rows"][0]
    assert first["implementations"] == {"auto": "cpu", "cpu": "cpu", "reference": "reference"}
    assert set(first["ms"]["warm"]) == {"auto", "cpu", "reference", "copy"}
    assert first["bytes"] == case("1x64 2 bench fp32 fp32").bytes_moved
    report = bench_cuda.report(record)
    assert "cpu (auto)" in report and "apart, %" in report and "1x64" in report
    assert "3.0" in report  # MiB
    host = record["host_us"]
    assert list(host) == ["cpu", "reference"]
    assert all(us > 0 for by in host.values() for us in by.values())
    assert "| implementation | out, workspace |" in report
    assert "automatic choice" not in bench_cuda.report(run_bench_cuda(lines))
    ms = first["ms"]["flushed"]
    ms |= {"auto": 0.3, "cpu": 0.2, "reference": 0.4}
    record["rows"][1]["ms"]["flushed"] |= {"auto": 0.2, "cpu": 0.2, "reference": 0.4}
    assert "takes at most 1.50 times as long" in bench_cuda.report(record)
    if plots.missing() is None:
        bench_cuda.plot(record, tmp_path / "plot.png", "title")
        assert (tmp_path / "plot.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    "names",
    [
        *([], ["sm90_xmma_gemm"], ["flash_kda::cpu::a", "Memcpy DtoD"]),
        *(["flash_kda::cpu::a", "elementwise"], ["flash_kda::split::a(flash_kda::cpu::B)"]),
    ],
)
def test_bench_refuses_to_time_others(
    names: list[str], cuda_on_the_cpu: dict[str, list[str]]
) -> None:
    cuda_on_the_cpu["ours"][:] = names
    with pytest.raises(RuntimeError, match="auto"):
        run_bench_cuda("one 1x16 1 bench fp32 fp32")


def test_bench_goes_on_without_a_peer_that_raises(
    cuda_on_the_cpu: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(inputs: cases.Inputs) -> None:
        raise RuntimeError("out of resource")

    monkeypatch.setattr(peers, "fla_triton", broken)
    lines = "one 1x16 1 bench fp32 fp32\ntwo 1x16 1 bench fp32 fp32 no-peers"
    record = bench_cuda.run(list(cases.parse(lines)), torch.device("cpu"), ["auto"], ["fla"], 0.01)
    assert [set(row["ms"]["warm"]) for row in record["rows"]] == 2 * [{"auto", "copy"}]
    said = capsys.readouterr().err
    assert "one, without fla triton: RuntimeError: out of resource" in said
    assert "two, without" not in said


def test_bench_refuses_our_kernels_as_a_peers(cuda_on_the_cpu: dict[str, list[str]]) -> None:
    with pytest.raises(RuntimeError, match="expected FLA's kernels alone"):
        bench_cuda._check_kernels(peers.FLA_TRITON, None, lambda: None)


@pytest.mark.parametrize("command", ["bench", "demo"])
@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_wrong_device_is_named(
    command: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--device", device])
    error = capsys.readouterr().err
    assert "--device: expected cpu" in error and f"got {device}" in error


@pytest.mark.parametrize("command", ["check", "bench"])
def test_a_wrong_list_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--cases", "nonsense"]) == 2
    assert "expected a path or one of accuracy, bench, " in capsys.readouterr().err


def test_bench_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", "--only", "no such case"]) == 2
    with pytest.raises(SystemExit):
        main(["bench", "--impl", "cuda.nonesuch"])
    assert "cuda.nonesuch" in capsys.readouterr().err
    monkeypatch.setattr(peers, "missing_fla", lambda: "there is none")
    assert main(["bench", "--peers", "fla"]) == 2
    assert "there is none" in capsys.readouterr().err


# --- demo ---------------------------------------------------------------------------------------


@has_matplotlib
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "recall.png"
    assert main(["demo", "--words", "3000", "--device", "cpu", "--out", str(picture)]) == 0
    captured = capsys.readouterr()
    assert "flash_kda cpu on" in captured.out and "100%" in captured.err
    recall = {
        cells[1].strip(): float(cells[2].strip(" %"))
        for line in captured.out.splitlines()
        if "%" in line and len(cells := line.split("|")) > 3
    }
    kda, no_gate, no_delta, plain, table = recall.values()
    assert table == 100.0
    assert kda > no_gate > plain and kda > no_delta > plain
    gains = [
        float(n) for n in re.findall(r"[+-][0-9.]+(?= )", captured.out.split("delta rule adds")[1])
    ]
    expected = [kda - no_delta, no_gate - plain, kda - no_gate, no_delta - plain]
    assert gains == pytest.approx(expected, abs=0.11)  # of numbers rounded to a tenth
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("option", ["--write=1.5", "--half-life=0", "--piece=0", "--words=2"])
def test_demo_names_a_wrong_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", option]) == 2
    name, given = option.split("=")
    error = capsys.readouterr().err
    assert error.startswith(f"demo: {name}: expected ") and error.endswith(f", got {given}\n")


def test_demo_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_text("der Hund sieht die Katze, die Katze sieht den Hund. " * 20, encoding="utf-8")
    assert main(["demo", str(path), "--piece", "16", "--no-plot", "--device", "cpu"]) == 0
    assert "200 words, 6 different" in capsys.readouterr().out
    assert main(["demo", str(tmp_path / "none"), "--no-plot"]) == 2
    path.write_text("one word")
    assert main(["demo", str(path), "--no-plot"]) == 2
    assert "at least 3 words, got 2" in capsys.readouterr().err
    path.write_text("no word of this text comes twice")
    assert main(["demo", str(path), "--no-plot"]) == 2
    assert "words come again" in capsys.readouterr().err


@has_matplotlib
def test_demo_draws_a_short_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "text", tmp_path / "recall.png"
    path.write_text("round and round and round it goes")
    assert main(["demo", str(path), "--piece", "2", "--device", "cpu", "--out", str(picture)]) == 0
    assert picture.stat().st_size > 10_000
    captured = capsys.readouterr()
    assert "nan" not in captured.out + captured.err


def test_demo_texts_are_shipped() -> None:
    text, marks = demo._read(None)
    assert len(Text.split(text)) > 45_000
    assert list(marks.values())[0] == 0 and len(marks) == 2


@pytest.mark.parametrize("kind", [DeltaMemory, LinearMemory])
@pytest.mark.parametrize("gate", [True, False])
def test_a_memory_carries_its_state(kind: type, gate: bool) -> None:
    """A text in pieces gives what it gives at once."""
    text = Text.read(demo._read(None)[0], 402)
    settings = Settings(write=0.3, half_life=50.0)

    def outputs(piece: int) -> torch.Tensor:
        memory = kind(settings, gate, torch.device("cpu"))
        return torch.cat([memory.step(*text.rows(s)).float() for s in text.pieces(piece)], 1)

    assert errors.Error.between(outputs(57), outputs(400)).relative < 3e-3


@pytest.mark.parametrize("gate", [True, False])
def test_linear_memory_is_the_recurrence(gate: bool) -> None:
    text = Text.read(demo._read(None)[0], 302)
    settings = Settings(write=0.3, half_life=20.0)
    q, k, v = text.rows(slice(0, 300))
    found = LinearMemory(settings, gate, torch.device("cpu")).step(q, k, v)
    decay = 0.5 ** (1 / 20) if gate else 1.0
    state = torch.zeros(4, 128, 128, dtype=torch.float64)
    for t in range(300):
        key, value = k[0, t].double(), v[0, t].double()
        state = decay * state + value[..., None] * key[:, None]
        expected = torch.einsum("hvk,hk->hv", state, q[0, t].double())
        assert torch.allclose(found[0, t].double(), expected, atol=1e-5)


def test_stored_is_what_followed_the_last_time() -> None:
    text = Text.read("a b a c a b x a", 100)
    names = [text.words[n] if n >= 0 else None for n in text.stored().tolist()]
    assert names == [None, "b", None, "c", "a", None]


# --- what they share ----------------------------------------------------------------------------


def test_tables() -> None:
    text = tables.markdown(["name", "x"], [["a", "1.5"], ["long name", "-"]])
    assert text.splitlines() == [
        "| name      |   x |",
        "| --------- | --: |",
        "| a         | 1.5 |",
        "| long name |   - |",
    ]


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NAME", "before")
    with pytest.raises(KeyError), machine.environment("SOME_NAME", None):
        assert "SOME_NAME" not in machine.os.environ
        raise KeyError
    assert machine.os.environ["SOME_NAME"] == "before"


def test_files_are_named_after_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stem in {"NVIDIA H200": "h200", "Some CPU @ 2.0GHz": "some-cpu-2-0ghz"}.items():
        monkeypatch.setattr(machine, "device_name", lambda device, name=name: name)
        assert machine.file_stem(torch.device("cpu")) == stem


@pytest.mark.parametrize("text", ["2.11.0+cu130", "2.11.0a0+git123", "2.11.0.dev1"])
def test_versions(text: str) -> None:
    assert machine.version_tuple(text)[:2] == (2, 11)
