"""Batches: of numbers and of objects, of entries of one size, of any, and of rectangles.

What a workload copies is compared, every byte of it, the first time that the workload is run, and then measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import Blocks, copy_batch, pinned_empty
from ...testing import DeviceArray
from ._bulk import link_to_device, link_to_host
from ._machine import Machine
from ._measure import GAP, bulk
from ._registry import LINK, OWN, Figure, case

__all__ = [
    "ADDRESSES",
    "ADDRESSES_TO_HOST",
    "ADDRESSES_TO_PAGEABLE",
    "ANY_SIZES_TO_HOST",
    "ARRAYS_TO_DEVICE",
    "ARRAYS_TO_HOST",
    "BLOCKS_TO_DEVICE",
    "BLOCKS_TO_HOST",
    "BUFFERS_TO_HOST",
    "CROPS_TO_HOST",
    "LARGE_ON_DEVICE",
    "SMALL_ON_DEVICE",
    "SMALL_TO_DEVICE",
    "SMALL_TO_HOST",
    "TIME",
]

BLOCKS_TO_HOST = "batch to host, 16 KiB blocks of one array"
BLOCKS_TO_DEVICE = "batch to device, 16 KiB blocks of one array"
ARRAYS_TO_HOST = "batch to host, arrays of 16 KiB"
ARRAYS_TO_DEVICE = "batch to device, arrays of 16 KiB"
BUFFERS_TO_HOST = "batch to host, Buffers of 16 KiB"
ADDRESSES_TO_HOST = "batch to host, 16 KiB at addresses"
ADDRESSES_TO_PAGEABLE = "batch to host, 16 KiB at pageable addresses"
SMALL_TO_HOST = "batch to host, 4 KiB blocks of one array"
SMALL_TO_DEVICE = "batch to device, 4 KiB blocks of one array"
SMALL_ON_DEVICE = "batch on the device, many of 4 KiB at addresses"
LARGE_ON_DEVICE = "batch on the device, 64 KiB at addresses"
ANY_SIZES_TO_HOST = "batch to host, sizes at random up to 256 KiB"
CROPS_TO_HOST = "batch to host, rectangles out of frames"

ADDRESSES = f"{OWN}, addresses"
TIME = "time"

Bytes = NDArray[np.uint8]
_KIB = 1 << 10


@dataclass
class Work:
    """A batch, and how to see whether it has been copied."""

    srcs: Any
    dsts: Any
    sizes: Any
    nbytes: int
    arrived: Callable[[], bool]
    # The same in the other form of the workload, where it has one.
    addresses: tuple[Any, Any, Any] | None = None
    compared: bool = False


Make = Callable[[Machine], Work]


def _content(nbytes: int) -> Bytes:
    """Bytes of which no two blocks are alike."""
    words = np.arange(nbytes // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)[:nbytes]


class _Sides:
    """Entries of one size that lie scattered over twice their size on the device, and side by side elsewhere."""

    def __init__(self, count: int, nbytes: int, to: str, host: Callable[[int], Bytes]) -> None:
        self.count, self.nbytes, self.to = count, nbytes, to
        self.order = np.random.default_rng(1).permutation(2 * count)[:count]
        self.packed: Any
        total = count * nbytes
        if to == "device":
            self.scattered = DeviceArray(2 * total, np.uint8)
            self.packed = host(total)
            self.content = _content(total)
            self.packed[:] = self.content
        else:
            self.content = _content(2 * total)
            self.scattered = DeviceArray.from_numpy(self.content)
            self.packed = host(total) if to == "host" else DeviceArray(total, np.uint8)

    def arrived(self) -> bool:
        found = self.packed if isinstance(self.packed, np.ndarray) else self.packed.to_numpy()
        scattered = self.scattered.to_numpy() if self.to == "device" else self.content
        return np.array_equal(self._rows(scattered)[self.order], self._rows(found))

    def _rows(self, array: Bytes) -> Bytes:
        return array.reshape(-1, self.nbytes)

    def work(self, device: Any, other: Any, sizes: int | None) -> Work:
        srcs, dsts = (other, device) if self.to == "device" else (device, other)
        return Work(srcs, dsts, sizes, self.count * self.nbytes, self.arrived)

    def blocks(self) -> Work:
        packed = Blocks(self.packed, np.arange(self.count) * self.nbytes)
        return self.work(Blocks(self.scattered, self.order * self.nbytes), packed, self.nbytes)

    def addresses(self) -> Work:
        base = self.packed.ctypes.data if isinstance(self.packed, np.ndarray) else self.packed.ptr
        packed = np.uint64(base) + np.arange(self.count, dtype=np.uint64) * np.uint64(self.nbytes)
        scattered = np.uint64(self.scattered.ptr) + self.order.astype(np.uint64) * np.uint64(self.nbytes)
        return self.work(scattered, packed, self.nbytes)

    def arrays(self) -> Work:
        at, nbytes = self.scattered, self.nbytes
        scattered = [at[int(k) * nbytes : (int(k) + 1) * nbytes] for k in self.order]
        return self.work(scattered, list(self._rows(self.packed)), None)

    def buffers(self) -> Work:
        from cuda.core import Buffer

        base, owner = self.scattered.ptr, self.scattered
        buffers = [Buffer.from_handle(base + int(k) * self.nbytes, self.nbytes, owner=owner) for k in self.order]
        work = self.work(buffers, list(self._rows(self.packed)), None)
        numbers = self.addresses()
        work.addresses = (numbers.srcs, numbers.dsts, numbers.sizes)
        return work


def _pinned(nbytes: int) -> Bytes:
    return np.asarray(pinned_empty(nbytes, np.uint8))


def _pageable(nbytes: int) -> Bytes:
    return np.ones(nbytes, np.uint8)


def _sides(machine: Machine, kib: int, to: str, times: int = 1, host: Callable[[int], Bytes] = _pinned) -> _Sides:
    return _Sides(machine.batch_entries * times, kib * _KIB, to, host)


def _any_sizes(machine: Machine) -> Work:
    """At any address, on both sides."""
    count = machine.batch_entries // 2
    chance = np.random.default_rng(2)
    sizes = chance.integers(1, 256 * _KIB + 1, count)
    total = int(sizes.sum()) + count
    content = _content(total)
    device, host = DeviceArray.from_numpy(content), _pinned(total)
    host[:] = 0
    begin = np.concatenate([[0], np.cumsum(sizes + 1)[:-1]])
    order = chance.permutation(count)
    expected = content.copy()
    expected[begin[1:] - 1] = expected[-1] = 0

    srcs, dsts = Blocks(device, begin[order]), Blocks(host, begin[order])
    return Work(srcs, dsts, sizes[order], int(sizes.sum()), lambda: np.array_equal(host, expected))


def _crops(machine: Machine) -> Work:
    count, side = (256, 224) if not machine.emulated else (16, 56)
    height, width, frames = (1080, 1920, 32) if not machine.emulated else (108, 192, 4)
    chance = np.random.default_rng(3)
    content = _content(frames * height * width * 3).reshape(frames, height, width, 3)
    device = DeviceArray.from_numpy(content)
    host = _pinned(count * side * side * 3).reshape(count, side, side, 3)
    places = [
        (int(chance.integers(frames)), int(chance.integers(height - side + 1)), int(chance.integers(width - side + 1)))
        for _ in range(count)
    ]
    crops = [device[f, y : y + side, x : x + side] for f, y, x in places]

    def arrived() -> bool:
        cut = [content[f, y : y + side, x : x + side] for f, y, x in places]
        return all(np.array_equal(*pair) for pair in zip(host, cut, strict=True))

    return Work(crops, list(host), None, host.nbytes, arrived)


async def _ready(machine: Machine, workload: str, make: Make) -> Work:
    """What a workload copies, made and copied for comparison at its first run, and kept until the next workload."""
    name, work = machine.batch
    if name != workload:
        machine.batch = ("", None)  # before the next one takes its memory
        work = make(machine)
        machine.batch = (workload, work)
    assert isinstance(work, Work)
    if not work.compared:
        await copy_batch(machine.stream, work.srcs, work.dsts, sizes=work.sizes)
        if not work.arrived():
            raise AssertionError("what has arrived is not what was sent")
        work.compared = True
    return work


async def _measured(machine: Machine, srcs: Any, dsts: Any, sizes: Any, nbytes: int) -> list[Figure]:
    times = []

    async def once() -> None:
        begin = time.perf_counter()
        await copy_batch(machine.stream, srcs, dsts, sizes=sizes)
        times.append((time.perf_counter() - begin) * 1e3)

    figures = await bulk(once, nbytes, machine.batch_rounds)
    return [*figures, Figure(TIME, np.array(times), "ms")]


def _workload(name: str, make: Make, link: Callable[[Machine], Any]) -> None:
    async def run(machine: Machine) -> list[Figure]:
        work = await _ready(machine, name, make)
        return await _measured(machine, work.srcs, work.dsts, work.sizes, work.nbytes)

    case(name)(run)
    case(name, by=LINK)(link)


async def idle(machine: Machine) -> list[Figure]:
    """Beside copies that cross no link: the gap of an idle loop."""
    return [Figure(GAP, await machine.idle_gap() * 1e3, "ms")]


_workload(BLOCKS_TO_HOST, lambda m: _sides(m, 16, "host").blocks(), link_to_host)
_workload(BLOCKS_TO_DEVICE, lambda m: _sides(m, 16, "device").blocks(), link_to_device)
_workload(ARRAYS_TO_HOST, lambda m: _sides(m, 16, "host").arrays(), link_to_host)
_workload(ARRAYS_TO_DEVICE, lambda m: _sides(m, 16, "device").arrays(), link_to_device)
_workload(BUFFERS_TO_HOST, lambda m: _sides(m, 16, "host").buffers(), link_to_host)
_workload(ADDRESSES_TO_HOST, lambda m: _sides(m, 16, "host").addresses(), link_to_host)
_workload(ADDRESSES_TO_PAGEABLE, lambda m: _sides(m, 16, "host", host=_pageable).addresses(), link_to_host)
_workload(SMALL_TO_HOST, lambda m: _sides(m, 4, "host").blocks(), link_to_host)
_workload(SMALL_TO_DEVICE, lambda m: _sides(m, 4, "device").blocks(), link_to_device)
_workload(SMALL_ON_DEVICE, lambda m: _sides(m, 4, "other", times=20).addresses(), idle)
_workload(LARGE_ON_DEVICE, lambda m: _sides(m, 64, "other").addresses(), idle)
_workload(ANY_SIZES_TO_HOST, _any_sizes, link_to_host)
_workload(CROPS_TO_HOST, _crops, link_to_host)


@case(BUFFERS_TO_HOST, by=ADDRESSES)
async def buffers_as_addresses(machine: Machine) -> list[Figure]:
    """What the same copies cost without their objects."""
    work = await _ready(machine, BUFFERS_TO_HOST, lambda m: _sides(m, 16, "host").buffers())
    assert work.addresses is not None
    return await _measured(machine, *work.addresses, work.nbytes)
