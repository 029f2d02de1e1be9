"""What a large copy asks the driver for, and on which thread: the loop's thread marks the stream, and the engine finds
the route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kinds import Managed, host_view, one_loop, pattern, stream_of

from aiocuda_copy import Copier, CudaError, copy_to_host, pinned, pinned_empty
from aiocuda_copy.testing import DeviceArray

pytestmark = one_loop

NBYTES = 100_000


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
async def test_the_route_is_that_of_the_memory_when_it_is_admitted(kind: str, to_host: bool) -> None:
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


async def test_where_the_driver_cannot_tell(emulated_gpu: Any) -> None:
    device, host = DeviceArray.from_numpy(pattern(NBYTES)), np.zeros(NBYTES, np.uint8)
    await copy_to_host(device, host)
    host[:] = 0
    async with Copier() as copier:
        # The second one: the first is the loop's thread's, and about the device's memory.
        emulated_gpu.fail_call("cuPointerGetAttributes", 2, 999)
        with pytest.raises(CudaError) as caught:
            await copier.copy_to_host(device, host)
        assert caught.value.code == 999
        assert copier.stats().failed == 1
        assert not host.any()
        await copier.copy_to_host(device, host)
    assert np.array_equal(host, pattern(NBYTES))


async def test_an_array_of_the_hosts_over_the_devices_memory_is_refused() -> None:
    device, other = DeviceArray(NBYTES), DeviceArray(NBYTES)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        await copy_to_host(device, other._geometry)
