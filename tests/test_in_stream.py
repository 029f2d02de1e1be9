"""in_stream=True: the copy is ordinary work of the stream, in order with what comes after it."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest
from calls import until
from cuda.bindings import driver
from kinds import HOST_KINDS, check, context_of, pattern, stream_of

from aiocuda_copy import Blocks, Copier, copy_batch, copy_to_device, copy_to_host, pinned_empty, synchronize
from aiocuda_copy.testing import DeviceArray

SIZES = [64, 100_000, 9 << 20]


def memset(array: DeviceArray, value: int, stream: int) -> None:
    with context_of(array.device):
        check(driver.cuMemsetD8Async(array.ptr, value, array.nbytes, stream))


@pytest.mark.parametrize("nbytes", SIZES)
async def test_between_work_before_and_after(nbytes: int) -> None:
    device = DeviceArray(nbytes)
    host = pinned_empty(nbytes)
    with stream_of(0) as stream:
        memset(device, 1, stream)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: copy_to_host(device, host, stream=stream, in_stream=True))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            memset(device, 2, stream)
        assert (host == 1).all()
        await synchronize(stream)
        assert (device.to_numpy() == 2).all()


async def test_to_the_device_and_between_arrays(emulated_gpu: Any) -> None:
    source = pinned_empty(100_000)
    source[:] = pattern(100_000)
    first, second, before = (DeviceArray(100_000) for _ in range(3))
    host = pinned_empty(100_000)
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        memset(first, 7, stream)
        with context_of(0):
            check(driver.cuMemcpyDtoDAsync(before.ptr, first.ptr, 100_000, stream))
        async with anyio.create_task_group() as group:
            for call in (
                lambda: copy_to_device(source, first, stream=stream, in_stream=True),
                lambda: copy_to_device(first, second, stream=stream, in_stream=True),
                lambda: copy_to_host(second, host, stream=stream, in_stream=True),
            ):
                group.start_soon(call)
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
            kinds = [kind for kind in emulated_gpu.pending(stream) if kind in ("copy", "memset", "kernel")]
            assert kinds == ["memset", "copy", "copy", "copy", "copy"]
            emulated_gpu.release(stream)
        assert np.array_equal(host, pattern(100_000))
        assert (before.to_numpy() == 7).all()


@pytest.mark.parametrize("kind", ["numpy", "bytearray", "mmap", "managed"])
async def test_pageable_memory_is_refused(emulated_gpu: Any, kind: str) -> None:
    device = DeviceArray(100)
    with HOST_KINDS[kind](100) as (host, _), stream_of(0) as stream:
        emulated_gpu.hold(stream)
        async with Copier() as copier:
            calls = [
                copier.copy_to_host(device, host, stream=stream, in_stream=True),
                copier.copy_to_device(host, device, stream=stream, in_stream=True),
            ]
            if kind == "managed":
                # On the device side it is device memory, as it is in a batch beside host memory.
                calls.pop().close()
            else:
                calls.append(copier.copy_batch(stream, [device], [host], in_stream=True))
            for call in calls:
                with pytest.raises(ValueError, match=r"in_stream=True.*pinned_empty"):
                    await call
            assert copier.stats().submitted == 0
        assert emulated_gpu.pending(stream) == []
        del host


async def test_a_new_array_is_page_locked_or_refused() -> None:
    device = DeviceArray.from_numpy(pattern(3 << 20))
    with stream_of(0) as stream:
        async with Copier(pinned_limit_nbytes=4 << 20) as copier:
            first = await copier.copy_to_host(device, stream=stream, in_stream=True)
            assert np.array_equal(first, pattern(3 << 20))
            with pytest.raises(ValueError, match="pinned_limit_nbytes"):
                await copier.copy_to_host(device, stream=stream, in_stream=True)
            stats = copier.stats()
            assert (stats.submitted, stats.completed, stats.nbytes_in_stream) == (1, 1, 3 << 20)
            del first


@pytest.mark.parametrize("handle", [0, 1, 2])
async def test_special_streams(handle: int) -> None:
    device, host = DeviceArray.from_numpy(pattern(5000)), pinned_empty(5000)
    await copy_to_host(device, host, stream=handle, in_stream=True)
    assert np.array_equal(host, pattern(5000))
    host[:] = pattern(5000, 2)
    await copy_batch(handle, [host], [device], in_stream=True)
    assert np.array_equal(device.to_numpy(), pattern(5000, 2))


async def test_strided() -> None:
    data = pattern(40 * 50 * 60).reshape(40, 50, 60)
    device, host = DeviceArray.from_numpy(data), pinned_empty((40, 20, 30))
    await copy_to_host(device[:, 5:25, 7:37], host, in_stream=True)
    assert np.array_equal(host, data[:, 5:25, 7:37])
    await copy_to_device(host, device[:, :20, :30], in_stream=True)
    assert np.array_equal(device.to_numpy()[:, :20, :30], data[:, 5:25, 7:37])


async def test_a_batch(emulated_gpu: Any) -> None:
    devices = [DeviceArray.from_numpy(pattern(1000, n)) for n in range(4)]
    hosts = [pinned_empty(1000) for _ in devices]
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: copy_batch(stream, devices, hosts, in_stream=True))
            # Looking at the arrays may take more than one turn of the loop.
            await until(lambda: "copy" in emulated_gpu.pending(stream))
            for device in devices:
                memset(device, 0, stream)
            emulated_gpu.release(stream)
        for n, host in enumerate(hosts):
            assert np.array_equal(host, pattern(1000, n))


async def test_blocks() -> None:
    device, host = DeviceArray.from_numpy(pattern(4096)), pinned_empty(4096)
    offsets = np.arange(0, 4096, 512, dtype=np.int64)
    await copy_batch(0, Blocks(device, offsets), Blocks(host, offsets[::-1]), sizes=512, in_stream=True)
    assert np.array_equal(host.reshape(8, 512), pattern(4096).reshape(8, 512)[::-1])


async def test_the_stream_that_an_array_names_comes_first(emulated_gpu: Any) -> None:
    with stream_of(0) as stream, stream_of(0) as named:
        device = DeviceArray(1000, stream=named)
        host = pinned_empty(1000)
        host.fill(0)
        emulated_gpu.hold(named)
        memset(device, 9, named)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: copy_to_host(device, host, stream=stream, in_stream=True))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            emulated_gpu.settle()
            assert not host.any()
            emulated_gpu.release(named)
        assert (host == 9).all()
