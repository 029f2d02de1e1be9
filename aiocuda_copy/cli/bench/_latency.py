"""How long a small copy keeps its caller, and what a crowd of them costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np

from ... import Copier, copy_to_host, pinned_empty
from ...testing import DeviceArray
from .._heartbeat import Heartbeat
from ._machine import Machine
from ._registry import Figure, case

__all__: list[str] = []


async def _microseconds(once: Callable[[], Awaitable[object]], count: int) -> np.ndarray:
    times = np.empty(count)
    for index in range(count):
        begin = time.perf_counter_ns()
        await once()
        times[index] = time.perf_counter_ns() - begin
    return times / 1e3


async def _bare_future() -> None:
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def _alone(machine: Machine, copier: Copier) -> list[Figure]:
    source = DeviceArray((4,), np.uint8)
    target = pinned_empty((4,), np.uint8)
    times = await _microseconds(lambda: copier.copy_to_host(source, target, stream=machine.stream), machine.awaits)
    bare = await _microseconds(_bare_future, machine.awaits)
    median, late = np.percentile(times, [50, 99])
    return [
        Figure("median", float(median), "µs"),
        Figure("99th percentile", float(late), "µs"),
        Figure("median / a bare future's", float(median / np.median(bare)), "x"),
    ]


@case("await of 4 bytes, idle stream, inline")
async def await_inline(machine: Machine) -> list[Figure]:
    async with Copier() as copier:
        return await _alone(machine, copier)


@case("await of 4 bytes, idle stream, parked")
async def await_parked(machine: Machine) -> list[Figure]:
    async with Copier(inline=False) as copier:
        return await _alone(machine, copier)


async def _crowd(once: Callable[[int], Awaitable[object]], count: int) -> float:
    """Microseconds each, of that many tasks at once."""
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(_one(once, index))
    return (time.perf_counter() - begin) / count * 1e6


async def _one(once: Callable[[int], Awaitable[object]], index: int) -> None:
    await once(index)


@case("many awaits of 4 bytes at once, one stream")
async def crowd(machine: Machine) -> list[Figure]:
    count = machine.crowd
    sources = [DeviceArray((4,), np.uint8) for _ in range(count)]
    targets = pinned_empty((count, 4), np.uint8)
    each = await _crowd(lambda i: copy_to_host(sources[i], targets[i], stream=machine.stream), count)
    bare = await _crowd(lambda _: _bare_future(), count)
    return [
        Figure(f"each of {count:,}", each, "µs"),
        Figure("each / a bare task's", each / bare, "x"),
    ]


@case("4 KiB into fresh memory behind a busy kernel")
async def behind_kernel(machine: Machine) -> list[Figure]:
    source = DeviceArray((4096,), np.uint8)
    target = np.empty(4096, np.uint8)
    async with Heartbeat() as beat:
        begin = time.perf_counter()
        machine.spin()
        await copy_to_host(source, target, stream=machine.stream)
        seconds = time.perf_counter() - begin
    return [
        Figure("longest gap of the loop", beat.longest * 1e3, "ms"),
        Figure("after the kernel's end", (seconds - machine.kernel_seconds) * 1e3, "ms"),
    ]
