"""Sizes and offsets that do not fit 32 bits (inducer/pycuda#282), in memory that is mostly never touched."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kinds import bytes_at, one_loop, pattern, put

from aiocuda_copy import Blocks, Copier, copy_batch, copy_to_device, copy_to_host, pinned
from aiocuda_copy.testing import DeviceArray

pytestmark = one_loop

HUGE = 2**32 + 1
# Around the places where a number of 31 or 32 bits ends, and the very last byte.
PLANTED = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
MAP_NORESERVE = 0x4000
STEP = 2**30
ROW = 70_000


@pytest.fixture
def sparse() -> np.ndarray:
    """Host memory that takes up what is written to it."""
    memory = mmap.mmap(-1, 5 * STEP, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return np.frombuffer(memory, np.uint8)


@pytest.fixture
def device(emulated_gpu: Any) -> Iterator[DeviceArray]:
    with DeviceArray(5 * STEP) as device:
        yield device


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


async def there_and_back(device: DeviceArray, host: np.ndarray) -> None:
    for k, at in enumerate(PLANTED):
        host[at] = k + 1
    async with Copier() as copier:
        await copier.copy_to_device(host, device[:HUGE])
        assert [int(bytes_at(device.ptr + at, 1)[0]) for at in PLANTED] == [1, 2, 3, 4, 5, 6]
        for k, at in enumerate(PLANTED):
            put(device.ptr + at, np.array([k + 10], np.uint8))
        await copier.copy_to_host(device[:HUGE], host)
        assert [int(host[at]) for at in PLANTED] == [10, 11, 12, 13, 14, 15]
        stats = copier.stats()
        assert stats.nbytes_direct + stats.nbytes_staged == 2 * HUGE


async def test_four_gibibytes_and_a_byte(device: DeviceArray, sparse: np.ndarray) -> None:
    before = resident()
    with pinned(sparse[:HUGE]) as host:
        await there_and_back(device, host)
    assert resident() - before < 256 << 20


@pytest.mark.stress
async def test_four_gibibytes_and_a_byte_staged(device: DeviceArray, sparse: np.ndarray) -> None:
    # Slots are not sparse, so this takes 8 GiB.
    await there_and_back(device, sparse[:HUGE])


@pytest.mark.real_gpu
async def test_four_gibibytes_and_a_byte_on_a_gpu() -> None:
    with DeviceArray(HUGE) as device:
        await there_and_back(device, np.zeros(HUGE, np.uint8))


async def test_four_gibibytes_between_devices(device: DeviceArray) -> None:
    with DeviceArray(HUGE) as other:
        for k, at in enumerate(PLANTED):
            put(device.ptr + at, np.array([k + 1], np.uint8))
        await copy_to_device(device[:HUGE], other)
        assert [int(bytes_at(other.ptr + at, 1)[0]) for at in PLANTED] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("page_locked", [False, True], ids=["pageable", "pinned"])
async def test_rows_far_apart(device: DeviceArray, sparse: np.ndarray, page_locked: bool) -> None:
    data = pattern(5 * ROW).reshape(5, ROW)
    before = resident()
    host = sparse.reshape(5, STEP)[:, -ROW:]
    flat = np.zeros((5, ROW), np.uint8)
    await copy_to_device(data, device[4 * STEP :][: 5 * ROW])
    with pinned(sparse if page_locked else flat):
        host[:] = data
        far = DeviceArray((5, ROW))
        await copy_to_device(host, far)
        assert np.array_equal(far.to_numpy(), data)
        host[:] = 0
        await copy_to_host(device[4 * STEP :][: 5 * ROW], host)
        assert np.array_equal(host, data)
    assert resident() - before < 64 << 20


@pytest.mark.parametrize("page_locked", [False, True], ids=["pageable", "pinned"])
async def test_far_rows_on_the_device(emulated_gpu: Any, page_locked: bool) -> None:
    data = pattern(5 * ROW).reshape(5, ROW)
    with DeviceArray((5, STEP)) as device:
        flat = data.copy()
        with pinned(flat if page_locked else np.empty(1)):
            await copy_to_device(flat, device[:, -ROW:])
            for k in range(5):
                assert np.array_equal(bytes_at(device.ptr + (k + 1) * STEP - ROW, ROW), data[k])
            flat.fill(0)
            await copy_to_host(device[:, -ROW:], flat)
            assert np.array_equal(flat, data)


async def test_blocks_far_apart(device: DeviceArray, sparse: np.ndarray) -> None:
    offsets = np.arange(5) * STEP + np.arange(5)
    for k, offset in enumerate(offsets):
        put(device.ptr + int(offset), pattern(1000, k))
    await copy_batch(0, Blocks(device, offsets), Blocks(sparse, offsets[::-1]), sizes=1000)
    for k, offset in enumerate(offsets[::-1]):
        assert np.array_equal(sparse[offset : offset + 1000], pattern(1000, k))
    found = await copy_to_host(device[int(offsets[4]) :][:1000])
    assert np.array_equal(found, pattern(1000, 4))
