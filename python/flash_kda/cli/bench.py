"""``bench``: the speed of this machine's implementations."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from flash_kda import cases
from flash_kda.cli import bench_cpu, bench_cuda, machine, peers, plots, tables

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
    if on_gpu:
        record = bench_cuda.run(chosen, device, args.impl, wanted_peers, args.seconds)
    else:
        record = bench_cpu.run(chosen, wanted_peers, args.seconds)
    record = {"about": machine.description(device), **record}
    name = machine.device_name(device)
    text = f"# Times, {name}\n\n{tables.facts(record['about'])}\n\n{kind.report(record)}\n"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = machine.file_stem(device)
        path = args.out / stem
        if reason := plots.missing():
            print(reason)
        else:
            kind.plot(record, path.with_suffix(".png"), name)
            text += f"\n![Times]({stem}.png)\n"
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        print(f"written to {args.out.resolve()}: {stem}.md, .json, .png")
    return 0
