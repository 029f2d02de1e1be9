"""What all cases measure on: one device, one stream, and arrays that are made once."""

from __future__ import annotations

import asyncio
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ... import Blocks, pinned_empty
from ...testing import DeviceArray, use_emulated_driver
from .. import _raw
from .._heartbeat import Heartbeat

__all__ = ["Machine"]

_KIB, _MIB = 1 << 10, 1 << 20


class Machine:
    """The device under measurement. On the emulated driver everything is smaller, so that a run takes seconds."""

    def __init__(self, *, emulated: bool) -> None:
        self.emulated = emulated
        self.stream = _raw.Stream()
        self.bulk_nbytes = 32 * _MIB if emulated else 1024 * _MIB
        self.batch_entries = 200 if emulated else 10_000
        self.batch_entry_nbytes = 16 * _KIB
        self.awaits = 200 if emulated else 3_000
        self.crowd = 100 if emulated else 1_000
        self.kernel_seconds = 0.1 if emulated else 1.0
        self._spin = None if emulated else _raw.load_spin()

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
    def blocks(self) -> tuple[Blocks, Blocks]:
        """Blocks scattered over twice their size on the device, and side by side in page-locked memory."""
        count, nbytes = self.batch_entries, self.batch_entry_nbytes
        scattered = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.int64) * nbytes
        device = DeviceArray((2 * count * nbytes,), np.uint8)
        host = pinned_empty((count * nbytes,), np.uint8)
        return Blocks(device, scattered), Blocks(host, np.arange(count, dtype=np.int64) * nbytes)

    async def link(self, *, to_host: bool) -> float:
        """The rate, in bytes a second, of a bare copy of page-locked memory."""
        host, device = self.pinned.ctypes.data, self.device.ptr
        return await asyncio.to_thread(
            _raw.copy_at_link_speed, self.stream, host, device, self.bulk_nbytes, to_host=to_host
        )

    async def idle_gap(self, seconds: float = 0.2) -> float:
        """The longest gap of a loop that has nothing to do."""
        async with Heartbeat() as beat:
            await asyncio.sleep(seconds)
        return beat.longest

    def spin(self) -> None:
        """Keeps the stream busy for ``kernel_seconds``."""
        if self.emulated:
            use_emulated_driver().kernel(self.stream, self.kernel_seconds * 1e3)
        else:
            self.stream.spin(self._spin, self.kernel_seconds)
