"""``bench``: measures this machine, and peers beside the library."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .._choose import EMULATED_NOTICE
from .._table import table
from ..info import collect

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen cases and prints tables; the exit status is 1 where a case failed, 2 where an option is wrong."""
    emulated = arguments.emulated
    # These make no driver call when they are imported, but they do import NumPy and the bindings.
    from . import _cases, _peers, _plot  # noqa: F401
    from ._machine import Machine
    from ._registry import contains, select
    from ._report import describe
    from ._results import Results
    from ._run import measure
    from ._targets import judge

    try:
        loop_factory = _loop_factory(arguments.loop)
        peers, missing = _peers.available(arguments.peers, emulated=emulated)
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 2
    workloads = select(arguments.only, peers)
    if arguments.list:
        print("\n".join(workloads))
        return 0
    for path in map(Path, filter(None, (arguments.json, arguments.plot))):
        # Before minutes of measuring that would be lost.
        if path.is_dir() or not path.absolute().parent.is_dir():
            why = "is a folder" if path.is_dir() else f"cannot be written: {path.absolute().parent} is not a folder"
            print(f"{path} {why}", file=sys.stderr)
            return 2
    report = collect(emulated=emulated)
    cannot_draw = arguments.plot and _plot.why_not()
    if report["error"] or not workloads:
        print(
            report["error"] or f"no workload's name contains any of {arguments.only!r}; --list lists them",
            file=sys.stderr,
        )
        return 1
    for sentence in [*missing.values(), *([cannot_draw] if cannot_draw else [])]:
        print(sentence, file=sys.stderr)

    repeat = arguments.repeat or (2 if arguments.quick else 5)
    results, begin = Results(), time.perf_counter()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        machine = Machine(emulated=emulated, quick=arguments.quick)
        runner.run(measure(workloads, machine, repeat, results))
    seconds = time.perf_counter() - begin
    verdicts = judge(results, missing, emulated=emulated, wanted=partial(contains, arguments.only))

    title = f"{describe(report)}, {arguments.loop}, {seconds:.0f} s"
    print(f"{title}\n")
    header = ["workload", "by", "figure", "median", "least", "99th", "most", "unit", ""]
    print(table(header, [row.cells() for row in results.rows()]))
    if verdicts:
        header = ["target", "must reach", "measured", "verdict", "the best of others", ""]
        print("\n" + table(header, [verdict.cells() for verdict in verdicts]))
    if emulated:
        print(f"\n{EMULATED_NOTICE}")
    if arguments.plot and not cannot_draw:
        _plot.draw(results, f"{'EMULATED DRIVER, ' if emulated else ''}{title}", arguments.plot)
    if arguments.json:
        report |= _as_json(arguments, repeat, seconds, peers, missing, results)
        report["targets"] = [verdict.as_json() for verdict in verdicts]
        Path(arguments.json).write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    return 1 if results.failed else 0


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if name != "uvloop":
        return None
    try:
        import uvloop
    except ImportError:
        raise ValueError("--loop uvloop needs uvloop, which is missing: pip install 'aiocuda-copy[uvloop]'") from None

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _as_json(
    arguments: argparse.Namespace,
    repeat: int,
    seconds: float,
    peers: frozenset[str],
    missing: dict[str, str],
    results: Any,
) -> dict[str, Any]:
    from ._report import commit, versions

    def reasons(found: dict[tuple[str, str], str]) -> list[dict[str, str]]:
        return [{"workload": workload, "by": by, "reason": why} for (workload, by), why in found.items()]

    return {
        "commit": commit(),
        "versions": versions(),
        "loop": arguments.loop,
        "quick": arguments.quick,
        "repeat": repeat,
        "seconds": seconds,
        "peers": sorted(peers),
        "missing_peers": missing,
        "rows": [row.as_json() for row in results.rows()],
        "ratios": results.ratios(),
        "skipped": reasons(results.skipped),
        "failed": reasons(results.failed),
    }
