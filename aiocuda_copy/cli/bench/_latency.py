"""How long a small copy keeps its caller, and what a crowd of them costs."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from ... import Copier, copy_to_host, pinned_empty
from ...testing import DeviceArray
from .._heartbeat import Heartbeat
from ._machine import Machine
from ._measure import AWAIT, EACH, GAP, Once, awaits, bare_future, crowds, steps
from ._registry import BARE, OWN, Figure, case

__all__ = ["AFTER", "AFTER_KERNEL", "ALONE", "BEHIND", "CROWD", "FLAG", "PARKED", "SUBMISSION", "after_kernel", "alone"]

PARKED = f"{OWN}, inline=False"
FLAG = f"{OWN}, inline=False, completion='flag'"

ALONE = "await of 4 bytes, idle stream"
CROWD = "many awaits of 4 bytes at once, one stream"
AFTER_KERNEL = "await of 4 bytes behind a kernel of 2 ms"
BEHIND = "4 KiB into fresh memory behind a busy kernel"
SUBMISSION = "submission of 4 bytes that will be waited for"

AFTER = "after the kernel's end"
_KERNEL_SECONDS = 2e-3


async def alone(machine: Machine, once: Once) -> list[Figure]:
    """Awaits one at a time."""
    with machine.no_time_passes():
        return [Figure(AWAIT, await awaits(once, machine.awaits), "µs")]


async def _alone(machine: Machine, copier: Copier) -> list[Figure]:
    source, target, stream = machine.small, machine.small_pinned, machine.stream
    return await alone(machine, lambda: copier.copy_to_host(source, target, stream=stream))


@case(ALONE)
async def await_inline(machine: Machine) -> list[Figure]:
    source, target, stream = machine.small, machine.small_pinned, machine.stream
    return await alone(machine, lambda: copy_to_host(source, target, stream=stream))


@case(ALONE, by=PARKED)
async def await_parked(machine: Machine) -> list[Figure]:
    async with Copier(inline=False) as copier:
        return await _alone(machine, copier)


@case(ALONE, by=FLAG)
async def await_parked_on_flags(machine: Machine) -> list[Figure]:
    async with Copier(inline=False, completion="flag") as copier:
        return await _alone(machine, copier)


@case(ALONE, by=BARE)
async def await_bare_future(machine: Machine) -> list[Figure]:
    return await alone(machine, bare_future)


@case(CROWD)
async def many(machine: Machine) -> list[Figure]:
    count, stream = machine.crowd, machine.stream
    sources = [DeviceArray((4,), np.uint8) for _ in range(count)]
    targets = list(pinned_empty((count, 4), np.uint8))
    with machine.no_time_passes():
        each = await crowds(lambda i: copy_to_host(sources[i], targets[i], stream=stream), count)
    return [Figure(EACH, each, "µs")]


@case(CROWD, by=BARE)
async def many_bare_futures(machine: Machine) -> list[Figure]:
    return [Figure(EACH, await crowds(lambda _: bare_future(), machine.crowd), "µs")]


async def after_kernel(machine: Machine, once: Once) -> list[Figure]:
    """From the moment at which a kernel ends to that at which the task goes on, which waited for a copy behind it.

    The kernel writes the device's clock as the last thing it does. The emulated driver has no such kernel: there, the
    kernel's nominal time is taken off.
    """
    clock, count = machine.clock, machine.short_kernels
    if clock is None:
        begun = time.perf_counter()
        machine.spin(_KERNEL_SECONDS)
        await once()
        return [Figure(AFTER, (time.perf_counter() - begun - _KERNEL_SECONDS) * 1e6, "µs")]
    resumed, ended = np.empty(count), np.empty(count)
    first_host, first_device, _ = clock.compare()
    for index in range(count):
        clock.spin_then_stamp(machine.stream, _KERNEL_SECONDS)
        await once()
        resumed[index] = time.perf_counter_ns() - first_host
        ended[index] = clock.stamp() - first_device
    last_host, last_device, _ = clock.compare()
    ended *= (last_host - first_host) / (last_device - first_device)
    return [Figure(AFTER, (resumed - ended) / 1e3, "µs")]


@case(AFTER_KERNEL)
async def own_after_kernel(machine: Machine) -> list[Figure]:
    source, target, stream = machine.small, machine.small_pinned, machine.stream
    return await after_kernel(machine, lambda: copy_to_host(source, target, stream=stream))


@case(AFTER_KERNEL, by=f"{OWN}, completion='flag'")
async def flag_after_kernel(machine: Machine) -> list[Figure]:
    source, target, stream = machine.small, machine.small_pinned, machine.stream
    async with Copier(completion="flag") as copier:
        return await after_kernel(machine, lambda: copier.copy_to_host(source, target, stream=stream))


@case(AFTER_KERNEL, by="cuStreamSynchronize, which blocks the loop")
async def bare_after_kernel(machine: Machine) -> list[Figure]:
    async def block() -> None:
        machine.stream.synchronize()

    return await after_kernel(machine, block)


@case(BEHIND, warm=False, at_most=2)
async def behind_kernel(machine: Machine) -> list[Figure]:
    source = DeviceArray((4096,), np.uint8)
    target = np.empty(4096, np.uint8)
    async with Heartbeat() as beat:
        begin = time.perf_counter()
        machine.spin(machine.kernel_seconds)
        await copy_to_host(source, target, stream=machine.stream)
        seconds = time.perf_counter() - begin
    return [
        Figure(GAP, beat.longest * 1e3, "ms"),
        Figure("after the kernel's nominal end", (seconds - machine.kernel_seconds) * 1e3, "ms"),
    ]


@case(SUBMISSION)
async def submission(machine: Machine) -> list[Figure]:
    source, target, stream = machine.small, machine.small_pinned, machine.stream
    first = []
    async with Copier(inline=False) as copier:
        with machine.no_time_passes():
            for _ in range(machine.awaits):
                times: list[float] = []
                await asyncio.sleep(0)
                await steps(copier.copy_to_host(source, target, stream=stream), times)
                first.append(times[0])
    return [Figure("its first step", np.array(first), "µs")]


@case(SUBMISSION, by=BARE)
async def bare_submission(machine: Machine) -> list[Figure]:
    """A future, created, resolved and awaited: the whole of it."""
    return [Figure("its first step", await awaits(bare_future, machine.awaits), "µs")]
