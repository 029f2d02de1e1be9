"""The workloads and who performs them.

A workload is a name; a case is one way to do it. The library's own cases say ``by="aiocuda_copy"``; a peer's say its
name and stand in a module of their own, which imports the peer only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ._machine import Machine

__all__ = ["Case", "Figure", "case", "select"]

OWN = "aiocuda_copy"


@dataclass(frozen=True)
class Figure:
    """One measured number of one run."""

    metric: str
    value: float
    unit: str


Run = Callable[[Machine], Awaitable[list[Figure]]]


@dataclass(frozen=True)
class Case:
    """A workload done in one way; ``run`` is called once for each repetition."""

    workload: str
    by: str
    run: Run


_cases: list[Case] = []


def case(workload: str, *, by: str = OWN) -> Callable[[Run], Run]:
    """Registers a coroutine function as a way to do a workload."""

    def register(run: Run) -> Run:
        _cases.append(Case(workload, by, run))
        return run

    return register


def select(words: str | None, by: frozenset[str] = frozenset({OWN})) -> list[Case]:
    """The cases whose workloads contain one of the comma-separated words, ways to do the same workload side by side."""
    wanted = [word for word in (words or "").split(",") if word]
    order = list(dict.fromkeys(case.workload for case in _cases))
    chosen = [
        case for case in _cases if case.by in by and (not wanted or any(word in case.workload for word in wanted))
    ]
    return sorted(chosen, key=lambda case: order.index(case.workload))
