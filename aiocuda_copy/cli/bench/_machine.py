"""What all cases measure on: one device, one stream, and arrays that are made once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import Blocks, pinned_empty
from ...testing import DeviceArray, use_emulated_driver
from .. import _raw
from .._heartbeat import Heartbeat

__all__ = ["Machine"]

_KIB, _MIB = 1 << 10, 1 << 20


class Machine:
    """The device under measurement.

    On the emulated driver everything is smaller, so that a run takes seconds; a quick run measures for a shorter time.
    """

    def __init__(self, *, emulated: bool, quick: bool = False) -> None:
        def by_size(real: int, emulated_: int) -> int:
            return emulated_ if emulated else real

        self.emulated = emulated
        self.devices = _raw.device_count()
        self.stream = _raw.Stream()
        # For what goes on beside the measured copies.
        self.other_stream = _raw.Stream()
        self.bulk_nbytes = by_size(1024, 8 if quick else 32) * _MIB
        self.medium_nbytes = self.bulk_nbytes // 16
        self.long_nbytes = 16 * self.bulk_nbytes
        self.batch_entries = by_size(10_000, 200)
        self.batch_entry_nbytes = 16 * _KIB
        # In a row: a device that has rested for milliseconds is slow at first.
        self.batch_rounds = by_size(10, 2)
        self.loader_batches = by_size(64 if quick else 256, 8)
        self.loader_batch_nbytes = by_size(32, 1) * _MIB
        self.awaits = by_size(200 if quick else 1_000, 50)
        self.crowd = by_size(1_000, 100)
        self.kernel_seconds = by_size(1_000, 100) / 1e3
        self.long_kernel_seconds = by_size(1_500 if quick else 3_000, 300) / 1e3
        self.decode_steps = by_size(300 if quick else 900, 5)
        self.checkpoint_nbytes = by_size(1024 if quick else 8192, 8 if quick else 32) * _MIB
        self.short_kernels = by_size(30 if quick else 100, 5)
        self.beside_seconds = by_size(250 if quick else 700, 100) / 1e3
        # No further repetition of a workload begins after that.
        self.workload_seconds = 1.0 if quick or emulated else 6.0
        self._kernels = None if emulated else _raw.Kernels()
        self.clock = _raw.DeviceClock(self._kernels, _raw.Stream()) if self._kernels else None
        self.stream.make_current()
        # What the batch workload that is being measured copies, by the workload's name.
        self.batch: tuple[str, Any] = ("", None)
        # What a peer's cases share, by the peer's name.
        self.of_peer: dict[str, Any] = {}

    @cached_property
    def device(self) -> DeviceArray:
        """Device memory of the size of a bulk copy."""
        return DeviceArray((self.bulk_nbytes,), np.uint8)

    @cached_property
    def pinned(self) -> NDArray[np.uint8]:
        """Page-locked memory of that size."""
        return np.asarray(pinned_empty((self.bulk_nbytes,), np.uint8))

    @cached_property
    def pageable(self) -> NDArray[np.uint8]:
        """Ordinary memory of that size, all of it touched."""
        array = np.empty(self.bulk_nbytes, np.uint8)
        array.fill(1)
        return array

    @cached_property
    def second_stream(self) -> _raw.Stream:
        """A stream of another device."""
        stream = _raw.Stream(1)
        self.stream.make_current()
        return stream

    @cached_property
    def second_device(self) -> DeviceArray:
        """Memory of another device."""
        return DeviceArray((self.bulk_nbytes,), np.uint8, device=1)

    @cached_property
    def second_pageable(self) -> NDArray[np.uint8]:
        """Ordinary memory for what comes from the other device."""
        return np.ones(self.bulk_nbytes, np.uint8)

    @cached_property
    def small(self) -> Any:
        """Four bytes on the device, as a ``cuda.core.Buffer``."""
        from cuda.core import Buffer

        array = DeviceArray((4,), np.uint8)
        return Buffer.from_handle(array.ptr, 4, owner=array)

    @cached_property
    def small_pinned(self) -> NDArray[np.uint8]:
        """Four bytes of page-locked memory."""
        return np.asarray(pinned_empty((4,), np.uint8))

    @cached_property
    def blocks(self) -> tuple[Blocks, Blocks]:
        """Blocks scattered over twice their size on the device, and side by side in page-locked memory."""
        count, nbytes = self.batch_entries, self.batch_entry_nbytes
        scattered = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.int64) * nbytes
        device = DeviceArray((2 * count, nbytes), np.uint8)
        host = pinned_empty((count, nbytes), np.uint8)
        return Blocks(device, scattered), Blocks(host, np.arange(count, dtype=np.int64) * nbytes)

    @cached_property
    def block_arrays(self) -> tuple[list[DeviceArray], list[NDArray[np.uint8]]]:
        """The same blocks, each an array of its own."""
        device, host = self.blocks
        return [device.base[int(offset) // self.batch_entry_nbytes] for offset in device.offsets], list(host.base)

    async def link(self, *, to_host: bool) -> float:
        """The rate, in bytes a second, of a bare copy of page-locked memory."""
        host, device = self.pinned.ctypes.data, self.device.ptr
        return await asyncio.to_thread(
            _raw.copy_at_link_speed, self.stream, host, device, self.bulk_nbytes, to_host=to_host
        )

    async def idle_gap(self, seconds: float = 0.1) -> float:
        """The longest gap of a loop that has nothing to do."""
        async with Heartbeat() as beat:
            await asyncio.sleep(seconds)
        return beat.longest

    def spin(self, seconds: float) -> None:
        """Keeps the stream busy for a time."""
        if self._kernels is None:
            use_emulated_driver().kernel(self.stream, seconds * 1e3)
        else:
            self.stream.launch(self._kernels.spin, int(seconds * 1e9))

    def fill_with_short_blocks(self, seconds: float) -> None:
        """Has the other stream fill all multiprocessors with blocks of 100 µs for a time."""
        if self._kernels is None:
            use_emulated_driver().kernel(self.other_stream, seconds * 1e3)
            return
        at_a_time = _raw.attribute("MULTIPROCESSOR_COUNT", 0) * (
            _raw.attribute("MAX_THREADS_PER_MULTIPROCESSOR", 0) // 256
        )
        self.other_stream.launch(self._kernels.spin, 100_000, blocks=at_a_time * int(seconds / 100e-6), threads=256)

    def decode(self) -> float:
        """Has the other stream read the bulk array again and again, as decoding reads weights. Blocks.

        The work is the same each time, so that its seconds, which are returned, tell what slows it down.
        """
        stream = self.other_stream
        stream.make_current()
        begin = time.perf_counter()
        for _ in range(self.decode_steps):
            if self._kernels is None:
                use_emulated_driver().kernel(stream, 1.0)
            else:
                blocks = 4 * _raw.attribute("MULTIPROCESSOR_COUNT", 0)
                words = self.bulk_nbytes // 16
                stream.launch(self._kernels.read, self.device.ptr, words, blocks=blocks, threads=512)
        stream.synchronize()
        return time.perf_counter() - begin

    @contextmanager
    def no_time_passes(self) -> Iterator[None]:
        """On the emulated driver, operations take no time, so that only the library's own work is measured."""
        if not self.emulated:
            yield
            return
        emulator = use_emulated_driver()
        emulator.virtual_clock()
        try:
            yield
        finally:
            emulator.virtual_clock(False)

    @staticmethod
    def engine_seconds() -> float | None:
        """Processor time that the engines' threads have used; ``None`` where there are none."""
        found = [task for task in Path("/proc/self/task").iterdir() if _read(task / "comm").strip() == "aiocuda-engine"]
        return sum(map(_processor_seconds, found)) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended meanwhile, or the kernel has no such file
        return ""


def _processor_seconds(task: Path) -> float:
    nanoseconds = (_read(task / "schedstat").split() or ["0"])[0]
    if nanoseconds != "0":
        return int(nanoseconds) / 1e9
    # Behind the name, which may hold anything: user and system time, in ticks of 10 ms.
    fields = _read(task / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
