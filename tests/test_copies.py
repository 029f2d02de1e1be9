"""Data comes over right: every kind of memory on both sides, every size class, both directions."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest
from calls import nothing_held
from kinds import DEVICE_KINDS, HOST_KINDS, bytes_at, context_of, one_loop, pattern, put

import aiocuda_copy._copies as copies
from aiocuda_copy import Copier, copy_to_device, copy_to_host
from aiocuda_copy._pinned import default_pool
from aiocuda_copy.testing import DeviceArray

SLOT = 4 << 20
# Where a path ends and the next one begins: nothing, inline, small slots, one slot, several with an odd end.
SIZES = [0, 1, 31, 4096, (32 << 10) - 1, 32 << 10, (32 << 10) + 1, SLOT - 1, SLOT, SLOT + 1]
GUARD = 64


@one_loop
@pytest.mark.parametrize("device_kind", DEVICE_KINDS)
@pytest.mark.parametrize("host_kind", HOST_KINDS)
async def test_every_kind_there_and_back(host_kind: str, device_kind: str) -> None:
    for nbytes in (1, 4099, 100_003):
        data = pattern(nbytes)
        with HOST_KINDS[host_kind](nbytes) as (host, view), DEVICE_KINDS[device_kind](nbytes) as (device, address):
            view[:] = data
            assert await copy_to_device(host, device) is device
            assert np.array_equal(bytes_at(address, nbytes), data)
            view.fill(0)
            assert await copy_to_host(device, host) is host
            assert np.array_equal(view, data)
            # A busy machine may take long for the slower of a small copy's roads, and what follows frees the source.
            await nothing_held()
            # On a real GPU pytest's own report of a failure would keep the export.
            del host, view


async def test_every_path_there_and_back_on_every_loop() -> None:
    for nbytes in SIZES[:-2]:
        for kind in ("numpy", "pinned_empty"):
            with HOST_KINDS[kind](nbytes) as (host, view):
                view[:] = pattern(nbytes)
                device = DeviceArray(nbytes)
                await copy_to_device(host, device)
                view.fill(0)
                await copy_to_host(device, host)
                assert np.array_equal(view, pattern(nbytes))


@one_loop
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("host_kind", ["numpy", "bytearray", "pinned_empty", "pinned", "managed"])
async def test_every_size_and_nothing_beside_it(host_kind: str, nbytes: int) -> None:
    with HOST_KINDS[host_kind](nbytes + 2 * GUARD) as (host, view):
        inner = memoryview(host)[GUARD : GUARD + nbytes]
        device = DeviceArray.from_numpy(np.full(nbytes + 2 * GUARD, 0xA5, np.uint8))
        data = pattern(nbytes)
        view[GUARD : GUARD + nbytes] = data
        await copy_to_device(inner, device[GUARD : GUARD + nbytes])
        there = device.to_numpy()
        assert np.array_equal(there[GUARD : GUARD + nbytes], data)
        assert (there[:GUARD] == 0xA5).all()
        assert (there[GUARD + nbytes :] == 0xA5).all()

        view.fill(0x5A)
        await copy_to_host(device[GUARD : GUARD + nbytes], inner)
        assert np.array_equal(view[GUARD : GUARD + nbytes], data)
        assert (view[:GUARD] == 0x5A).all()
        assert (view[GUARD + nbytes :] == 0x5A).all()
        inner.release()
        del host, view


@one_loop
@pytest.mark.parametrize("nbytes", [3 * SLOT + 12_345, 64 << 20])
@pytest.mark.parametrize("host_kind", ["numpy", "pinned_empty"])
async def test_several_slots(host_kind: str, nbytes: int) -> None:
    data = pattern(nbytes)
    device = DeviceArray(nbytes)
    with HOST_KINDS[host_kind](nbytes) as (host, view):
        view[:] = data
        await copy_to_device(host, device)
        view.fill(0)
        await copy_to_host(device, host)
        assert np.array_equal(view, data)


DTYPES = [
    "?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", ">f8", "S5", "U3", "V7",
    "datetime64[ns]", "timedelta64[s]", "f4,i2", [("a", "i1"), ("b", "f8", (2, 2))],
]  # fmt: skip


@one_loop
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_dtypes(dtype: Any) -> None:
    kind = np.dtype(dtype)
    data = pattern(12 * kind.itemsize).view(kind).reshape(3, 4)
    device = DeviceArray.from_numpy(data)
    found = await copy_to_host(device)
    assert (found.dtype, found.shape) == (kind, data.shape)
    assert found.tobytes() == data.tobytes()
    destination = np.zeros_like(data)
    await copy_to_host(device, destination)
    assert destination.tobytes() == data.tobytes()
    back = DeviceArray(data.shape, kind)
    await copy_to_device(data, back)
    assert back.to_numpy().tobytes() == data.tobytes()


async def test_types_need_not_match_only_sizes() -> None:
    device = DeviceArray.from_numpy(np.arange(6, dtype="i4").reshape(2, 3))
    destination = np.zeros(3, "i8")
    await copy_to_host(device, destination)
    assert np.array_equal(destination.view("i4"), np.arange(6))


async def test_small_types_whose_names_say_nothing_of_their_size() -> None:
    # "<U4" is 16 bytes an item, and the 10 bytes of "<M8[ns]" 8: a destination of the wrong size must not fit.
    device = DeviceArray.from_numpy(np.array(["abcd", "efgh"]))
    assert device.nbytes == 32
    with pytest.raises(ValueError, match="sizes must match"):
        await copy_to_host(device, np.zeros(8, np.uint8))
    destination = np.zeros(2, "U4")
    await copy_to_host(device, destination)
    assert destination.tolist() == ["abcd", "efgh"]


# dst=None.


async def test_a_new_array_is_like_the_source() -> None:
    data = np.arange(24, dtype="f4").reshape(2, 3, 4)
    found = await copy_to_host(DeviceArray.from_numpy(data))
    assert type(found) is np.ndarray
    assert (found.shape, found.dtype, found.flags.c_contiguous, found.flags.writeable) == ((2, 3, 4), data.dtype, 1, 1)
    assert np.array_equal(found, data)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
async def test_a_new_array_of_odd_shape(shape: tuple[int, ...]) -> None:
    data = np.ones(shape, "i2")
    found = await copy_to_host(DeviceArray.from_numpy(data) if shape else DeviceArray.from_numpy(data.reshape(1))[0])
    assert (found.shape, found.dtype) == (shape, data.dtype)
    assert np.array_equal(found, data)


@pytest.mark.parametrize("kind", ["Buffer", "managed Buffer"])
async def test_a_new_array_from_a_buffer_is_bytes(kind: str) -> None:
    with DEVICE_KINDS[kind](1000) as (buffer, address):
        put(address, pattern(1000))
        found = await copy_to_host(buffer)
        assert (found.shape, found.dtype) == ((1000,), np.uint8)
        assert np.array_equal(found, pattern(1000))


async def test_a_new_array_is_page_locked_and_its_memory_comes_back() -> None:
    # pytorch/pytorch#68906: pinned memory is pooled.
    pool = default_pool()
    device = DeviceArray.from_numpy(pattern(300_000))
    first = await copy_to_host(device)
    in_use = pool.stats().in_use_nbytes
    address = first.ctypes.data
    view = first[10:20]
    del first
    gc.collect()
    assert pool.stats().in_use_nbytes == in_use, "a view keeps the memory"
    second = await copy_to_host(device)
    assert second.ctypes.data != address
    assert np.array_equal(view, pattern(300_000)[10:20])
    del view, second
    gc.collect()
    hits = pool.stats().hits
    third = await copy_to_host(device)
    assert pool.stats().hits == hits + 1
    with pytest.raises(ValueError, match="page-locked"):
        await copy_to_host(third, np.empty(300_000, np.uint8))
    assert np.array_equal(third, pattern(300_000))


async def test_a_new_array_is_pageable_when_the_limit_is_reached() -> None:
    # triton-inference-server/server#1943: an exhausted pool is no failure.
    nbytes = 3 << 20
    device = DeviceArray.from_numpy(pattern(nbytes))
    async with Copier(pinned_limit_nbytes=4 << 20) as copier:
        first = await copier.copy_to_host(device)
        second = await copier.copy_to_host(device)
        stats = copier.stats()
        assert (stats.nbytes_direct, stats.nbytes_staged) == (nbytes, nbytes)
        assert stats.pinned_held_nbytes <= 4 << 20
        for found in (first, second):
            assert np.array_equal(found, pattern(nbytes))
        del found, first
        gc.collect()
        third = await copier.copy_to_host(device)
        assert copier.stats().nbytes_direct == 2 * nbytes, "the first one's memory serves again"
        assert np.array_equal(third, pattern(nbytes))
        del second, third
    async with Copier(pinned_limit_nbytes=0) as copier:
        assert np.array_equal(await copier.copy_to_host(device), pattern(nbytes))
        assert copier.stats().nbytes_direct == 0


# Sources that are let go of.


def hold(emulator: Any) -> None:
    with context_of(0):
        emulator.hold(0)
        emulator.kernel(0)


@pytest.mark.parametrize("nbytes", [1000, 100_000])
async def test_a_temporary_source_is_held(emulated_gpu: Any, nbytes: int) -> None:
    # pytorch/pytorch#130785
    import anyio

    device = DeviceArray(nbytes)
    hold(emulated_gpu)
    async with anyio.create_task_group() as group:
        group.start_soon(copy_to_device, pattern(nbytes).tobytes(), device)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        gc.collect()
        others = [bytearray(b"\xee" * (nbytes + 33)) for _ in range(50)]
        emulated_gpu.release(0)
    assert np.array_equal(device.to_numpy(), pattern(nbytes))
    assert len(others) == 50


async def test_a_bytearray_cannot_be_resized_meanwhile(emulated_gpu: Any) -> None:
    import anyio

    for nbytes in (100, 100_000):
        host, device = bytearray(nbytes), DeviceArray.from_numpy(pattern(nbytes))
        hold(emulated_gpu)
        async with anyio.create_task_group() as group:
            group.start_soon(copy_to_host, device, host)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            with pytest.raises(BufferError):
                host.append(0)
            emulated_gpu.release(0)
        host.append(0)
        assert host[:-1] == pattern(nbytes).tobytes()


@one_loop
async def test_one_slot_and_many_copies(emulated_gpu: Any) -> None:
    # NVIDIA/TensorRT-LLM#15546: a staging buffer that is used again must have been emptied.
    import anyio

    async with Copier(slots=1, slot_nbytes=4096) as copier:
        sizes = [random.Random(7).randrange(33_000, 90_000) for _ in range(20)]
        devices = [DeviceArray.from_numpy(pattern(n, n)) for n in sizes]
        hosts = [np.zeros(n, np.uint8) for n in sizes]
        hold(emulated_gpu)
        async with anyio.create_task_group() as group:
            for device, host in zip(devices, hosts, strict=True):
                group.start_soon(copier.copy_to_host, device, host)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            emulated_gpu.release(0)
        for nbytes, host in zip(sizes, hosts, strict=True):
            assert np.array_equal(host, pattern(nbytes, nbytes))


def test_the_modules_functions_share_one_copier() -> None:
    assert copies._default_copier() is copies._default_copier()
