"""``check``: every implementation that runs here against the exact result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

import flash_kda
from flash_kda import cases
from flash_kda.cli import errors, machine, peers, plots, tables
from flash_kda.cli.errors import Error
from flash_kda.cli.reports import Report

DESCRIPTION = (
    "Compares every implementation that runs on this machine with the fp64 reference, before it "
    "rounds, over the case list, and on a GPU FLA's Triton kernels too where they are installed. "
    "Fails when a number is not finite or an error is above the limit."
)


@dataclass(frozen=True)
class Row:
    """One implementation on one case."""

    case: str
    tokens: str
    heads: int
    inputs: str
    implementation: str
    device: str
    out: Error | None
    state: Error | None
    failure: str = ""  # what it raised instead
    passed: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["accuracy", "shapes"],
        metavar="LIST",
        help="case lists, by name or path (default: accuracy shapes)",
    )
    parser.add_argument("--only", metavar="WORD", help="cases whose name contains the word")
    parser.add_argument("--plot", action="store_true", help="also draw the error distributions")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write <device>-errors.md, .json, .png there"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave FLA's kernels out")


def run(args: argparse.Namespace) -> int:
    if args.plot and (reason := plots.missing()):
        print(reason, file=sys.stderr)
        return 2
    try:
        chosen = cases.select(args.cases, args.only)
    except ValueError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    spread: dict[str, dict[str, torch.Tensor]] = {}
    rows: list[Row] = []
    report = _new_report(args)
    for case in chosen:
        for row in _check(case, not args.no_peers, spread):
            print(_progress(row), file=sys.stderr, flush=True)
            rows.append(row)
        report.write(_body(rows), _record(rows))
    print(_body(rows))
    draw = partial(plots.error_distributions, spread, title=report.device)
    report.finish(_body(rows), _record(rows), "Error distributions", draw if args.plot else None)
    return 0 if all(row.passed for row in rows) else 1


def _new_report(args: argparse.Namespace) -> Report:
    device = machine.devices()[:2][-1]
    return Report(
        what="Errors",
        device=machine.device_name(device),
        about=machine.description(device),
        folder=Path() if args.out is None and args.plot else args.out,
        stem=machine.file_stem(device) + "-errors",
    )


def _check(
    case: cases.Case, with_peers: bool, spread: dict[str, dict[str, torch.Tensor]]
) -> Iterator[Row]:
    """The rows of one case. ``spread`` gets the differences of outputs, by inputs and name."""
    if "gpu" in case.tags and not torch.cuda.is_available():
        return
    inputs = cases.make_inputs(case)
    exact_out, exact_state = errors.exact(inputs)
    exact_out = errors.sequence_rows(case, exact_out)
    for name, device, call in _implementations(case, inputs, with_peers):
        row = {"case": case.name, "tokens": case.tokens_text, "heads": case.heads}
        row |= {"inputs": case.inputs, "implementation": name, "device": device.type}
        try:
            out, state = call()
        except Exception as error:  # a row of the table, not the end of it
            failure = f"{type(error).__name__}: {error}"
            yield Row(**row, out=None, state=None, failure=failure, passed=name in _PEERS)
            continue
        found = errors.sequence_rows(case, out)
        out_error = Error.between(found, exact_out)
        state_error = None if state is None else Error.between(state, exact_state)
        passed = name in _PEERS or _passes(name, device, case, out_error, state_error)
        if found.numel() and name not in spread.setdefault(case.inputs, {}):
            spread[case.inputs][name] = errors.differences(found, exact_out)
        yield Row(**row, out=out_error, state=state_error, passed=passed)


_PEERS = (peers.FLA_TRITON,)
# Short or packed calls show nothing about a peer's errors, and Triton would tune kernels for each.
_TOKENS_FOR_PEERS = 512
_Call = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


def _implementations(
    case: cases.Case, inputs: cases.Inputs, with_peers: bool
) -> Iterator[tuple[str, torch.device, _Call]]:
    """Everything that runs the case here: its name, its device and a function that runs it."""
    for device in machine.devices()[:2]:
        here = inputs.to(device)
        for name in machine.able(here.kwargs()):
            yield name, device, lambda n=name, x=here: _run_forced(n, x)
        fla_takes = case.lengths is None and case.tokens >= _TOKENS_FOR_PEERS
        if with_peers and device.type == "cuda" and fla_takes and peers.missing_fla() is None:
            yield peers.FLA_TRITON, device, lambda x=here: _fla_triton(x)


def _fla_triton(inputs: cases.Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    with peers.untuned():
        return peers.fla_triton(inputs)


def _run_forced(name: str, inputs: cases.Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    fresh = inputs.fresh()
    with machine.forced(name):
        flash_kda.fwd(**fresh.kwargs())
    return fresh.out, fresh.final_state


def _passes(
    name: str, device: torch.device, case: cases.Case, out: Error, state: Error | None
) -> bool:
    out_limit, state_limit = errors.limits(device.type, case.inputs)
    if name == machine.REFERENCE:
        out_limit, state_limit = errors.REFERENCE_LIMITS
    if case.final == "bf16":
        state_limit = max(state_limit, errors.BF16_STATE_LIMIT)
    if not out.finite or out.relative > out_limit:
        return False
    return state is None or (state.finite and state.relative <= state_limit)


# --- report -------------------------------------------------------------------------------------

_HEADER = ("case", "tokens", "H", "implementation")
_ERROR_HEADER = ("max", "MAE", "RMSE", "relative")


def _progress(row: Row) -> str:
    what = f"{row.case}, {row.implementation}: "
    if row.out is None:
        return what + row.failure
    state = "" if row.state is None else f", state {row.state.relative:.1e}"
    return f"{what}output {row.out.relative:.1e}{state}  {_outcome(row)}".rstrip()


def _record(rows: list[Row]) -> dict[str, object]:
    return {"rows": [asdict(row) for row in rows]}


def _body(rows: list[Row]) -> str:
    fla = {row.case: row for row in rows if row.implementation == peers.FLA_TRITON}
    header = [*_HEADER, *(f"o {e}" for e in _ERROR_HEADER), *(f"S {e}" for e in _ERROR_HEADER)]
    header += ["o/FLA", "S/FLA"] if fla else []
    header.append("")
    lines = []
    for row in rows:
        line = [row.case, row.tokens, str(row.heads), row.implementation]
        line += [*_error_cells(row.out), *_error_cells(row.state)]
        if fla:
            line += _ratio_cells(row, fla.get(row.case))
        lines.append([*line, _outcome(row)])
    ours = [row for row in rows if row.implementation not in _PEERS]
    failed = [row for row in ours if not row.passed]
    names = ", ".join(dict.fromkeys(row.implementation for row in ours))
    summary = (
        f"{len(ours)} comparisons with the exact result ({names}), {len(failed)} failed. o: "
        "output, S: final state. Relative: norm of the difference by norm of the exact. The rows "
        "of reference show what rounding the results alone costs."
    )
    if fla:
        summary += f" {peers.FLA_TRITON}: each kernel in the first of its configurations."
    return tables.markdown(header, lines) + "\n\n" + summary


def _error_cells(error: Error | None) -> list[str]:
    if error is None:
        return ["-"] * len(_ERROR_HEADER)
    return [f"{x:.1e}" for x in (error.largest, error.mean, error.rms, error.relative)]


def _ratio_cells(row: Row, fla: Row | None) -> list[str]:
    def ratio(ours: Error | None, theirs: Error | None) -> str:
        if ours is None or theirs is None or theirs.relative == 0:
            return "-"
        return f"{ours.relative / theirs.relative:.2f}"

    if fla is None or row is fla:
        return ["-", "-"]
    return [ratio(row.out, fla.out), ratio(row.state, fla.state)]


def _outcome(row: Row) -> str:
    if row.failure:
        return "raised"
    if row.out is not None and not row.out.finite:
        return "NOT FINITE"
    return "" if row.passed else "ABOVE LIMIT"
