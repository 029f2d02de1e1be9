"""The same work by cuda.core."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._batches import ARRAYS_TO_DEVICE, ARRAYS_TO_HOST
from ._bulk import (
    FROM_PAGEABLE,
    FROM_PINNED,
    TO_FRESH,
    TO_MEDIUM,
    TO_PAGEABLE,
    TO_PINNED,
)
from ._latency import AFTER_KERNEL, ALONE, after_kernel, alone
from ._machine import Machine
from ._measure import Once, bulk
from ._registry import Figure, case

__all__: list[str] = []

COPY_TO = "cuda.core copy_to, to_thread(stream.sync)"
# A copy of pageable memory blocks its caller, so that all of it belongs in the thread.
COPY_IN_THREAD = "cuda.core to_thread(copy_to, stream.sync)"
BATCH = "cuda.core copy_batch, to_thread(stream.sync)"


class _Core:
    """What all cases use: the machine's memory and stream as cuda.core sees them."""

    def __init__(self, machine: Machine) -> None:
        from cuda.core import Buffer, Device, Stream

        self._from_handle = Buffer.from_handle
        self._device = Device(0)
        self._device.set_current()
        self.stream = Stream.from_handle(machine.stream.handle)
        self.device = self.buffer(machine.device)
        self.small, self.small_pinned = machine.small, self.buffer(machine.small_pinned)
        self._batch: tuple[list[Any], list[Any]] | None = None

    def buffer(self, array: Any) -> Any:
        address = array.ctypes.data if isinstance(array, np.ndarray) else array.ptr
        return self._from_handle(address, array.nbytes, owner=array)

    def batch(self, machine: Machine) -> tuple[list[Any], list[Any]]:
        if self._batch is None:
            device, host = machine.block_arrays
            self._batch = [self.buffer(array) for array in device], [self.buffer(array) for array in host]
        return self._batch

    def copy_in_thread(self, source: Any, target: Any) -> Once:
        def copy() -> None:
            self._device.set_current()
            source.copy_to(target, stream=self.stream)
            self.stream.sync()

        return lambda: asyncio.to_thread(copy)

    def copy(self, source: Any, target: Any) -> Once:
        async def copy() -> None:
            source.copy_to(target, stream=self.stream)
            await asyncio.to_thread(self.stream.sync)

        return copy


def _core(machine: Machine) -> _Core:
    found: _Core = machine.of_peer.get("cuda.core") or machine.of_peer.setdefault("cuda.core", _Core(machine))
    return found


async def _to_host(machine: Machine, host: NDArray[np.uint8]) -> list[Figure]:
    it = _core(machine)
    source = it.buffer(machine.device[: host.nbytes])
    return await bulk(it.copy_in_thread(source, it.buffer(host)), host.nbytes)


@case(TO_PAGEABLE, by=COPY_IN_THREAD, requires="cuda.core")
async def to_pageable(machine: Machine) -> list[Figure]:
    return await _to_host(machine, machine.pageable)


@case(TO_FRESH, by=COPY_IN_THREAD, requires="cuda.core", at_most=2)
async def to_fresh(machine: Machine) -> list[Figure]:
    return await _to_host(machine, np.empty(machine.bulk_nbytes, np.uint8))


@case(TO_MEDIUM, by=COPY_IN_THREAD, requires="cuda.core")
async def to_medium(machine: Machine) -> list[Figure]:
    return await _to_host(machine, machine.pageable[: machine.medium_nbytes])


@case(FROM_PAGEABLE, by=COPY_IN_THREAD, requires="cuda.core")
async def from_pageable(machine: Machine) -> list[Figure]:
    it = _core(machine)
    return await bulk(it.copy_in_thread(it.buffer(machine.pageable), it.device), machine.bulk_nbytes)


@case(TO_PINNED, by=COPY_TO, requires="cuda.core")
async def to_pinned(machine: Machine) -> list[Figure]:
    it = _core(machine)
    return await bulk(it.copy(it.device, it.buffer(machine.pinned)), machine.bulk_nbytes)


@case(FROM_PINNED, by=COPY_TO, requires="cuda.core")
async def from_pinned(machine: Machine) -> list[Figure]:
    it = _core(machine)
    return await bulk(it.copy(it.buffer(machine.pinned), it.device), machine.bulk_nbytes)


async def _batch(machine: Machine, *, to_host: bool) -> list[Figure]:
    from cuda.core.utils import copy_batch

    it = _core(machine)
    device, host = it.batch(machine)
    srcs, dsts = (device, host) if to_host else (host, device)

    async def copy() -> None:
        copy_batch(it.stream, srcs, dsts)
        await asyncio.to_thread(it.stream.sync)

    return await bulk(copy, machine.batch_entries * machine.batch_entry_nbytes, machine.batch_rounds)


@case(ARRAYS_TO_HOST, by=BATCH, requires="cuda.core")
async def batch_to_host(machine: Machine) -> list[Figure]:
    return await _batch(machine, to_host=True)


@case(ARRAYS_TO_DEVICE, by=BATCH, requires="cuda.core")
async def batch_to_device(machine: Machine) -> list[Figure]:
    return await _batch(machine, to_host=False)


@case(ALONE, by=COPY_TO, requires="cuda.core")
async def await_synchronised(machine: Machine) -> list[Figure]:
    it = _core(machine)
    return await alone(machine, it.copy(it.small, it.small_pinned))


@case(AFTER_KERNEL, by=COPY_TO, requires="cuda.core")
async def synchronised_after_kernel(machine: Machine) -> list[Figure]:
    it = _core(machine)
    return await after_kernel(machine, it.copy(it.small, it.small_pinned))
