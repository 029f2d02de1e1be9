"""``bench``: measures this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._choose import EMULATED_NOTICE, choose_driver
from .._table import table
from ..info import collect

__all__ = ["run"]


@dataclass(frozen=True)
class _Row:
    workload: str
    by: str
    metric: str
    unit: str
    values: list[float]

    def cells(self) -> list[str]:
        low, middle, high = np.percentile(self.values, [0, 50, 100])
        return [self.workload, self.by, self.metric, *(f"{value:.4g}" for value in (middle, low, high)), self.unit]


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen cases and prints a table; the exit status is 1 where a case failed."""
    emulated = choose_driver(arguments.driver)
    report = collect(emulated=emulated)
    if report["error"]:
        print(report["error"], file=sys.stderr)
        return 1
    # These make no driver call when they are imported, but they do import NumPy and the bindings.
    from . import _bulk, _latency  # noqa: F401
    from ._machine import Machine
    from ._registry import select

    cases = select(arguments.only)
    if arguments.list:
        for case in cases:
            print(case.workload)
        return 0
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if arguments.loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        rows, failed = runner.run(_measure(cases, Machine(emulated=emulated), arguments.repeat))

    device = report["devices"][0]["name"]
    print(f"{device}, CUDA {report['cuda']}, {arguments.loop}, {arguments.repeat} runs\n")
    print(table(["workload", "by", "figure", "median", "least", "most", "unit"], [row.cells() for row in rows]))
    if emulated:
        print(f"\n{EMULATED_NOTICE}")
    if arguments.json:
        report |= {"loop": arguments.loop, "repeat": arguments.repeat, "rows": [vars(row) for row in rows]}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


async def _measure(cases: list[Any], machine: Any, repeat: int) -> tuple[list[_Row], bool]:
    """Runs each case once to warm up and then ``repeat`` times. A case that fails is reported and the others go on."""
    rows: list[_Row] = []
    failed = False
    for case in cases:
        values: dict[tuple[str, str], list[float]] = defaultdict(list)
        try:
            await case.run(machine)
            for _ in range(repeat):
                for figure in await case.run(machine):
                    values[figure.metric, figure.unit].append(figure.value)
        except Exception as exc:
            print(f"{case.workload} by {case.by} failed: {type(exc).__name__}: {exc}", file=sys.stderr)
            failed = True
        rows += [_Row(case.workload, case.by, metric, unit, found) for (metric, unit), found in values.items()]
    return rows, failed
