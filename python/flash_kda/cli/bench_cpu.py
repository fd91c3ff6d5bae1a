"""``bench`` on a CPU: beside a matrix product of as many operations, and FLA's naive loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import flash_kda
from flash_kda import cases
from flash_kda.cli import machine, peers, plots, tables, timing

SGEMM = "torch sgemm of as many operations"
_CHUNK, _BLOCK = 64, 16  # of the counted form, docs/algorithm.md
_CURVE_PREFIX = "tokens-"


def chunked_operations(case: cases.Case) -> float:
    """Multiplications and additions of the products of the chunked form, whole chunks counted."""
    dim, chunk = cases.HEAD_DIM, _CHUNK
    lengths = case.lengths or (case.tokens,) * case.batch
    chunks = sum(-(-length // chunk) for length in lengths) * case.heads
    blocks = chunk // _BLOCK
    lower = (blocks + 1) / (2 * blocks)  # of a square, the blocks on and below the diagonal
    scores = 2 * lower * chunk * chunk * dim  # L and M, in blocks
    with_state = 3 * chunk * dim * dim  # S kd^T, S qd^T, R kr
    with_chunk = 2 * chunk * chunk * dim  # X T^T, R M^T
    return 2.0 * chunks * (scores + with_state + with_chunk)


def run(
    chosen: list[cases.Case],
    wanted_peers: list[str],
    budget: float,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Every row: a case, and of each implementation and peer the milliseconds. ``keep`` gets the
    record after each."""
    record: dict[str, Any] = {"rows": [], "host_us": {}}
    for case in chosen:
        row = _row(case, wanted_peers, budget)
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in row["ms"].items())
        print(f"{case.name}: {times}", file=sys.stderr, flush=True)
        record["rows"].append(row)
        keep(record)
    record["host_us"] = host_microseconds()
    return record


def _row(case: cases.Case, wanted_peers: list[str], budget: float) -> dict[str, Any]:
    inputs = cases.make_inputs(case)
    in_curve = case.name.startswith(_CURVE_PREFIX)
    calls: dict[str, timing.Call] = {}
    for verdict in flash_kda.explain(**inputs.kwargs()):
        if verdict.accepted and not (in_curve and verdict.name == machine.REFERENCE):
            calls[verdict.name] = machine.forced_call(verdict.name, inputs.kwargs())
    operations = chunked_operations(case)
    if not in_curve:
        side = round((operations / 2) ** (1 / 3))
        a, b = torch.randn(side, side), torch.randn(side, side)
        calls[SGEMM] = lambda: a @ b
        if "fla" in wanted_peers and (reason := peers.missing_fla()) is None:
            calls[peers.FLA_NAIVE] = _naive_call(inputs)
        elif "fla" in wanted_peers:
            print(f"without FLA: {reason}")
    extra_memory = _extra_memory(calls["cpu"])
    seconds = timing.cpu_seconds(calls, budget)
    return {
        "case": case.name,
        "tokens": case.tokens_text,
        "heads": case.heads,
        "inputs": case.inputs,
        "operations": operations,
        "ms": {name: 1e3 * value for name, value in seconds.items()},
        "extra_memory_bytes": extra_memory,
    }


def _naive_call(inputs: cases.Inputs) -> timing.Call:
    """FLA's loop alone: its activations are applied before the clock starts."""
    from fla.ops.kda.naive import naive_recurrent_kda

    rows = peers.activated(inputs)
    state = None if inputs.initial_state is None else inputs.initial_state.mT.float()
    return lambda: naive_recurrent_kda(
        **rows, scale=inputs.scale, initial_state=state, output_final_state=True
    )


def _extra_memory(call: timing.Call) -> int | None:
    """By how much one call raises the peak of this process's memory, where Linux tells."""
    status, refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def kilobytes(field: str) -> int:
        line = next(x for x in status.read_text().splitlines() if x.startswith(field))
        return int(line.split()[1])

    with contextlib.suppress(OSError, StopIteration):
        refs.write_text("5")  # resets the peak to what is used now
        before = kilobytes("VmHWM:")
        call()
        return 1024 * (kilobytes("VmHWM:") - before)
    return None


def host_microseconds() -> dict[str, float]:
    """A call of one token and one head from Python, work included, by implementation."""
    (case,) = cases.parse("one-token 1x1 1 randn none none")
    inputs = cases.make_inputs(case)
    names = [v.name for v in flash_kda.explain(**inputs.kwargs()) if v.accepted]
    found = {}
    for name in names:
        arguments = inputs.kwargs()
        with machine.forced(name):
            found[name] = 1e6 * timing.host_seconds(lambda a=arguments: flash_kda.fwd(**a))
    return found


# --- report -------------------------------------------------------------------------------------


def report(record: dict[str, Any]) -> str:
    return "\n\n".join(_paragraphs(record))


def _paragraphs(record: dict[str, Any]) -> Iterator[str]:
    yield "The best of many times, each call in turn."
    for row in record["rows"]:
        if row["case"].startswith(_CURVE_PREFIX):
            continue
        ours = row["ms"]["cpu"]
        yield f"{row['tokens']} tokens, {row['heads']} heads, {row['operations'] / 1e9:.2f} GFLOP:"
        lines = [
            [name, f"{ms:.2f}", f"{row['operations'] / ms / 1e6:.1f}", f"{ms / ours:.2f}"]
            for name, ms in row["ms"].items()
        ]
        yield tables.markdown(["", "ms", "GFLOP/s", "time / cpu"], lines)
    curve = [row for row in record["rows"] if row["case"].startswith(_CURVE_PREFIX)]
    if curve:
        yield "Cost of a token and head as T grows, and memory taken beside the tensors:"
        lines = [
            [
                row["tokens"],
                str(row["heads"]),
                f"{row['ms']['cpu']:.2f}",
                f"{_token_us(row):.3f}",
                "-" if (extra := row["extra_memory_bytes"]) is None else f"{extra / 2**20:.1f}",
            ]
            for row in curve
        ]
        header = ["tokens", "H", "ms", "us per token and head", "MiB beside the tensors"]
        yield tables.markdown(header, lines)
    if host := ", ".join(f"{name} {us:.1f} us" for name, us in record["host_us"].items()):
        yield f"A call of one token and one head from Python takes: {host}."


def _token_us(row: dict[str, Any]) -> float:
    batch, tokens = map(int, row["tokens"].split("x"))
    return 1e3 * row["ms"]["cpu"] / (batch * tokens * row["heads"])


def plot(record: dict[str, Any], path: Path, title: str) -> None:
    curve = [row for row in record["rows"] if row["case"].startswith(_CURVE_PREFIX)]
    compared = [row for row in record["rows"] if row not in curve]
    if curve:
        tokens = [int(row["tokens"].split("x")[1]) for row in curve]
        series = {"cpu": (tokens, [_token_us(row) for row in curve])}
        panels = {f"Cost of a token and head, {title}": series}
        plots.curves(panels, path, "tokens T", "microseconds", log_x=True)
    elif compared:
        names = list(compared[0]["ms"])
        values = {row["case"]: [row["ms"][name] for name in names] for row in compared}
        plots.bars(names, values, path, title, "ms")
