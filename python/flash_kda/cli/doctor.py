"""``doctor``: what this installation can run, and why not."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

import torch

import flash_kda
from flash_kda import _build_info, _ctypes, fla
from flash_kda._operator import BINDING_ENV, MIN_TORCH_FOR_BINDING, USES_BINDING
from flash_kda.cli import dispatch, machine, tables

DESCRIPTION = (
    "Shows versions found and required, devices, built architectures, which implementation would "
    "run a call and why the others not, and whether flash-linear-attention (FLA) would send its "
    "chunk_kda call here. The options describe that call; without any it is one that suits."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    dispatch.add_call_arguments(parser)
    parser.add_argument("--no-fla", action="store_true", help="do not import FLA, which takes time")


def run(args: argparse.Namespace) -> int:
    findings = machine.findings()
    print("# Versions\n")
    rows = [[f.what, f.found, f.required, "ok" if f.good else "TOO OLD"] for f in findings]
    print(tables.markdown(["", "found", "required", ""], rows))
    print(f"\n# Devices\n\n{_devices()}")
    print(f"\n# This build\n\n{_build()}")
    try:
        problem = dispatch.Problem.of(args)
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    print(f"\n# The call: {problem.text()}\n")
    made = True
    try:
        call = problem.forward_arguments()
    except (RuntimeError, AssertionError) as error:  # no such device, not enough memory
        made = False
        print(f"its tensors can't be made here: {str(error).splitlines()[0]}")
        print("What follows is for tensors on the CPU.\n")
        problem = replace(problem, device="cpu")
        call = problem.forward_arguments()
    runs = _print_implementations(call)
    print("\n# FLA\n")
    _print_fla(problem, import_it=not args.no_fla)
    return 0 if made and runs and all(f.good for f in findings) else 1


def _devices() -> str:
    lines = [f"* {device}: {machine.device_text(device)}" for device in machine.devices()]
    if len(lines) == 1:
        lines.append("* no CUDA device: " + machine.why_no_cuda())
    return "\n".join(lines)


def _build() -> str:
    archs = _ctypes.built_cuda_archs()
    made_with = [_build_info.COMPILER]
    if _build_info.CUDA:
        made_with.append(f"nvcc {_build_info.CUDA}")
    if _build_info.TORCH:
        made_with.append(f"torch {_build_info.TORCH}")
    lines = {
        "version": f"{flash_kda.__version__}, in {flash_kda.__path__[0]}",
        "made with": ", ".join(made_with),
        "CUDA architectures": ", ".join(archs) if archs else "none, a CPU-only build",
        "implementations": ", ".join(_ctypes.implementation_names()) + " (best first)",
        "binding": _binding(),
    }
    if forced := os.environ.get(machine.FORCE_ENV):
        lines[machine.FORCE_ENV] = f"{forced}, so that every other implementation refuses"
    return tables.facts(lines)


def _binding() -> str:
    if USES_BINDING:
        return "torch's stable ABI"
    if os.environ.get(BINDING_ENV) == "ctypes":
        return f"ctypes, as {BINDING_ENV} wants"
    if machine.version_tuple(torch.__version__) < MIN_TORCH_FOR_BINDING:
        return f"ctypes; torch's stable ABI needs torch >= {machine.dotted(MIN_TORCH_FOR_BINDING)}"
    return "ctypes; the binding to torch's stable ABI is not in this build or does not load"


def _print_implementations(call: dict[str, Any]) -> bool:
    try:
        verdicts = flash_kda.explain(**call)
    except TypeError as error:
        print(f"flash_kda.fwd would raise TypeError: {error}")
        return False
    chosen = next((verdict for verdict in verdicts if verdict.accepted), None)
    for verdict in verdicts:
        state = "RUNS" if verdict is chosen else "could run" if verdict.accepted else "refuses"
        print(f"* {verdict.name}: {state}{': ' if verdict.reason else ''}{verdict.reason}")
    return chosen is not None


def _print_fla(problem: dispatch.Problem, import_it: bool) -> None:
    version = machine.installed("fla-core")
    if version is None or not import_it:
        found = "not installed" if version is None else f"{version}, not imported"
        print(f"fla-core: {found}. What flash_kda.fla.register() would answer to the call:")
        _print_reasons(dispatch.own_refusals(problem))
        return
    good = machine.version_tuple(version) >= machine.version_tuple(fla.MIN_FLA)
    print(f"fla-core {version} (required >= {fla.MIN_FLA}): {'ok' if good else 'TOO OLD'}")
    switched_off = dispatch.switched_off()
    for reason in switched_off:
        print(f"* {reason}")
    try:
        shipped = dispatch.shipped(problem)
    except Exception as error:  # whatever FLA's imports raise
        print(f"it does not import: {type(error).__name__}: {error}")
        return
    print("\nFLA's own flash_kda backend (what an import of both gives):")
    _print_reasons(switched_off + shipped.refusals)
    if shipped.uncaught:
        print("Its checks let through what flash_kda.fwd then answers with an exception:")
        for reason in shipped.uncaught:
            print(f"* raised: {reason}")
    print("\nThe backend that flash_kda.fla.register() puts in its place:")
    _print_reasons(switched_off + dispatch.own_refusals(problem))


def _print_reasons(reasons: list[str]) -> None:
    if not reasons:
        print("* dispatches to flash_kda")
    for reason in reasons:
        print(f"* rejected: {reason}")
