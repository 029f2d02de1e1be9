"""How things are measured: the same for the library, its peers and the yardsticks."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._heartbeat import Heartbeat
from ._registry import Figure

__all__ = [
    "AWAIT",
    "EACH",
    "GAP",
    "GIVE_UP_SECONDS",
    "RATE",
    "Once",
    "awaits",
    "bare_future",
    "bulk",
    "crowds",
    "late",
    "steps",
    "until_stuck",
]

RATE = "rate"
GAP = "longest gap of the loop"
AWAIT = "await"
EACH = "each"

GIVE_UP_SECONDS = 5.0

Once = Callable[[], Awaitable[object]]


async def bulk(once: Once, nbytes: int, rounds: int = 1) -> list[Figure]:
    """The rate of a large copy, one or several in a row, and what the loop did meanwhile."""
    times = np.empty(rounds)
    async with Heartbeat() as beat:
        for index in range(rounds):
            begin = time.perf_counter()
            # What it returns is freed after the measurement: unmapping a GiB takes as long as copying it.
            result = await once()
            times[index] = time.perf_counter() - begin
    del result
    rate = nbytes / times / 1e9
    return [Figure(RATE, rate if rounds > 1 else float(rate[0]), "GB/s"), Figure(GAP, beat.longest * 1e3, "ms")]


async def awaits(once: Once, count: int) -> NDArray[np.float64]:
    """Microseconds of each of that many awaits, one after another."""
    times = np.empty(count)
    for index in range(count):
        begin = time.perf_counter_ns()
        await once()
        times[index] = time.perf_counter_ns() - begin
    return times / 1e3


async def bare_future() -> None:
    """The least that any await costs that has to wait for the loop."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def crowds(once: Callable[[int], Awaitable[object]], count: int) -> NDArray[np.float64]:
    """Microseconds each, of that many tasks at once, a few times in a row."""

    async def one(index: int) -> None:
        await once(index)

    times = np.empty(5)
    for index in range(len(times)):
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for member in range(count):
                group.create_task(one(member))
        times[index] = time.perf_counter() - begin
    return times / count * 1e6


@types.coroutine
def steps(awaitable: Any, times: list[float]) -> Generator[Any, Any, Any]:
    """Awaits, and appends the microseconds of each step that the task makes on the loop's thread."""
    iterator = awaitable.__await__()
    resume: Callable[[], Any] = iterator.__next__
    while True:
        begin = time.perf_counter_ns()
        try:
            value = resume()
        except StopIteration as stop:
            return stop.value
        finally:
            times.append((time.perf_counter_ns() - begin) / 1e3)
        try:
            yield value
        except BaseException as exc:
            resume = partial(iterator.throw, exc)
        else:
            resume = iterator.__next__


async def until_stuck(once: Once, seconds: float, most: int = 100_000) -> tuple[NDArray[np.float64], str]:
    """Microseconds of awaits one after another for some time, and a note if one of them is given up."""
    times: list[float] = []
    begun = time.perf_counter()

    async def go() -> None:
        nonlocal begun
        end = time.perf_counter() + seconds
        while len(times) < most and (begun := time.perf_counter()) < end:
            await once()
            times.append((time.perf_counter() - begun) * 1e6)

    # A watch beside it, because a timeout around each await would be measured with it.
    task = asyncio.create_task(go())
    while not task.done():
        await asyncio.wait([task], timeout=0.05)
        if not task.done() and time.perf_counter() - begun > GIVE_UP_SECONDS:
            task.cancel()
            await asyncio.wait([task])
            break
    if task.cancelled():
        return late(times)
    task.result()
    return np.array(times), ""


def late(times: list[float]) -> tuple[NDArray[np.float64], str]:
    """What has been measured, when the last of them is given up."""
    # Fewer than a hundred quick ones before it must not hide it.
    return np.array([*times, GIVE_UP_SECONDS * 1e6]), f"not done after {GIVE_UP_SECONDS:.0f} s"
