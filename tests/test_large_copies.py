"""Sizes that do not fit 32 bits (inducer/pycuda#282), and ranges that span registrations."""

from __future__ import annotations

import mmap
import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kinds import bytes_at, one_loop, pattern, put

from aiocuda_copy import Copier, copy_batch, copy_to_device, copy_to_host, pinned
from aiocuda_copy.testing import DeviceArray

HUGE = 2**32 + 1
# Around the places where a number of 31 or 32 bits ends, and the very last byte.
PLANTED = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32]


@pytest.fixture
def sparse() -> Iterator[np.ndarray]:
    """Host memory that takes up what is written to it."""
    memory = mmap.mmap(-1, HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    yield np.frombuffer(memory, np.uint8)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@one_loop
@pytest.mark.emulated_only
async def test_four_gibibytes_and_a_byte_to_the_device(emulated_gpu: Any, sparse: np.ndarray) -> None:
    for k, at in enumerate(PLANTED):
        sparse[at] = k + 1
    device = DeviceArray(HUGE)
    before, begin = resident(), time.monotonic()
    async with Copier() as copier:
        await copier.copy_to_device(sparse, device)
        assert copier.stats().nbytes_staged == HUGE
    assert [int(bytes_at(device.ptr + at, 1)[0]) for at in PLANTED] == [1, 2, 3, 4, 5, 6]
    assert resident() - before < 512 << 20
    assert time.monotonic() - begin < 60
    device.free()


@one_loop
@pytest.mark.emulated_only
async def test_four_gibibytes_and_a_byte_to_the_host(emulated_gpu: Any, sparse: np.ndarray) -> None:
    device = DeviceArray(HUGE)
    for k, at in enumerate(PLANTED):
        put(device.ptr + at, np.array([k + 1], np.uint8))
    destination = sparse
    await copy_to_host(device, destination)
    assert [int(destination[at]) for at in PLANTED] == [1, 2, 3, 4, 5, 6]
    device.free()
