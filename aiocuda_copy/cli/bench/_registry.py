"""The workloads and who performs them.

A workload is a name; a case is one way to do it. The library's own cases say ``by="aiocuda_copy"``, maybe with an
option behind it; those of a peer name the package that they need and stand in a module of their own, which imports it
only when it is asked for. Yardsticks, such as the link or a bare future, are cases as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._machine import Machine

__all__ = ["BARE", "LINK", "OWN", "Case", "Figure", "Skipped", "case", "contains", "select"]

OWN = "aiocuda_copy"
LINK = "the link"
BARE = "a bare future"


class Skipped(Exception):
    """This machine cannot do a case; the message is a sentence that says why."""


@dataclass(frozen=True)
class Figure:
    """What one repetition measured of one thing: a number, or many of them."""

    metric: str
    value: float | NDArray[np.float64]
    unit: str
    # A sentence that belongs to the number.
    note: str = ""


Run = Callable[[Machine], Awaitable[list[Figure]]]


@dataclass(frozen=True)
class Case:
    """A workload done in one way; ``run`` is called once for each repetition."""

    workload: str
    by: str
    run: Run
    requires: str | None = None
    # No more repetitions than that, and whether there is one before them that does not count.
    at_most: int = 1000
    warm: bool = True


_cases: list[Case] = []


def case(workload: str, *, by: str = OWN, requires: str | None = None, **options: Any) -> Callable[[Run], Run]:
    """Registers a coroutine function as a way to do a workload."""

    def register(run: Run) -> Run:
        _cases.append(Case(workload, by, run, requires, **options))
        return run

    return register


def contains(words: str | None, workload: str) -> bool:
    """Whether a name is what is asked for, or contains one of the comma-separated words, or there are none."""
    # Names have commas in them.
    if words in {found.workload for found in _cases}:
        return workload == words
    wanted = [word.strip() for word in (words or "").split(",") if word.strip()]
    return not wanted or any(word in workload for word in wanted)


def select(words: str | None, peers: frozenset[str] = frozenset()) -> dict[str, list[Case]]:
    """The workloads whose names contain one of the comma-separated words, each with the ways to do it."""
    chosen: dict[str, list[Case]] = {}
    for found in _cases:
        if contains(words, found.workload) and (found.requires is None or found.requires in peers):
            chosen.setdefault(found.workload, []).append(found)
    return chosen
