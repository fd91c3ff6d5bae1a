"""``bench``: the speed of this machine's implementations."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flash_kda import cases
from flash_kda.cli import bench_cpu, bench_cuda, machine, peers, plots
from flash_kda.cli.reports import Report

DESCRIPTION = (
    "Times the implementations of this machine over a case list. On a GPU: by CUDA events, with "
    "the L2 emptied and warm, as multiples of a device copy of the same bytes in the same run, "
    "with the names of the kernels checked. On a CPU: beside a matrix product of as many "
    "operations and FLA's naive loop, and the cost of a token as T grows."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: the first GPU, else cpu)")
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
        metavar="NAME",
        help="on a GPU: implementations, all, or auto for the one that the list chooses (default)",
    )
    parser.add_argument(
        "--peers", nargs="*", choices=["fla"], help="others to time (default: fla on a CPU)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.25, help="for each call of each case (default 0.25)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write <device>.md, .json and .png there"
    )


def run(args: argparse.Namespace) -> int:
    device = torch.device(args.device) if args.device else machine.devices()[:2][-1]
    on_gpu = device.type == "cuda"
    lists = args.cases or ["bench" if on_gpu else "bench_cpu"]
    chosen = [case for name in lists for case in cases.load(name)]
    chosen = [case for case in chosen if args.only is None or args.only in case.name]
    if not chosen:
        print(f"bench: no case has {args.only!r} in its name", file=sys.stderr)
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
        stem=machine.file_stem(device),
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
