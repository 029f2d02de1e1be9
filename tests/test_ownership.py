"""What a call holds, and until when: the buffers, their owners, and the stream object."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from calls import (
    BULK,
    SMALL,
    WAYS,
    Stream,
    Way,
    calls,
    content,
    copies_enqueued,
    nothing_held,
    on_device,
    pinned_array,
    turns,
    until,
)

from aiocuda_copy import Blocks, copy_batch, copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy._copies import _default_copier
from aiocuda_copy.testing import DeviceArray, Emulator


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_nothing_goes_before_the_copy_has_ended(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    held = [weakref.ref(one) for one in (src, dst) if not isinstance(one, bytearray)]
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        del src, dst
        gc.collect()
        assert all(one() is not None for one in held)
        emulated_gpu.release(stream)
        result = await call.result()
        if result is not None:
            assert (content(result) == 1).all()
        del call, result
    await nothing_held()
    gc.collect()
    assert not any(one() is not None for one in held)


@pytest.mark.asyncio_only
async def test_what_an_owner_does_when_it_is_dropped_meets_what_has_ended_with_it(emulated_gpu: Emulator) -> None:
    """Owners are dropped in the midst of what the loop takes at once, and run code of others."""
    stream = Stream()
    src, other, dst = on_device(SMALL, 1), on_device(SMALL, 2), bytearray(SMALL)
    emulated_gpu.hold()
    emulated_gpu.release(stream)
    first = asyncio.create_task(copy_to_host(src, bytearray(SMALL), stream=stream))
    await until(lambda: copies_enqueued(emulated_gpu) > 0)
    second = asyncio.create_task(copy_to_host(other, dst, stream=stream))
    await turns()
    first.cancel()
    await asyncio.wait([first])
    held = weakref.ref(src)
    weakref.finalize(src, second.cancel)
    del src, first
    gc.collect()
    assert held() is not None
    emulated_gpu.release()
    # The loop does not run meanwhile.
    while _default_copier().stats().in_flight:
        pass
    await asyncio.wait([second])
    assert held() is None
    assert second.cancelled()
    await nothing_held()


async def test_the_stream_object_is_held(emulated_gpu: Emulator) -> None:
    blocker, stream = Stream(), Stream()
    src = DeviceArray(SMALL, stream=blocker.handle)
    emulated_gpu.hold(blocker)
    emulated_gpu.kernel(blocker)
    held = weakref.ref(stream)
    async with calls() as start:
        call = start(copy_to_host(src, bytearray(SMALL), stream=stream))
        await turns()
        del stream
        gc.collect()
        assert held() is not None
        emulated_gpu.release(blocker)
        await call.result()
        del call
    await nothing_held()
    gc.collect()
    assert held() is None


ONE_ENTRY = {
    "into": lambda src, dst: copy_to_host(src, dst, stream=0),
    "with progress": lambda src, dst: copy_to_host(src, dst, stream=0, progress=lambda done, total: None),
    "batch": lambda src, dst: copy_batch(0, [src], [dst]),
    "blocks": lambda src, dst: copy_batch(0, Blocks(src, ZERO), Blocks(dst, ZERO), sizes=SMALL),
    "blocks, with sizes": lambda src, dst: copy_batch(0, Blocks(src, ZERO), Blocks(dst, ZERO), sizes=SMALL + ZERO),
}
ZERO = np.zeros(1, np.uint64)


@pytest.mark.parametrize("way", ONE_ENTRY)
async def test_a_cancelled_copy_lets_go_of_its_target_while_the_device_reads(emulated_gpu: Emulator, way: str) -> None:
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    emulated_gpu.hold()
    emulated_gpu.release(1)
    async with calls() as start:
        call = start(ONE_ENTRY[way](src, dst))
        await until(lambda: copies_enqueued(emulated_gpu) > 0)
        call.cancel()
        await call.end()
        assert call.cancelled
        dst.append(1)
        emulated_gpu.release()
    await nothing_held()
    assert dst == bytes(SMALL) + b"\1"


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("to_host", [False, True])
async def test_a_bytearray_cannot_be_resized_meanwhile(
    emulated_gpu: Emulator, nbytes: int, as_object: bool, to_host: bool
) -> None:
    stream = Stream()
    named = stream if as_object else stream.handle
    on_host = bytearray([3]) * nbytes
    device = on_device(nbytes, 1)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        copy = copy_to_host(device, on_host, stream=named) if to_host else copy_to_device(on_host, device, stream=named)
        call = start(copy)
        await turns()
        with pytest.raises(BufferError):
            on_host.append(0)
        emulated_gpu.release(stream)
        await call.result()
        on_host.append(0)


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_the_callers_view_may_be_released_meanwhile(emulated_gpu: Emulator, nbytes: int) -> None:
    stream = Stream()
    dst = bytearray(nbytes)
    view = memoryview(dst)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(on_device(nbytes, 1), view, stream=stream))
        await turns()
        view.release()
        emulated_gpu.release(stream)
        await call.result()
    assert dst == bytes([1]) * nbytes


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_a_pinned_source_is_not_recycled(emulated_gpu: Emulator, nbytes: int) -> None:
    stream = Stream()
    dst = on_device(nbytes, 0)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_device(pinned_array(nbytes, 5), dst, stream=stream))
        await turns()
        gc.collect()
        others = [pinned_array(nbytes, 6) for _ in range(4)]
        emulated_gpu.release(stream)
        await call.result()
    assert (content(dst) == 5).all()
    assert all((one == 6).all() for one in others)


async def test_a_batch_holds_its_entries_and_not_the_lists(emulated_gpu: Emulator) -> None:
    stream = Stream()
    sources: list[Any] = [on_device(64, k) for k in range(70)]
    targets: list[Any] = [np.zeros(64, np.uint8) for _ in sources]
    kept = targets.copy()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_batch(stream, sources, targets))
        await turns()
        sources.clear()
        targets.clear()
        gc.collect()
        emulated_gpu.release(stream)
        await call.result()
    assert [one[0] for one in kept] == list(range(70))


class Watched(DeviceArray):
    """Notes in which thread it goes."""

    gone_in: list[int]

    def __del__(self) -> None:
        self.gone_in.append(threading.get_ident())


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_owners_go_in_the_loops_thread(emulated_gpu: Emulator, nbytes: int) -> None:
    stream = Stream()
    src = Watched(nbytes)
    src.gone_in = gone_in = []
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(src, bytearray(nbytes), stream=stream))
        await turns()
        del src
        emulated_gpu.release(stream)
        await call.result()
        del call
        await until(lambda: bool(gone_in))
    assert gone_in == [threading.get_ident()]


async def test_results_return_to_the_pool_with_their_last_view(gpu: Emulator | None) -> None:
    src = on_device(BULK, 1)
    first = await copy_to_host(src)
    address, view = first.ctypes.data, first[10:20]
    del first
    gc.collect()
    second = await copy_to_host(src)
    assert second.ctypes.data != address
    assert (view == 1).all()
    del view
    gc.collect()
    third = pinned_empty(BULK)
    assert third.ctypes.data == address
