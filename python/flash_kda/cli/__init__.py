"""The command line: ``python -m flash_kda doctor | check | bench | demo``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Each module has DESCRIPTION, add_arguments(parser) and run(args) -> exit status. It is imported
# when its command is asked for.
COMMANDS = {
    "doctor": "what this installation can run, and why not",
    "check": "the error of every implementation against the fp64 reference",
    "bench": "the speed of this machine's implementations",
    "demo": "a text streamed through KDA as an associative memory",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_kda", description="Kimi Delta Attention, forward pass"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    subparsers = {name: commands.add_parser(name, help=text) for name, text in COMMANDS.items()}
    words = sys.argv[1:] if argv is None else argv
    command = next((word for word in words if word in COMMANDS), None)
    if command is not None:
        module = importlib.import_module(f"flash_kda.cli.{command}")
        subparsers[command].description = module.DESCRIPTION
        module.add_arguments(subparsers[command])
    args = parser.parse_args(argv)
    return importlib.import_module(f"flash_kda.cli.{args.command}").run(args)
