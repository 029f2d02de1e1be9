"""Small copies beside something that keeps the link or the chip busy, and what goes on at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from ... import copy_to_host
from ._bulk import link_to_host
from ._machine import Machine
from ._measure import AWAIT, until_stuck
from ._registry import LINK, Figure, case

__all__ = [
    "BESIDE_CHIP",
    "BESIDE_PINNED",
    "BESIDE_RATE",
    "BESIDE_STAGED",
    "Traffic",
    "beside_full_chip",
    "beside_own_copies",
    "own_await",
]

BESIDE_STAGED = "4 bytes beside our copies to host, pageable"
BESIDE_PINNED = "4 bytes beside our copies to host, page-locked"
BESIDE_CHIP = "4 bytes beside a kernel that fills the chip"

BESIDE_RATE = "rate of the bulk copies"

# Measures small copies for some seconds; returns their microseconds and a note.
Small = Callable[[Machine, float], Awaitable[tuple[NDArray[np.float64], str]]]


class Traffic:
    """Counts what somebody copies back to back."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.begin = self.last = time.perf_counter()
        self.stop = False

    def copied(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.last = time.perf_counter()

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.last - self.begin, 1e-9)


@asynccontextmanager
async def _own_copies(machine: Machine, host: NDArray[np.uint8]) -> AsyncIterator[Traffic]:
    traffic = Traffic()

    async def copy_back_to_back() -> None:
        while not traffic.stop:
            await copy_to_host(machine.device, host, stream=machine.other_stream)
            traffic.copied(machine.bulk_nbytes)

    # The first copy gets the workers and slots together.
    await copy_to_host(machine.device, host, stream=machine.other_stream)
    traffic.begin = time.perf_counter()
    task = asyncio.create_task(copy_back_to_back())
    try:
        # Into the middle of a copy.
        await asyncio.sleep(0.005)
        yield traffic
    finally:
        traffic.stop = True
        await task


async def own_await(machine: Machine, seconds: float) -> tuple[NDArray[np.float64], str]:
    """Our awaits, back to back."""
    source, target, stream = machine.small, machine.small_pinned, machine.stream
    return await until_stuck(lambda: copy_to_host(source, target, stream=stream), seconds)


async def beside_own_copies(machine: Machine, host: NDArray[np.uint8], small: Small) -> list[Figure]:
    """Small copies, by whomever, beside our large ones."""
    async with _own_copies(machine, host) as traffic:
        times, note = await small(machine, machine.beside_seconds)
    return [Figure(AWAIT, times, "µs", note), Figure(BESIDE_RATE, traffic.rate / 1e9, "GB/s")]


@case(BESIDE_STAGED, warm=False, at_most=2)
async def beside_staged(machine: Machine) -> list[Figure]:
    return await beside_own_copies(machine, machine.pageable, own_await)


@case(BESIDE_PINNED, warm=False, at_most=2)
async def beside_pinned(machine: Machine) -> list[Figure]:
    return await beside_own_copies(machine, machine.pinned, own_await)


for _workload in (BESIDE_STAGED, BESIDE_PINNED):
    case(_workload, by=LINK)(link_to_host)


async def beside_full_chip(machine: Machine, small: Small) -> list[Figure]:
    """Small copies beside one kernel that lasts longer than they are measured."""
    seconds = machine.beside_seconds / 2
    machine.fill_with_short_blocks(2 * seconds)
    await asyncio.sleep(0.01)
    times, note = await small(machine, seconds)
    if not machine.other_stream.busy() and not machine.emulated:
        note = note or "the kernel ended before the last of them"
    await asyncio.to_thread(machine.other_stream.synchronize)
    return [Figure(AWAIT, times, "µs", note)]


@case(BESIDE_CHIP, warm=False, at_most=3)
async def own_beside_chip(machine: Machine) -> list[Figure]:
    return await beside_full_chip(machine, own_await)
