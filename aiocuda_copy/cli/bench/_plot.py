"""Draws a run: rates as bars with the link as a line, latencies on a logarithmic axis."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from ._beside import BESIDE_RATE
from ._latency import AFTER
from ._measure import AWAIT, EACH, RATE
from ._registry import LINK, OWN
from ._results import Results, Row

__all__ = ["draw", "why_not"]

_OURS, _PEER, _YARDSTICK = "#1b6ca8", "#b8b8b8", "#7a7a7a"
_ROW_INCHES, _GAP = 0.24, 0.7


def why_not() -> str | None:
    """A sentence, where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib"):
        return None
    return "--plot needs matplotlib, which is not installed: pip install 'aiocuda-copy[plot]'"


def draw(results: Results, title: str, file: str) -> None:
    """Writes a picture, in the format that the file's name ends in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = results.rows()
    rates = _groups([row for row in rows if row.metric in (RATE, BESIDE_RATE)])
    latencies = _groups([row for row in rows if row.unit == "µs" and row.metric in (AWAIT, EACH, AFTER)])
    height = max(_height(rates), _height(latencies), 10)
    figure = Figure(figsize=(17, height * _ROW_INCHES + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _bars(left, rates)
    _points(right, latencies)
    figure.suptitle(title, fontsize=11)
    # The format is told, for matplotlib knows none for a name without an ending.
    figure.savefig(file, dpi=150, format=None if "." in file.rpartition("/")[2] else "png")


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    return list(groups.items())


def _height(groups: list[tuple[str, list[Row]]]) -> float:
    return sum(len(rows) + _GAP + 1 for _, rows in groups)


def _colour(row: Row) -> str:
    if row.by.startswith(OWN):
        return _OURS
    return _YARDSTICK if row.by.startswith("a bare") or (row.by.startswith("cu") and "Stream" in row.by) else _PEER


def _bars(axes: Any, groups: list[tuple[str, list[Row]]]) -> None:
    place, places, names = 0.0, [], []
    for workload, rows in groups:
        axes.text(0, place, f" {workload}", va="center", fontsize=8, fontweight="bold")
        first = place = place + 1
        for row in (row for row in rows if row.by != LINK):
            value = row.headline
            axes.barh(place, value, color=_colour(row), height=0.8)
            axes.text(value, place, f" {value:.3g}", va="center", fontsize=7)
            places.append(place)
            names.append(row.by if row.metric == RATE else f"beside {row.by}")
            place += 1
        for link in (row.headline for row in rows if row.by == LINK):
            axes.plot([link, link], [first - 0.6, place - 0.4], color="#c0392b", linewidth=1.5)
        place += _GAP
    _finish(axes, places, names, place, "GB/s; the red lines are the link in the same repetitions")
    axes.set_xlim(left=0)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _points(axes: Any, groups: list[tuple[str, list[Row]]]) -> None:
    place, places, names = 0.0, [], []
    axes.set_xscale("log")
    for workload, rows in groups:
        axes.text(
            0.005, place, workload, va="center", fontsize=8, fontweight="bold", transform=axes.get_yaxis_transform()
        )
        place += 1
        for row in rows:
            middle, late = max(row.headline, 0.1), max(row.statistic("99th percentile"), 0.1)
            axes.plot([middle, late], [place, place], color=_colour(row), linewidth=2)
            axes.plot([middle], [place], "o", color=_colour(row), markersize=5)
            axes.plot([late], [place], "|", color=_colour(row), markersize=8)
            note = f"  {row.notes[0]}" if row.notes else ""
            axes.text(late, place, f"  {_number(middle)} / {_number(late)}{note}", va="center", fontsize=7)
            places.append(place)
            names.append(row.by)
            place += 1
        place += _GAP
    _finish(axes, places, names, place, "µs: the median and the 99th percentile")


def _finish(axes: Any, places: list[float], names: list[str], end: float, label: str) -> None:
    axes.set_yticks(places, names, fontsize=7)
    axes.set_ylim(end, -0.8)
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(x=0.2)
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
