"""The same work by PyTorch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import copy_to_host
from ._batches import BLOCKS_TO_HOST
from ._beside import (
    BESIDE_CHIP,
    BESIDE_PINNED,
    BESIDE_RATE,
    BESIDE_STAGED,
    Traffic,
    beside_full_chip,
    beside_own_copies,
    own_await,
)
from ._bulk import (
    FROM_PAGEABLE,
    FROM_PINNED,
    TO_FRESH,
    TO_MEDIUM,
    TO_NEW,
    TO_PAGEABLE,
    TO_PINNED,
    link_to_host,
)
from ._latency import AFTER_KERNEL, ALONE, CROWD, after_kernel, alone
from ._loader import COMPUTE_SECONDS, LOADER, host_batches, per_batch
from ._machine import Machine
from ._measure import AWAIT, EACH, GIVE_UP_SECONDS, awaits, bulk, crowds, late, until_stuck
from ._registry import LINK, OWN, Figure, case

__all__ = ["BESIDE_TORCH", "ITEM", "POLL", "QUERY", "THREAD"]

ITEM = "torch .item(), which blocks the loop"
THREAD = "torch copy_ to pinned, to_thread(event.synchronize)"
POLL = "torch copy_ to pinned, event query and sleep(0)"
QUERY = "torch copy_ to pinned, event query in a thread"
IN_THREAD = "torch to_thread(copy_)"
CPU = "torch .cpu(), which blocks the loop"
CPU_IN_THREAD = "torch to_thread(.cpu)"

BESIDE_TORCH = "4 bytes beside torch's copies to host, page-locked"


class _Torch:
    """What all cases use: the machine's memory and streams as torch sees them, and page-locked memory of its own."""

    def __init__(self, machine: Machine) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        self.stream = torch.cuda.ExternalStream(machine.stream.handle)
        self.side = torch.cuda.Stream()
        self.device = torch.as_tensor(machine.device, device="cuda")
        self.pageable = torch.from_numpy(machine.pageable)
        self.small = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.small_pinned = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._pinned: Any = None
        torch.cuda.synchronize()

    @property
    def pinned(self) -> Any:
        if self._pinned is None:
            self._pinned = self.torch.empty(len(self.pageable), dtype=self.torch.uint8, pin_memory=True)
        return self._pinned

    def start(self, target: Any, source: Any, stream: Any = None) -> Any:
        """Enqueues a copy, and returns an event behind it."""
        stream = self.stream if stream is None else stream
        event = self.torch.cuda.Event()
        with self.torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return event

    async def in_thread(self, target: Any, source: Any, stream: Any = None) -> None:
        await asyncio.to_thread(self.start(target, source, stream).synchronize)

    async def poll(self, target: Any, source: Any, stream: Any = None) -> None:
        event = self.start(target, source, stream)
        while not event.query():  # noqa: ASYNC110 - polling is what is measured here
            await asyncio.sleep(0)


def _torch(machine: Machine) -> _Torch:
    found: _Torch = machine.of_peer.get("torch") or machine.of_peer.setdefault("torch", _Torch(machine))
    return found


@case(TO_PAGEABLE, by=IN_THREAD, requires="torch")
async def to_pageable(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await bulk(lambda: asyncio.to_thread(it.pageable.copy_, it.device), machine.bulk_nbytes)


@case(TO_MEDIUM, by=IN_THREAD, requires="torch")
async def to_medium(machine: Machine) -> list[Figure]:
    it, nbytes = _torch(machine), machine.medium_nbytes
    return await bulk(lambda: asyncio.to_thread(it.pageable[:nbytes].copy_, it.device[:nbytes]), nbytes)


@case(FROM_PAGEABLE, by=IN_THREAD, requires="torch")
async def from_pageable(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await bulk(lambda: asyncio.to_thread(it.device.copy_, it.pageable), machine.bulk_nbytes)


async def _cpu(machine: Machine) -> list[Figure]:
    it = _torch(machine)

    async def block() -> Any:
        return it.device.cpu()

    return await bulk(block, machine.bulk_nbytes)


async def _cpu_in_thread(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await bulk(lambda: asyncio.to_thread(it.device.cpu), machine.bulk_nbytes)


for _workload in (TO_FRESH, TO_NEW):
    case(_workload, by=CPU, requires="torch", at_most=2)(_cpu)
    case(_workload, by=CPU_IN_THREAD, requires="torch", at_most=2, warm=False)(_cpu_in_thread)


@case(TO_PINNED, by=THREAD, requires="torch")
async def to_pinned(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await bulk(lambda: it.in_thread(it.pinned, it.device), machine.bulk_nbytes)


@case(FROM_PINNED, by=THREAD, requires="torch")
async def from_pinned(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await bulk(lambda: it.in_thread(it.device, it.pinned), machine.bulk_nbytes)


@case(BLOCKS_TO_HOST, by="torch index_select, then one copy_ to pinned", requires="torch")
async def blocks_to_host(machine: Machine) -> list[Figure]:
    it, torch = _torch(machine), _torch(machine).torch
    device, host = machine.blocks
    count, nbytes = machine.batch_entries, machine.batch_entry_nbytes
    source = torch.as_tensor(device.base, device="cuda")
    rows = torch.from_numpy(device.offsets // nbytes).cuda()
    target = torch.from_numpy(np.asarray(host.base))
    torch.cuda.synchronize()

    async def gather() -> None:
        with torch.cuda.stream(it.stream):
            packed = source.index_select(0, rows)
        await it.in_thread(target, packed)

    return await bulk(gather, count * nbytes, machine.batch_rounds)


@case(ALONE, by=ITEM, requires="torch")
async def item(machine: Machine) -> list[Figure]:
    it = _torch(machine)

    async def block() -> None:
        it.small.item()

    with it.torch.cuda.stream(it.stream):
        return await alone(machine, block)


@case(ALONE, by=f"{OWN}, of a torch tensor", requires="torch")
async def own_await_of_a_tensor(machine: Machine) -> list[Figure]:
    it, target = _torch(machine), machine.small_pinned
    return await alone(machine, lambda: copy_to_host(it.small, target, stream=it.stream))


@case(ALONE, by=THREAD, requires="torch")
async def await_in_thread(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return [Figure(AWAIT, await awaits(lambda: it.in_thread(it.small_pinned, it.small), machine.awaits // 2), "µs")]


@case(ALONE, by=POLL, requires="torch")
async def await_polling(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await alone(machine, lambda: it.poll(it.small_pinned, it.small))


@case(CROWD, by=POLL, requires="torch")
async def many_polling(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return [Figure(EACH, await crowds(lambda _: it.poll(it.small_pinned, it.small), machine.crowd), "µs")]


@case(CROWD, by=THREAD, requires="torch")
async def many_in_threads(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return [Figure(EACH, await crowds(lambda _: it.in_thread(it.small_pinned, it.small), machine.crowd), "µs")]


@case(AFTER_KERNEL, by=THREAD, requires="torch")
async def thread_after_kernel(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await after_kernel(machine, lambda: it.in_thread(it.small_pinned, it.small))


@case(AFTER_KERNEL, by=POLL, requires="torch")
async def poll_after_kernel(machine: Machine) -> list[Figure]:
    it = _torch(machine)
    return await after_kernel(machine, lambda: it.poll(it.small_pinned, it.small))


async def _data_loader(machine: Machine, workers: int) -> list[Figure]:
    it, torch = _torch(machine), _torch(machine).torch
    from torch.utils.data import DataLoader

    batches = [torch.from_numpy(batch) for batch in host_batches(machine)]

    async def block() -> None:
        with torch.cuda.stream(it.stream):
            # Held until the next one has been enqueued, as a training loop does.
            for batch in DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=True):
                held = batch.to("cuda", non_blocking=True)
                machine.spin(COMPUTE_SECONDS)
        del held
        it.stream.synchronize()

    return await per_batch(machine, block)


@case(LOADER, by="torch DataLoader, pinning, 4 workers, which blocks the loop", requires="torch", at_most=2)
async def data_loader_with_workers(machine: Machine) -> list[Figure]:
    return await _data_loader(machine, 4)


@case(LOADER, by="torch DataLoader, pinning, no workers, which blocks the loop", requires="torch", at_most=2)
async def data_loader(machine: Machine) -> list[Figure]:
    return await _data_loader(machine, 0)


async def small_by_query(machine: Machine, seconds: float) -> tuple[NDArray[np.float64], str]:
    """torch's small copies by a thread that asks until they are done, and then sleeps for 0.2 ms."""
    it = _torch(machine)

    def measure() -> tuple[NDArray[np.float64], str]:
        times: list[float] = []
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            event = it.start(it.small_pinned, it.small, it.side)
            while not event.query():
                if time.perf_counter() - begin > GIVE_UP_SECONDS:
                    return late(times)
                # Lets the loop's thread have the GIL, for the bulk copies to go on.
                time.sleep(0)
            times.append((time.perf_counter() - begin) * 1e6)
            time.sleep(0.0002)
        return np.array(times), ""

    return await asyncio.to_thread(measure)


async def small_by_thread(machine: Machine, seconds: float) -> tuple[NDArray[np.float64], str]:
    """torch's small copies, each awaited through a thread."""
    it = _torch(machine)
    return await until_stuck(lambda: it.in_thread(it.small_pinned, it.small, it.side), seconds)


@case(BESIDE_STAGED, by=QUERY, requires="torch", warm=False, at_most=2)
async def beside_staged(machine: Machine) -> list[Figure]:
    return await beside_own_copies(machine, machine.pageable, small_by_query)


@case(BESIDE_PINNED, by=QUERY, requires="torch", warm=False, at_most=2)
async def beside_pinned(machine: Machine) -> list[Figure]:
    return await beside_own_copies(machine, machine.pinned, small_by_query)


@case(BESIDE_CHIP, by=THREAD, requires="torch", warm=False, at_most=3)
async def thread_beside_chip(machine: Machine) -> list[Figure]:
    return await beside_full_chip(machine, small_by_thread)


@case(BESIDE_CHIP, by=QUERY, requires="torch", warm=False, at_most=3)
async def query_beside_chip(machine: Machine) -> list[Figure]:
    return await beside_full_chip(machine, small_by_query)


@asynccontextmanager
async def _torch_copies(machine: Machine) -> AsyncIterator[Traffic]:
    """Copies of 256 MiB to page-locked memory, three of them queued at all times."""
    it, traffic = _torch(machine), Traffic()
    nbytes = machine.bulk_nbytes // 4
    source, target, stream = it.device[:nbytes], it.pinned[:nbytes], it.torch.cuda.Stream()
    going = threading.Event()

    def copy_back_to_back() -> None:
        queue = [it.start(target, source, stream) for _ in range(3)]
        going.set()
        while not traffic.stop:
            queue.append(it.start(target, source, stream))
            queue.pop(0).synchronize()
            traffic.copied(nbytes)
        stream.synchronize()

    task = asyncio.create_task(asyncio.to_thread(copy_back_to_back))
    try:
        await asyncio.to_thread(going.wait)
        yield traffic
    finally:
        traffic.stop = True
        await task


async def _beside_torch(machine: Machine, small: Any) -> list[Figure]:
    async with _torch_copies(machine) as traffic:
        times, note = await small(machine, machine.beside_seconds)
    return [Figure(AWAIT, times, "µs", note), Figure(BESIDE_RATE, traffic.rate / 1e9, "GB/s")]


@case(BESIDE_TORCH, requires="torch", warm=False, at_most=2)
async def own_beside_torch(machine: Machine) -> list[Figure]:
    return await _beside_torch(machine, own_await)


@case(BESIDE_TORCH, by=QUERY, requires="torch", warm=False, at_most=1)
async def torch_beside_torch(machine: Machine) -> list[Figure]:
    return await _beside_torch(machine, small_by_query)


case(BESIDE_TORCH, by=LINK, requires="torch")(link_to_host)
