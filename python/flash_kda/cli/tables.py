"""Tables of text, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table padded so that it also reads well as text. Numbers go to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    right = [bool(rows) and all(_is_number(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)]
    return "\n".join([line(header), "| " + " | ".join(rule) + " |", *map(line, rows)])


def _is_number(cell: str) -> bool:
    return not cell.strip() or cell.lstrip("-+<")[:1].isdigit() or cell in ("-", "inf", "nan")


def facts(values: Mapping[str, str]) -> str:
    """A Markdown list of what was measured where."""
    return "\n".join(f"* {name}: {value}" for name, value in values.items())
