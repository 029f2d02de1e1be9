"""The same work by CuPy."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from ._bulk import FROM_PAGEABLE, TO_FRESH, TO_MEDIUM, TO_NEW, TO_PAGEABLE, TO_PINNED
from ._latency import AFTER_KERNEL, ALONE, CROWD, after_kernel, alone
from ._machine import Machine
from ._measure import EACH, bulk, crowds
from ._registry import Figure, case

__all__ = ["HOST_FUNC"]

HOST_FUNC = "cupy launch_host_func, call_soon_threadsafe"
GET = "cupy get(), which blocks the loop"
GET_OUT = "cupy to_thread(get(out=))"

_TO_HOST = 2


class _CuPy:
    """What all cases use: the machine's memory and stream as CuPy sees them, and page-locked memory of its own."""

    def __init__(self, machine: Machine) -> None:
        import cupy

        self.cupy = cupy
        self.stream = cupy.cuda.ExternalStream(machine.stream.handle)
        self.device = cupy.asarray(machine.device)
        self.small = cupy.zeros(4, np.uint8)
        self.small_pinned = cupy.cuda.alloc_pinned_memory(4)
        cupy.cuda.Device().synchronize()

    async def signalled(self) -> None:
        """Waits for all that is in the stream."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self.stream.launch_host_func(lambda _: loop.call_soon_threadsafe(future.set_result, None), None)
        await future

    async def copy_small(self) -> None:
        self.cupy.cuda.runtime.memcpyAsync(self.small_pinned.ptr, self.small.data.ptr, 4, _TO_HOST, self.stream.ptr)
        await self.signalled()


def _cupy(machine: Machine) -> _CuPy:
    found: _CuPy = machine.of_peer.get("cupy") or machine.of_peer.setdefault("cupy", _CuPy(machine))
    return found


@case(TO_PAGEABLE, by=GET_OUT, requires="cupy")
async def to_pageable(machine: Machine) -> list[Figure]:
    it = _cupy(machine)
    return await bulk(lambda: asyncio.to_thread(it.device.get, out=machine.pageable), machine.bulk_nbytes)


@case(TO_PAGEABLE, by="cupy get(out=), which blocks the loop", requires="cupy", at_most=2)
async def to_pageable_blocking(machine: Machine) -> list[Figure]:
    it = _cupy(machine)

    async def block() -> None:
        it.device.get(out=machine.pageable)

    return await bulk(block, machine.bulk_nbytes)


@case(TO_MEDIUM, by=GET_OUT, requires="cupy")
async def to_medium(machine: Machine) -> list[Figure]:
    it, nbytes = _cupy(machine), machine.medium_nbytes
    host = machine.pageable[:nbytes]
    return await bulk(lambda: asyncio.to_thread(it.device[:nbytes].get, out=host), nbytes)


async def _get(machine: Machine) -> list[Figure]:
    it = _cupy(machine)

    async def block() -> Any:
        return it.device.get()

    return await bulk(block, machine.bulk_nbytes)


for _workload in (TO_FRESH, TO_NEW):
    case(_workload, by=GET, requires="cupy", at_most=2)(_get)


@case(TO_PINNED, by=HOST_FUNC, requires="cupy")
async def to_pinned(machine: Machine) -> list[Figure]:
    it = _cupy(machine)

    async def copy() -> None:
        it.cupy.cuda.runtime.memcpyAsync(
            machine.pinned.ctypes.data, it.device.data.ptr, machine.bulk_nbytes, _TO_HOST, it.stream.ptr
        )
        await it.signalled()

    return await bulk(copy, machine.bulk_nbytes)


@case(FROM_PAGEABLE, by="cupy to_thread(set)", requires="cupy")
async def from_pageable(machine: Machine) -> list[Figure]:
    it = _cupy(machine)
    return await bulk(lambda: asyncio.to_thread(it.device.set, machine.pageable), machine.bulk_nbytes)


@case(ALONE, by=HOST_FUNC, requires="cupy")
async def await_signalled(machine: Machine) -> list[Figure]:
    return await alone(machine, _cupy(machine).copy_small)


@case(CROWD, by=HOST_FUNC, requires="cupy")
async def many_signalled(machine: Machine) -> list[Figure]:
    it = _cupy(machine)
    return [Figure(EACH, await crowds(lambda _: it.copy_small(), machine.crowd), "µs")]


@case(AFTER_KERNEL, by=HOST_FUNC, requires="cupy")
async def signalled_after_kernel(machine: Machine) -> list[Figure]:
    return await after_kernel(machine, _cupy(machine).copy_small)
