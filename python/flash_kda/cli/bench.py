"""``bench``: the speed of this machine's implementations."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from flash_kda import _ctypes, cases
from flash_kda.cli import bench_cpu, bench_cuda, machine, peers, plots
from flash_kda.cli.reports import Report

DESCRIPTION = (
    "Times the implementations of this machine over a case list. On a GPU: by CUDA events, with "
    "the L2 emptied and warm, as multiples of a device copy of the same bytes in the same run, "
    "with the names of the kernels checked. On a CPU: beside a matrix product of as many "
    "operations and FLA's naive loop, and the cost of a token as T grows."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=machine.device_of_option,
        help="cpu, cuda, cuda:1 (default: the first GPU, else cpu)",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="LIST",
        help="case lists, by name or path (default: bench on a GPU, bench_cpu on a CPU)",
    )
    parser.add_argument("--only", metavar="WORD", help="cases whose name contains the word")
    parser.add_argument(
        "--impl",
        nargs="+",
        default=["auto"],
        choices=["auto", "all", *_ctypes.implementation_names()],
        help="on a GPU: implementations, all, or auto for the one that the list chooses (default)",
    )
    parser.add_argument(
        "--peers", nargs="*", choices=["fla"], help="others to time (default: fla on a CPU)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.25, help="for each call of each case (default 0.25)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write <device>[-<lists of --cases>].md, .json and .png there",
    )


def run(args: argparse.Namespace) -> int:
    device = args.device or machine.devices()[:2][-1]
    on_gpu = device.type == "cuda"
    try:
        chosen = cases.select(args.cases or ["bench" if on_gpu else "bench_cpu"], args.only)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    wanted_peers = args.peers if args.peers is not None else ([] if on_gpu else ["fla"])
    kind = bench_cuda if on_gpu else bench_cpu
    if args.peers and (reason := peers.missing_fla()):
        print(f"bench --peers fla: {reason}", file=sys.stderr)
        return 2
    report = Report(
        what="Times",
        device=machine.device_name(device),
        about=machine.description(device),
        folder=args.out,
        stem="-".join([machine.file_stem(device), *(Path(name).stem for name in args.cases or [])]),
    )

    def keep(record: dict[str, Any]) -> None:
        report.write(kind.report(record), record)

    if on_gpu:
        record = bench_cuda.run(chosen, device, args.impl, wanted_peers, args.seconds, keep)
    else:
        record = bench_cpu.run(chosen, wanted_peers, args.seconds, keep)
    print(report.text(kind.report(record)))
    if args.out is not None and (reason := plots.missing()):
        print(reason)
    draw = None if plots.missing() else partial(kind.plot, record, title=report.device)
    report.finish(kind.report(record), record, "Times", draw)
    return 0
