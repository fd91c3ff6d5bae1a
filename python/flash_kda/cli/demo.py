"""``demo``: a text streamed through KDA as an associative memory."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import flash_kda
from flash_kda.cli import machine, plots, tables
from flash_kda.cli.errors import Error
from flash_kda.cli.memory import HEADS, DeltaMemory, LinearMemory, Settings, Text

DESCRIPTION = (
    "Streams a text through the operator as an associative memory: the key is a word, the value "
    "the word that follows, the state is carried from piece to piece. Reports how often the memory "
    "recalls what followed a word the last time, and how often it is right about the next word, "
    "for KDA, for KDA without its gate, for linear attention with that gate (no delta rule), and "
    "for plain linear attention."
)

_DATA = Path(__file__).resolve().parents[1] / "data"
_DEFAULT_TEXTS = {
    "Alice's Adventures in Wonderland": "alice.txt",
    "As You Like It": "as_you_like_it.txt",
}
_BAR_WIDTH = 30
_TABLE = "a table of last successors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        help="a text file, - for standard input (default: Alice's Adventures in Wonderland, then "
        "As You Like It)",
    )
    parser.add_argument(
        "--device",
        type=machine.device_of_option,
        help="cpu, cuda, cuda:1 (default: a GPU if one can run it)",
    )
    parser.add_argument("--piece", type=int, default=1024, help="words a call (default 1024)")
    parser.add_argument("--words", type=int, default=100_000, help="read at most so many words")
    parser.add_argument("--write", type=float, default=0.05, help="beta (default 0.05)")
    parser.add_argument(
        "--half-life", type=float, default=1000.0, help="of the gate, in words (default 1000)"
    )
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture's path")
    parser.add_argument("--no-plot", action="store_true")


@dataclass
class _Run:
    """One memory, and what it answered."""

    name: str
    memory: DeltaMemory | LinearMemory
    answers: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_kernel(self) -> bool:
        """Whether flash_kda ran it."""
        return isinstance(self.memory, DeltaMemory)

    @property
    def answered(self) -> torch.Tensor:
        return torch.cat(self.answers)


def run(args: argparse.Namespace) -> int:
    for option, given, good, expected in (
        ("--write", args.write, 0.0 < args.write < 1.0, "between 0 and 1"),
        ("--half-life", args.half_life, args.half_life >= 1.0, "at least 1"),
        ("--piece", args.piece, args.piece >= 1, "at least 1"),
        ("--words", args.words, args.words >= 3, "at least 3"),
    ):
        if not good:
            print(f"demo: {option}: expected {expected}, got {given:g}", file=sys.stderr)
            return 2
    try:
        source, marks = _read(args.file)
        text = Text.read(source, args.words)
        if (text.stored() < 0).all():
            raise ValueError(
                "expected a text in which words come again, got none: no recall to see"
            )
    except (OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    settings = Settings(args.write, args.half_life)
    device = args.device or _best_device(text, settings)
    runs = [
        _Run("KDA: delta rule and gate", DeltaMemory(settings, True, device)),
        _Run("delta rule, no gate", DeltaMemory(settings, False, device)),
        _Run("gate, no delta rule", LinearMemory(settings, True, device)),
        _Run("plain linear attention", LinearMemory(settings, False, device)),
    ]
    kda = runs[0].memory
    print(
        f"{len(text.ids)} words, {len(text.words)} different; {HEADS} heads, {args.piece} words a "
        f"call. Each word replaces {args.write:g} of what its key holds; half is forgotten after "
        f"{args.half_life:g} words."
    )
    first = next(text.pieces(args.piece))
    print(_first_piece(kda.arguments(*text.rows(first)), device))
    _stream(text, runs, args.piece, device)
    print(_report(text, runs))
    if not args.no_plot:
        _plot(text, runs, marks, args.out)
    return 0


def _read(path: str | None) -> tuple[str, dict[str, int]]:
    """A text, and the places in it, in words, where something begins."""
    if path == "-":
        return sys.stdin.read(), {}
    if path is not None:
        return Path(path).read_text(encoding="utf-8", errors="replace"), {}
    texts = [(_DATA / name).read_text(encoding="utf-8") for name in _DEFAULT_TEXTS.values()]
    marks, place = {}, 0
    for name, text in zip(_DEFAULT_TEXTS, texts, strict=True):
        marks[name] = place
        place += len(Text.split(text))
    return "\n".join(texts), marks


def _best_device(text: Text, settings: Settings) -> torch.device:
    """The first GPU if some implementation takes the call there, else the CPU."""
    for device in reversed(machine.devices()[:2]):
        call = DeltaMemory(settings, True, device).arguments(*text.rows(next(text.pieces(64))))
        if machine.chosen(call) is not None:
            return device
    return torch.device("cpu")


def _first_piece(call: dict[str, object], device: torch.device) -> str:
    """Which implementation runs, and its error against the reference on the first piece."""
    running = machine.chosen(call)
    ours = {**call, "final_state": torch.zeros_like(call["final_state"])}
    out = flash_kda.fwd(**ours)
    exact = {name: t.cpu() if torch.is_tensor(t) else t for name, t in ours.items()}
    exact |= {"out": torch.empty_like(out, device="cpu")}
    exact |= {"final_state": torch.zeros_like(exact["final_state"])}
    with machine.forced(machine.REFERENCE):
        expected = flash_kda.fwd(**exact)
    errors = (
        Error.between(out, expected).relative,
        Error.between(ours["final_state"], exact["final_state"]).relative,
    )
    return (
        f"flash_kda {running} on {machine.device_name(device)}. On the first piece it differs from "
        f"the fp64 reference by {errors[0]:.1e} (output), {errors[1]:.1e} (state)."
    )


def _stream(text: Text, runs: list[_Run], piece: int, device: torch.device) -> None:
    stored, done = text.stored(), 0
    for span in text.pieces(piece):
        rows = text.rows(span)
        for one in runs:
            began = time.perf_counter()
            out = one.memory.step(*rows)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            one.seconds += time.perf_counter() - began
            one.answers.append(text.answers(span, out))
        done += span.stop - span.start
        hits = (runs[0].answers[-1] == stored[span])[stored[span] >= 0]
        recalled = f"{hits.float().mean():.0%}" if len(hits) else "nothing to be"
        _progress(done / len(stored), f"{recalled} recalled in this piece")
    print(file=sys.stderr)


def _progress(share: float, note: str) -> None:
    full = round(share * _BAR_WIDTH)
    bar = "#" * full + "." * (_BAR_WIDTH - full)
    print(f"\r[{bar}] {share:4.0%}  {note}", end="", file=sys.stderr, flush=True)


def _report(text: Text, runs: list[_Run]) -> str:
    stored, following = text.stored(), text.ids[2:]
    asked = stored >= 0  # with a word that came before
    table = [(_TABLE, stored, "")]
    answers = [
        (one.name, one.answered, f"{len(stored) / one.seconds:,.0f}" if one.is_kernel else "")
        for one in runs
    ]
    rows = [
        [
            name,
            f"{(found == stored)[asked].float().mean():.1%}",
            f"{(found == following).float().mean():.1%}",
            speed,
        ]
        for name, found, speed in answers + table
    ]
    header = ["memory", "recalls the last successor", "right about the next word", "tokens/s"]
    state = HEADS * flash_kda.cases.HEAD_DIM**2
    return (
        tables.markdown(header, rows)
        + "\n\n"
        + _gains(runs, stored)
        + f"\n\nRecall is over the {int(asked.sum())} words that came before. Each memory is "
        f"{state} numbers; the table, which forgets and confuses nothing, holds a successor for "
        f"each of {len(text.words)} words."
    )


def _gains(runs: list[_Run], stored: torch.Tensor) -> str:
    """What the delta rule and the gate each add, in points of recall."""
    asked = stored >= 0
    both, no_gate, no_delta, plain = (
        100 * (one.answered == stored)[asked].double().mean().item() for one in runs
    )
    return (
        f"The delta rule adds {both - no_delta:+.1f} points of recall with the gate and "
        f"{no_gate - plain:+.1f} without it: it replaces what a key held, where linear attention "
        f"piles up all successors. The gate adds {both - no_gate:+.1f} with the delta rule and "
        f"{no_delta - plain:+.1f} without it: it clears out words long past, whose keys disturb. "
        "Right about the next word is another question, for the usual successor is a better guess "
        "than the last one: there a memory that averages over a long past may win."
    )


def _plot(text: Text, runs: list[_Run], marks: dict[str, int], path: Path) -> None:
    if reason := plots.missing():
        print(reason)
        return
    stored, following = text.stored(), text.ids[2:]
    asked = (stored >= 0).float()
    window = min(len(stored), max(50, min(2000, len(stored) // 10)))
    places = torch.arange(window, len(stored) + 1).tolist()

    def over(hits: torch.Tensor, of: torch.Tensor) -> list[float]:
        sums = [torch.cat([torch.zeros(1), x.double().cumsum(0)]) for x in (hits * of, of)]
        moved = [s[window:] - s[:-window] for s in sums]
        return (moved[0] / moved[1].clamp(min=1.0)).tolist()

    every = torch.ones_like(asked)
    panels = {
        "Recall: what followed this word the last time it came": {
            one.name: (places, over((one.answered == stored).float(), asked)) for one in runs
        },
        "Prediction: the next word of the text": {
            one.name: (places, over((one.answered == following).float(), every)) for one in runs
        }
        | {_TABLE: (places, over((stored == following).float(), every))},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    xlabel = f"word of the text (mean over the last {window})"
    plots.curves(panels, path, xlabel, "right answers", shares=True, marks=marks)
    print(f"written: {path.resolve()}")
