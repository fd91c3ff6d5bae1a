"""``bench`` on a GPU: beside a device copy of as many bytes, and FLA's Triton kernels."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import flash_kda
from flash_kda import cases
from flash_kda.cli import machine, peers, plots, tables, timing

COPY = "copy"
_OUR_MARK = "flash_kda"  # in the names of all our kernels, which lie in that namespace
_COPIES, _FILLS = "Memcpy", "Memset"  # as the profiler names them
_STATES = ("flushed", "warm")  # of the L2, before each call


def run(
    chosen: list[cases.Case],
    device: torch.device,
    implementations: list[str],
    wanted_peers: list[str],
    budget: float,
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Times of every case: by implementation ("auto": what the list chooses) and by peer. ``keep``
    gets the record after each."""
    flush = timing.Flush(device)
    record: dict[str, Any] = {"rows": [], "host_us": {}}
    with torch.cuda.device(device), torch.inference_mode():
        for case in chosen:
            row = _row(case, device, implementations, wanted_peers, flush, budget)
            print("\n".join(_row_lines(row)), file=sys.stderr, flush=True)
            record["rows"].append(row)
            keep(record)
        record["host_us"] = host_microseconds(device)
    return record


def _row(
    case: cases.Case,
    device: torch.device,
    implementations: list[str],
    wanted_peers: list[str],
    flush: timing.Flush,
    budget: float,
) -> dict[str, Any]:
    inputs = cases.make_inputs(case, device, generator_device=device)
    workspace = flash_kda.get_workspace_size(case.batch * case.tokens, case.heads, case.sequences)
    arguments = inputs.kwargs()
    arguments["workspace"] = torch.empty(workspace, dtype=torch.uint8, device=device)
    calls, runs = _our_calls(arguments, implementations)
    without_workspace, _ = _our_calls({**arguments, "workspace": None}, implementations)
    source = torch.empty(case.bytes_moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls[COPY] = lambda: target.copy_(source)
    if "fla" in wanted_peers and "no-peers" not in case.tags and _fla_runs(case, inputs):
        calls[peers.FLA_TRITON] = lambda: peers.fla_triton(inputs)
        without_workspace[peers.FLA_TRITON] = calls[peers.FLA_TRITON]

    memory = {n: timing.peak_bytes(call, device) for n, call in without_workspace.items()}
    kernels = {name: _check_kernels(name, runs.get(name), call) for name, call in calls.items()}
    seconds = {
        state: timing.cuda_seconds(calls, flush if state == "flushed" else None, budget)
        for state in _STATES
    }
    for name in runs:
        inputs.out.fill_(math.nan)
        calls[name]()
        if not torch.isfinite(inputs.out).all():
            raise RuntimeError(f"{case.name}, {name}: the timed call leaves numbers not finite")
    return {
        "case": case.name,
        "tokens": case.tokens_text,
        "heads": case.heads,
        "inputs": case.inputs,
        "bytes": case.bytes_moved,
        "workspace_bytes": workspace,
        "extra_memory_bytes": memory,
        "implementations": runs,
        "kernels": kernels,
        "ms": {
            state: {name: 1e3 * value for name, value in found.items()}
            for state, found in seconds.items()
        },
    }


def _fla_runs(case: cases.Case, inputs: cases.Inputs) -> bool:
    """Whether FLA's kernels compile and run here; what they raise must not end our own rows."""
    try:
        peers.fla_triton(inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"{case.name}, without {peers.FLA_TRITON}: {reason}", file=sys.stderr, flush=True)
        return False
    return True


def _our_calls(
    arguments: dict[str, Any], implementations: list[str]
) -> tuple[dict[str, timing.Call], dict[str, str]]:
    """Calls by what was asked for, and by the same names the implementation that runs."""
    able = machine.able(arguments)
    if not able:
        reasons = "; ".join(map(str, flash_kda.explain(**arguments)))
        raise RuntimeError(f"no implementation runs on {arguments['q'].device}: {reasons}")
    wanted = []
    for name in implementations:
        wanted += able if name == "all" else [name]
    calls: dict[str, timing.Call] = {}
    runs: dict[str, str] = {}
    for name in dict.fromkeys(wanted):
        if name != "auto" and name not in able:
            continue
        calls[name] = machine.forced_call(None if name == "auto" else name, arguments)
        runs[name] = machine.chosen(arguments) if name == "auto" else name
    return calls, runs


def _check_kernels(name: str, runs: str | None, call: timing.Call) -> list[str]:
    """The kernels of a call; raises unless they are whose they are said to be. ``runs``: the
    implementation, None for a copy or a peer's call."""
    call()
    names = timing.kernel_names(call)
    if name == COPY:
        return names
    kernels = [k for k in names if not k.startswith((_COPIES, _FILLS))]
    if not kernels:
        raise RuntimeError(f"{name}: the profiler saw no kernel in its call, only {names}")
    ours = [k for k in kernels if _OUR_MARK in k]
    if name == peers.FLA_TRITON and ours:
        raise RuntimeError(f"{name}: expected FLA's kernels alone, saw {ours}")
    copies = [k for k in names if k.startswith(_COPIES)]
    if runs is not None and (copies or len(ours) != len(kernels)):
        raise RuntimeError(f"{name}: expected kernels of {_OUR_MARK} alone, saw {names}")
    if runs is not None:  # its kernels lie in its namespace; another one's may run beside them
        of_it = re.compile(rf"(void )?{_OUR_MARK}::(\w+::)*{runs.split('.')[-1]}::")
        if not any(of_it.match(k) for k in ours):
            raise RuntimeError(f"{name}: expected a kernel of {runs}, saw {names}")
    return names


def host_microseconds(device: torch.device) -> dict[str, dict[str, float]]:
    """What a call of one token and one head keeps the host: by implementation, then by what of out
    and workspace is given."""
    (case,) = cases.parse("one-token 1x1 1 randn none none")
    arguments = cases.make_inputs(case, device).kwargs()
    size = flash_kda.get_workspace_size(1, 1, 1)
    arguments["workspace"] = torch.empty(size, dtype=torch.uint8, device=device)
    given = {
        "out, workspace": arguments,
        "out": {**arguments, "workspace": None},
        "neither": {**arguments, "workspace": None, "out": None},
    }
    found: dict[str, dict[str, float]] = {}
    for name in machine.able(arguments):
        with machine.forced(name):
            found[name] = {
                what: 1e6 * timing.host_seconds(lambda a=a: flash_kda.fwd(**a))
                for what, a in given.items()
            }
    return found


# --- report -------------------------------------------------------------------------------------

_HEADER = (
    *("tokens", "H", "gates", "implementation"),
    *("ms", "x copy", "ms, L2 warm", "x copy, L2 warm", "MiB"),
)


def _row_lines(row: dict[str, Any]) -> Iterator[str]:
    for cells in _cells(row):
        yield "  ".join(f"{name} {cell}" for name, cell in zip(_HEADER, cells, strict=True))


def _cells(row: dict[str, Any]) -> Iterator[list[str]]:
    for name in row["ms"]["flushed"]:
        runs = row["implementations"].get(name, name)
        cells = [row["tokens"], str(row["heads"]), row["inputs"]]
        cells.append(runs if name == runs or name != "auto" else f"{runs} (auto)")
        for state in _STATES:
            ms, copy = row["ms"][state][name], row["ms"][state][COPY]
            cells += [f"{ms:.4f}", f"{ms / copy:.2f}"]
        memory = row["extra_memory_bytes"].get(name)
        yield [*cells, "-" if memory is None else f"{memory / 2**20:.1f}"]


def report(record: dict[str, Any]) -> str:
    rows = record["rows"]
    lines = [cells for row in rows for cells in _cells(row)]
    parts = [
        "Median times by CUDA events. Copy: a device copy that reads and writes as many bytes as "
        f"the call must, {cases.BYTES_PER_TOKEN_HEAD} per token and head and the states, measured "
        "in turn with the calls. First pair of columns: L2 emptied before each call. MiB: memory "
        "that the call takes beside its arguments.",
        tables.markdown(_HEADER, lines),
    ]
    if spread := _gate_spread(rows):
        parts.append(spread)
    if choice := _choice(rows):
        parts.append(choice)
    if record["host_us"]:
        parts.append(_host_table(record["host_us"]))
    return "\n\n".join(parts)


def _host_table(found: dict[str, dict[str, float]]) -> str:
    """Of host_microseconds."""
    header = ["implementation", *next(iter(found.values()))]
    lines = [[name, *(f"{us:.1f}" for us in by.values())] for name, by in found.items()]
    what = "Microseconds that a call of one token keeps the host, from Python, by what is given:"
    return f"{what}\n\n{tables.markdown(header, lines)}"


def _choice(rows: list[dict[str, Any]]) -> str:
    """How far the automatic choice is from the best implementation, where others were timed."""
    found = []
    for row in rows:
        ms = row["ms"]["flushed"]
        others = {name: ms[name] for name in row["implementations"] if name != "auto"}
        if "auto" in ms and others:
            best = min(others, key=lambda name, x=others: x[name])
            found.append((ms["auto"] / others[best], row, best))
    if not found:
        return ""
    ratio, row, best = max(found, key=lambda x: x[0])
    return (
        f"The automatic choice takes at most {ratio:.2f} times as long as the best of the "
        f"implementations ({row['tokens']}, H = {row['heads']}, {row['inputs']}: "
        f"{row['implementations']['auto']}, {best})."
    )


def _gate_spread(rows: list[dict[str, Any]]) -> str:
    """How far the times of the gate sets are apart for the same shapes."""
    lines = []
    for tokens, heads in dict.fromkeys((row["tokens"], row["heads"]) for row in rows):
        same = [row for row in rows if (row["tokens"], row["heads"]) == (tokens, heads)]
        if len(same) < 2:
            continue
        for name in same[0]["implementations"]:
            ratios = [r["ms"]["flushed"][name] / r["ms"]["flushed"][COPY] for r in same]
            apart = max(ratios) / min(ratios) - 1.0
            lines.append([tokens, str(heads), name, f"{100 * apart:.1f}"])
    if not lines:
        return ""
    table = tables.markdown(["tokens", "H", "implementation", "apart, %"], lines)
    return f"The gate sets' multiples of the copy are apart by:\n\n{table}"


def plot(record: dict[str, Any], path: Path, title: str) -> None:
    rows = record["rows"]
    labels = [f"{row['tokens']}  H={row['heads']}  {row['inputs']}" for row in rows]
    names = dict.fromkeys(name for row in rows for name in row["ms"]["flushed"] if name != COPY)
    series: dict[str, list[float | None]] = {
        name: [
            row["ms"]["flushed"][name] / row["ms"]["flushed"][COPY]
            if name in row["ms"]["flushed"]
            else None
            for row in rows
        ]
        for name in names
    }
    plots.bars(labels, series, path, title, "multiple of a device copy of the same bytes")
