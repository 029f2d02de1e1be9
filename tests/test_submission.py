"""What is asked of the driver before a contiguous copy is submitted, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from kinds import Managed, check, context_of, host_view, one_loop, pattern, stream_of

from aiocuda_copy import Copier, copy_to_device, copy_to_host, pinned, pinned_empty, synchronize
from aiocuda_copy.testing import DeviceArray

pytestmark = one_loop

NBYTES = 100_000
LEGACY = 1


@pytest.mark.parametrize("to_host", [True, False])
async def test_a_large_copy_marks_its_stream_and_asks_it_nothing(emulated_gpu: Any, to_host: bool) -> None:
    device, host = DeviceArray.from_numpy(pattern(NBYTES)), pattern(NBYTES)
    with stream_of(0) as stream:
        async with Copier() as copier:
            copy = copier.copy_to_host if to_host else copier.copy_to_device
            src, dst = (device, host) if to_host else (host, device)
            # Until slots are used again, which otherwise are made, on the engine's thread.
            for _ in range(20):
                await copy(src, dst, stream=stream)
            asked, modes = emulated_gpu.calls("cuStreamQuery"), emulated_gpu.calls("cuThreadExchangeStreamCaptureMode")
            emulated_gpu.hold(stream)
            await copy(src, dst, stream=stream)
            assert emulated_gpu.calls("cuStreamQuery") == asked
            assert emulated_gpu.calls("cuThreadExchangeStreamCaptureMode") == modes


@pytest.mark.parametrize("kind", ["page-locked", "pageable", "registered", "partly registered", "managed"])
@pytest.mark.parametrize("to_host", [True, False])
async def test_the_route_is_that_of_the_memory(kind: str, to_host: bool) -> None:
    expected = {"page-locked": "direct", "registered": "direct"}.get(kind, "staged")
    if kind == "managed" and not to_host:
        expected = "between devices"
    memory = Managed(NBYTES) if kind == "managed" else None
    host = pinned_empty(NBYTES, np.uint8) if kind == "page-locked" else np.zeros(NBYTES, np.uint8)
    if memory is not None:
        host = host_view(memory.address, NBYTES)
    registered = {"registered": host, "partly registered": host[: NBYTES // 2]}.get(kind)
    content = pattern(NBYTES)
    host[:] = 0 if to_host else content
    device = DeviceArray.from_numpy(content if to_host else np.zeros(NBYTES, np.uint8))
    async with Copier() as copier:
        if registered is None:
            await (copier.copy_to_host(device, host) if to_host else copier.copy_to_device(host, device))
        else:
            with pinned(registered):
                await (copier.copy_to_host(device, host) if to_host else copier.copy_to_device(host, device))
        stats = copier.stats()
    by_route = {
        "direct": stats.nbytes_direct,
        "staged": stats.nbytes_staged,
        "between devices": stats.nbytes_between_devices,
    }
    assert by_route == dict.fromkeys(by_route, 0) | {expected: NBYTES}
    assert np.array_equal(host if to_host else device.to_numpy(), content)
    if memory is not None:
        memory.free()


@pytest.mark.parametrize("nbytes", [4, NBYTES])
async def test_managed_memory_of_another_device_waits_for_that_ones_stream(emulated_gpu: Any, nbytes: int) -> None:
    memory = Managed(nbytes)
    host, array = host_view(memory.address, nbytes), DeviceArray(nbytes, device=1)
    host[:] = 1
    with context_of(0):
        emulated_gpu.hold(LEGACY)
        check(driver.cuMemsetD8Async(memory.address, 7, nbytes, LEGACY))
        copying = asyncio.ensure_future(copy_to_device(host, array, stream=LEGACY))
        synchronizing = asyncio.ensure_future(synchronize(LEGACY))
        with stream_of(1) as another:
            # Through the same engine behind it, so that it would be done if it did not wait.
            for _ in range(5):
                await copy_to_device(np.ones(NBYTES, np.uint8), DeviceArray(NBYTES, device=1), stream=another)
        assert not copying.done()
        assert not synchronizing.done()
        emulated_gpu.release()
        await copying
        await synchronizing
    assert (array.to_numpy() == 7).all()
    memory.free()


@pytest.mark.parametrize("nbytes", [4, NBYTES])
async def test_managed_memory_of_another_device_than_the_copiers_is_refused(emulated_gpu: Any, nbytes: int) -> None:
    memory = Managed(nbytes, device=1)
    async with Copier(device=0) as copier:
        with pytest.raises(ValueError, match="this copier is for device 0"):
            await copier.copy_to_device(host_view(memory.address, nbytes), DeviceArray(nbytes))
    memory.free()


async def test_an_array_of_the_hosts_over_the_devices_memory_is_refused(emulated_gpu: Any) -> None:
    device, other = DeviceArray(NBYTES), DeviceArray(NBYTES)
    marks = emulated_gpu.calls("cuEventRecord")
    with pytest.raises(ValueError, match="claims host memory"):
        await copy_to_host(device, other._geometry)
    assert emulated_gpu.calls("cuEventRecord") == marks
