"""What was measured, and the ratios between those who did the same work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._measure import GAP, RATE
from ._registry import LINK, OWN, Figure

__all__ = ["STATISTICS", "Results", "Row"]

STATISTICS = ("median", "99th percentile", "longest")


@dataclass
class Row:
    """All repetitions of one figure of one case."""

    workload: str
    by: str
    metric: str
    unit: str
    repetitions: list[NDArray[np.float64]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """One for each repetition: its median."""
        return [float(np.median(samples)) for samples in self.repetitions]

    @property
    def samples(self) -> NDArray[np.float64]:
        return np.concatenate(self.repetitions)

    def statistic(self, name: str) -> float:
        """Of all samples of all repetitions."""
        quantile = {"median": 50, "99th percentile": 99, "longest": 100}[name]
        return float(np.percentile(self.samples, quantile))

    @property
    def headline(self) -> float:
        """What the row is compared by: of gaps the longest, of all else the median."""
        return self.statistic(self._headline)

    @property
    def _headline(self) -> str:
        return "longest" if self.metric == GAP else "median"

    def quotient(self, other: Row, statistic: str | None = None) -> float | None:
        """So many times the other one, by default of what rows are compared by; ``None`` where that is nothing.

        Of medians it is the median of the repetitions' quotients: what is compared in a repetition is measured in a
        row, and a processor that is slow for a while is slow for both.
        """
        statistic = statistic or self._headline
        if statistic == "median" and len(self.repetitions) == len(other.repetitions) and min(other.values) > 0:
            return float(np.median(np.divide(self.values, other.values)))
        reference = other.statistic(statistic)
        return self.statistic(statistic) / reference if reference > 0 else None

    def as_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "by": self.by,
            "metric": self.metric,
            "unit": self.unit,
            "values": self.values,
            "count": len(self.samples),
            "least": float(self.samples.min()),
            **{name: self.statistic(name) for name in STATISTICS},
            "notes": self.notes,
        }

    def cells(self) -> list[str]:
        low, middle, late, high = np.percentile(self.samples, [0, 50, 99, 100])
        numbers = [f"{middle:.4g}", f"{low:.4g}", f"{late:.4g}" if len(self.samples) >= 100 else "", f"{high:.4g}"]
        return [self.workload, self.by, self.metric, *numbers, self.unit, "; ".join(self.notes)]


class Results:
    """The rows in the order in which they were measured, and why others are missing."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], Row] = {}
        # By workload and who does it.
        self.skipped: dict[tuple[str, str], str] = {}
        self.failed: dict[tuple[str, str], str] = {}

    def add(self, workload: str, by: str, figures: list[Figure]) -> None:
        for figure in figures:
            row = self._rows.setdefault((workload, by, figure.metric), Row(workload, by, figure.metric, figure.unit))
            row.repetitions.append(np.atleast_1d(np.asarray(figure.value, np.float64)))
            if figure.note and figure.note not in row.notes:
                row.notes.append(figure.note)

    def rows(self) -> list[Row]:
        """Those of a workload side by side, and in it those of a figure."""
        workloads = list(dict.fromkeys(row.workload for row in self._rows.values()))
        metrics = list(dict.fromkeys(row.metric for row in self._rows.values()))
        return sorted(self._rows.values(), key=lambda row: (workloads.index(row.workload), metrics.index(row.metric)))

    def get(self, workload: str, by: str, metric: str) -> Row | None:
        return self._rows.get((workload, by, metric))

    def ratios(self) -> list[dict[str, Any]]:
        """Every row beside ours of the same work, and rates beside the link."""
        found = []
        for row in self.rows():
            ours = self.get(row.workload, OWN, row.metric)
            link = self.get(row.workload, LINK, RATE) if row.metric == RATE else None
            if ours is None and link is None:
                continue
            found.append(
                {
                    "workload": row.workload,
                    "metric": row.metric,
                    "by": row.by,
                    "unit": row.unit,
                    "value": row.headline,
                    "of_ours": row.quotient(ours) if ours is not None else None,
                    "of_link": row.quotient(link) if link is not None else None,
                }
            )
        return found
