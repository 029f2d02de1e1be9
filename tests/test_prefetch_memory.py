"""Loaders: the memory of batches, which is used again and again."""

from __future__ import annotations

import anyio
import anyio.to_thread
import numpy as np
from calls import SMALL, Stream, calls, turns
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
