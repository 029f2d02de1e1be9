"""Takes turns: each repetition goes round all who do the same work, so that a change of the machine hits all alike."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from ._machine import Machine
from ._registry import Case, Skipped
from ._results import Results

__all__ = ["measure"]


async def measure(workloads: dict[str, list[Case]], machine: Machine, repeat: int, results: Results) -> None:
    """Runs each case once to warm up and then ``repeat`` times, fewer where a workload takes too long.

    A case that fails or cannot be done is reported, and the others go on.
    """
    for workload, cases in workloads.items():
        print(f"{workload} ...", file=sys.stderr, flush=True)
        out = set()
        end = time.perf_counter() + machine.workload_seconds
        # A full collection looks at all that imported packages have made, a tenth of a second's work that would be
        # counted as anybody's.
        gc.collect()
        gc.freeze()
        for case in cases:
            if case.warm and not await _run(case, machine, None, results):
                out.add(case.by)
        for repetition in range(repeat):
            if repetition and time.perf_counter() > end:
                break
            for case in cases:
                if case.by in out or repetition >= case.at_most:
                    continue
                if not await _run(case, machine, results, results):
                    out.add(case.by)
        # At once: a run that is cut short has measured something all the same.
        for row in results.rows():
            if row.workload == workload:
                print(f"    {row.by}, {row.metric}: {row.headline:.4g} {row.unit}", file=sys.stderr, flush=True)


async def _run(case: Case, machine: Machine, into: Results | None, results: Results) -> bool:
    name = f"{case.workload}, by {case.by}"
    try:
        figures = await case.run(machine)
    except Skipped as exc:
        results.skipped[case.workload, case.by] = str(exc)
        print(f"{name}, is left out: {exc}", file=sys.stderr)
        return False
    except Exception as exc:
        results.failed[case.workload, case.by] = f"{type(exc).__name__}: {exc}"
        print(f"{name}, failed: {type(exc).__name__}: {exc}", file=sys.stderr)
        return False
    finally:
        # Whatever was given up in the middle is not to disturb the next.
        await asyncio.sleep(0)
    if into is not None:
        into.add(case.workload, case.by, figures)
    return True
