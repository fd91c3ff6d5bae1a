"""Pictures, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flash_kda.cli.machine import REFERENCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def missing() -> str | None:
    """Why no picture can be drawn; None when one can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "plots need matplotlib: pip install 'flash_kda[plot]', or leave the plot out"
    return None


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
    return figure, list(axes.flat)


def error_distributions(
    spread: Mapping[str, Mapping[str, torch.Tensor]], path: Path, title: str
) -> None:
    """One histogram an input kind: the outputs' differences from the exact."""
    columns = min(4, max(1, len(spread)))
    rows = math.ceil(len(spread) / columns) or 1
    figure, axes = _figure(rows, columns, (3.6 * columns, 2.8 * rows))
    low, high = -8.0, 1.0
    for ax, (inputs, by_name) in zip(axes, spread.items(), strict=False):
        for name, values in by_name.items():
            logs = values.clamp(10**low, 10**high).log10()
            share = torch.histc(logs.float(), 90, low, high) / logs.numel()
            edges = torch.linspace(low, high, 91)[:-1]
            if name == REFERENCE:  # what rounding the output alone costs: the background
                ax.fill_between(
                    edges, share, step="post", label=f"{name}: rounding", color="lightgray"
                )
            else:
                ax.step(edges, share, where="post", label=name, linewidth=1.2)
        ax.set(title=inputs, xlabel="log10 |error| / RMS of the output", ylabel="share of outputs")
        ax.legend(fontsize=7)
    for ax in axes[len(spread) :]:
        ax.set_visible(False)
    figure.suptitle(f"Output errors, {title}")
    figure.savefig(path, dpi=120)


def bars(
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    path: Path,
    title: str,
    xlabel: str,
) -> None:
    """Horizontal bars on a logarithmic axis from 1, one group a label; None leaves a gap."""
    height = 0.8 / max(1, len(series))
    figure, (ax,) = _figure(1, 1, (9.0, 1.2 + 0.2 * len(labels) * (len(series) + 1)))
    for n, (name, values) in enumerate(series.items()):
        places = [i + n * height for i in range(len(labels))]
        ax.barh(places, [v or 1.0 for v in values], height, label=name)
        for place, value in zip(places, values, strict=True):
            if value is not None:
                ax.text(value, place, f" {value:.3g}", va="center", fontsize=7)
    middle = (len(series) - 1) * height / 2
    ax.set_yticks([i + middle for i in range(len(labels))], labels, fontsize=8)
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(title=title, xlabel=xlabel, xlim=(1, None))
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def curves(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    path: Path,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    shares: bool = False,
    marks: Mapping[str, float] | None = None,
) -> None:
    """Panels side by side by title, one line a name from (x, y); marks are places with a name. A
    name has one colour in all panels. ``shares``: y is shown in percent."""
    figure, axes = _figure(1, len(panels), (6.5 * len(panels), 4.8))
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    lines = {}
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for name, (x, y) in series.items():
            style = {"color": f"C{names.index(name)}", "marker": "o" if len(x) < 30 else None}
            (lines[name],) = ax.plot(x, y, label=name, linewidth=1.2, **style)
        if log_x:
            ax.set_xscale("log", base=2)
        if shares:
            ax.yaxis.set_major_formatter("{x:.0%}")
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
        ax.set_ylim(0, 1.08 * ax.get_ylim()[1])
        for name, place in (marks or {}).items():
            ax.axvline(place, color="gray", linestyle=":", linewidth=1)
            ax.text(place, ax.get_ylim()[1], f" {name}", fontsize=8, va="top", color="gray")
    figure.legend(
        list(lines.values()), names, loc="outside lower center", ncols=len(names), frameon=False
    )
    figure.savefig(path, dpi=120)
