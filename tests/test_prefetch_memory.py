"""Loaders: the memory of batches, which is used again and again."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from calls import SMALL, Stream, calls, turns
from cuda.bindings import driver
from kinds import check
from loaders import Source, value

from aiocuda_copy import prefetch
from aiocuda_copy.testing import DeviceArray, Emulator


async def test_memory_is_used_again_and_bounded(emulated_gpu: Emulator) -> None:
    before = emulated_gpu.live()["device_allocations"]
    async with prefetch(Source(30).sync(), depth=2) as batches:
        async for _ in batches:
            # On their way, with the one that is held and the one that it replaces.
            assert emulated_gpu.live()["device_allocations"] - before <= 4
    del batches, _
    emulated_gpu.settle()  # memory is freed in stream order
    assert emulated_gpu.live()["device_allocations"] == before


async def test_batches_of_many_sizes_do_not_add_up(emulated_gpu: Emulator) -> None:
    before = emulated_gpu.live()["device_allocations"]
    async with prefetch((np.zeros(1 + n, np.uint8) for n in range(30)), depth=2) as batches:
        async for _ in batches:
            assert emulated_gpu.live()["device_allocations"] - before <= 8


async def test_memory_is_written_to_only_after_the_work_that_had_it(emulated_gpu: Emulator) -> None:
    stream, source = Stream(), Source(8)
    seen = DeviceArray(SMALL)
    async with calls() as start:
        batches = prefetch(source.asynchronous(), depth=1, stream=stream)
        batch = await anext(batches)
        address = batch.ptr
        emulated_gpu.hold(stream)
        stream.copy(batch, seen)
        del batch
        call = start(anext(batches))
        await turns(50)
        assert not call.ended
        emulated_gpu.release(stream)
        batch = await call.result()
        assert batch.ptr == address
        assert await value(batch) == 1
        await batches.aclose()
    assert (seen.to_numpy() == 0).all()


async def test_work_with_other_batches_holds_up_no_copy(emulated_gpu: Emulator) -> None:
    stream, source = Stream(), Source(8)
    seen = DeviceArray(SMALL)
    batches = prefetch(source.asynchronous(), depth=1, stream=stream)
    first, second = await anext(batches), await anext(batches)
    addresses = {first.ptr, second.ptr}
    stream.copy(first, seen)
    del first
    while emulated_gpu.busy_streams():
        await turns(1)
    emulated_gpu.hold(stream)
    stream.copy(second, seen)
    third = await anext(batches)
    assert third.ptr in addresses - {second.ptr}
    emulated_gpu.release(stream)
    assert await value(third) == 2
    await batches.aclose()


async def test_a_batch_may_be_dropped_in_any_thread(emulated_gpu: Emulator) -> None:
    stream, source = Stream(), Source(8)
    seen = DeviceArray(SMALL)
    async with calls() as start:
        batches = prefetch(source.asynchronous(), depth=1, stream=stream)
        held = [await anext(batches)]
        emulated_gpu.hold(stream)
        stream.copy(held[0], seen)
        await anyio.to_thread.run_sync(held.clear)
        call = start(anext(batches))
        await turns(50)
        assert not call.ended
        emulated_gpu.release(stream)
        assert await value(await call.result()) == 1
        await batches.aclose()
    assert (seen.to_numpy() == 0).all()


async def test_in_the_threads_own_stream(gpu: Emulator | None) -> None:
    async with prefetch(Source(8).sync(), stream=2) as batches:
        assert [await value(batch) async for batch in batches] == list(range(8))


async def test_work_in_the_threads_own_stream_keeps_what_it_had(emulated_gpu: Emulator) -> None:
    """Whoever frees the memory, another thread among them, comes after it."""
    seen = DeviceArray(SMALL)
    sizes = [np.full(SMALL, 7, np.uint8), np.full(2 * SMALL, 8, np.uint8)]
    async with prefetch(sizes, depth=1, stream=2) as batches:
        batch = await anext(batches)
        emulated_gpu.hold(2)
        check(driver.cuMemcpyDtoDAsync(seen.ptr, batch.ptr, SMALL, 2))
        del batch
        async with calls() as start:
            call = start(anext(batches))
            await turns(50)
            emulated_gpu.release(2)
            last = [await call.result()]
        emulated_gpu.hold(2)
        check(driver.cuMemcpyDtoDAsync(seen.ptr, last[0].ptr, SMALL, 2))
    del batches
    await anyio.to_thread.run_sync(last.clear)
    emulated_gpu.release(2)
    emulated_gpu.settle()
    assert (seen.to_numpy() == 8).all()


async def test_dropping_and_growing_break_no_capture(emulated_gpu: Emulator) -> None:
    before = emulated_gpu.live()["device_allocations"]
    batches = prefetch([np.ones(SMALL, np.uint8), np.ones(9)], depth=1)
    held: list[Any] = [await anext(batches)]
    own = check(driver.cuStreamCreate(0))
    check(driver.cuStreamBeginCapture(own, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    held.clear()
    with pytest.raises(RuntimeError, match="under capture"):
        await anext(batches)
    del batches
    gc.collect()
    assert check(driver.cuStreamIsCapturing(own)) == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    check(driver.cuGraphDestroy(check(driver.cuStreamEndCapture(own))))
    check(driver.cuStreamDestroy(own))
    # What could not be freed then is freed with the next.
    async with prefetch([np.ones(1)]) as batches:
        await anext(batches)
    del batches
    gc.collect()
    emulated_gpu.settle()
    assert emulated_gpu.live()["device_allocations"] == before


async def test_dropping_waits_for_no_stream_that_is_full(emulated_gpu: Emulator) -> None:
    stream = Stream()
    async with prefetch(Source(2).sync(), stream=stream) as batches:
        held = [batch async for batch in batches]
    del batches
    emulated_gpu.hold(stream)
    for _ in range(1021):
        emulated_gpu.kernel(stream)
    waits = len(emulated_gpu.waits())
    held.clear()
    gc.collect()
    assert emulated_gpu.waits()[waits:] == []
    emulated_gpu.release(stream)


async def test_a_shallow_copy_keeps_the_memory(emulated_gpu: Emulator) -> None:
    async with prefetch(Source(8).sync(), depth=1) as batches:
        batch = copy.copy(await anext(batches))
        gc.collect()
        for _ in range(4):
            await anext(batches)
        assert await value(batch) == 0


@dataclasses.dataclass
class Pair:
    data: Any
    label: int


@pytest.mark.parametrize("duplicate", [copy.deepcopy, dataclasses.asdict, pickle.dumps])
async def test_there_is_no_second_array_that_keeps_nothing(gpu: Emulator | None, duplicate: Any) -> None:
    async with prefetch([Pair(np.zeros(SMALL, np.uint8), 1)]) as batches:
        batch = await anext(batches)
        with pytest.raises(TypeError, match=r"copy_to_host.*vars\(batch\)"):
            duplicate(batch)
        assert dataclasses.replace(batch, label=2).data is vars(batch)["data"] is batch.data


async def test_an_array_without_dimensions_has_no_length(gpu: Emulator | None) -> None:
    async with prefetch([np.array(0.0), np.zeros((2, 3)), np.zeros((0, 3))]) as batches:
        scalar, full, empty = [batch async for batch in batches]
    assert (len(full), bool(full), len(empty), bool(empty)) == (2, True, 0, False)
    with pytest.raises(TypeError, match="without dimensions"):
        len(scalar)
    with pytest.raises(TypeError, match="copy_to_host"):
        bool(scalar)
