"""Loaders: what prefetch() and collect() hand out, in which order, how much is on its way, and what is left behind."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from calls import BULK, SMALL, Stream, calls, copies_enqueued, one_loop, pinned_array, turns, until
from cuda.bindings import driver
from kinds import context_of
from loaders import DeviceSource, Source, value

from aiocuda_copy import CudaError, _copies, collect, prefetch
from aiocuda_copy.testing import DeviceArray, Emulator

# With the task beside the consumer, and without one.
both_forms = pytest.mark.parametrize("form", ["with", "bare"])
both_sources = pytest.mark.parametrize("kind", ["sync", "async"])


@asynccontextmanager
async def opened(batches: Any, form: str) -> AsyncIterator[Any]:
    if form == "with":
        async with batches:
            yield batches
    else:
        yield batches


both_ways = pytest.mark.parametrize(("function", "source"), [(prefetch, Source), (collect, DeviceSource)])


async def take(batches: Any, into: list[int]) -> None:
    async for batch in batches:
        into.append(await value(batch))


def completed() -> int:
    return _copies._default_copier().stats().completed


def in_flight() -> int:
    return _copies._default_copier().stats().in_flight


# What is handed out.


@both_forms
@both_sources
@both_ways
async def test_all_come_in_order(gpu: Emulator | None, form: str, kind: str, function: Any, source: Any) -> None:
    items, seen = source(), list[int]()
    async with opened(function(items.of(kind)), form) as batches:
        await take(batches, seen)
        await take(batches, seen)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert items.closed
    assert in_flight() == 0


@one_loop
@both_forms
@both_ways
async def test_large_ones_come_in_order(gpu: Emulator | None, form: str, function: Any, source: Any) -> None:
    seen: list[int] = []
    async with opened(function(source(nbytes=BULK).sync(), depth=3), form) as batches:
        await take(batches, seen)
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("depth", [1, 2, 9])
@both_forms
async def test_any_depth_will_do(gpu: Emulator | None, form: str, depth: int) -> None:
    seen: list[int] = []
    async with opened(prefetch(Source().sync(), depth=depth), form) as batches:
        await take(batches, seen)
    assert seen == [0, 1, 2, 3, 4, 5]


@both_forms
async def test_any_iterable_will_do(gpu: Emulator | None, form: str) -> None:
    seen: list[int] = []
    async with opened(prefetch([np.full(9, 1, np.int8), np.full(9, 2, np.int8)]), form) as batches:
        await take(batches, seen)
    async with opened(prefetch([]), form) as batches:
        await take(batches, seen)
    assert seen == [1, 2]


async def test_one_feeds_the_other(gpu: Emulator | None) -> None:
    source = Source(nbytes=BULK)
    async with collect(prefetch(source.asynchronous(), depth=3)) as results:
        assert [await value(result) async for result in results] == [0, 1, 2, 3, 4, 5]
    assert source.closed


async def test_empty_arrays(gpu: Emulator | None) -> None:
    async with prefetch([np.empty((0, 3), np.float32)]) as batches, collect(batches) as results:
        (result,) = [result async for result in results]
    assert result.shape == (0, 3)
    assert result.dtype == np.float32


async def test_where_the_array_goes_is_the_callers_choice(gpu: Emulator | None) -> None:
    asked: list[Any] = []

    def empty(shape: Any, dtype: Any) -> DeviceArray:
        asked.append((shape, dtype))
        return DeviceArray(shape, dtype)

    async with prefetch([np.ones((2, 3), np.float32)], empty=empty) as batches:
        (batch,) = [batch async for batch in batches]
    assert isinstance(batch, DeviceArray)
    assert batch.to_numpy().tolist() == [[1, 1, 1], [1, 1, 1]]
    assert asked == [((2, 3), np.float32)]


async def test_the_device_is_the_one_asked_for(emulated_gpu: Emulator) -> None:
    async with prefetch(Source(1).sync(), device="cuda:1") as batches:
        (batch,) = [batch async for batch in batches]
    assert batch.device == 1
    assert emulated_gpu.read(batch.ptr, SMALL) == bytes(SMALL)


# How much is on its way.


@both_forms
async def test_no_more_than_the_depth_is_on_its_way(emulated_gpu: Emulator, form: str) -> None:
    stream, source = Stream(), Source(20)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with opened(prefetch(source.asynchronous(), depth=3, stream=stream), form) as batches, calls() as start:
        call = start(anext(batches))
        await until(lambda: in_flight() == 3)
        await turns(50)
        assert (source.taken, in_flight()) == (3, 3)
        assert not call.ended
        emulated_gpu.release(stream)
        held = await call.result()
        # While it is held, the next ones are on their way only where somebody takes them from the source.
        await turns(50)
        assert source.taken == (4 if form == "with" else 3)
        assert await value(held) == 0
        await batches.aclose()
    assert source.closed


async def test_copies_go_on_while_the_consumer_does_something_else(emulated_gpu: Emulator) -> None:
    source, before = Source(20, BULK), completed()
    async with prefetch(source.asynchronous(), depth=2) as batches, calls() as start:
        held = [await anext(batches)]
        await until(lambda: completed() == before + 3)
        # Nobody has asked for the next two yet, and they are there.
        emulated_gpu.hold()
        held += [await start(anext(batches)).result() for _ in range(2)]
        emulated_gpu.release()
        assert [await value(batch) for batch in held] == [0, 1, 2]


async def test_they_go_on_without_a_task_too(emulated_gpu: Emulator) -> None:
    before = completed()
    batches = prefetch(Source(20, BULK).asynchronous(), depth=2)
    held = [await anext(batches)]
    await until(lambda: completed() == before + 2)
    emulated_gpu.hold()
    async with calls() as start:
        held.append(await start(anext(batches)).result())
    emulated_gpu.release()
    assert [await value(batch) for batch in held] == [0, 1]
    await batches.aclose()


# Errors.


@both_forms
@both_sources
async def test_an_error_of_the_source_comes_in_its_place(gpu: Emulator | None, form: str, kind: str) -> None:
    source, seen = Source(3, error=KeyError("the fourth")), list[int]()
    async with opened(prefetch(source.of(kind), depth=2), form) as batches:
        with pytest.raises(KeyError, match="the fourth"):
            await take(batches, seen)
        assert seen == [0, 1, 2]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
    assert source.closed


class Bad(Source):
    """The fourth item cannot be copied."""

    def item(self, index: int) -> Any:
        good = super().item(index)
        return good if index != 3 else [good, np.array([None], object)]


@both_forms
@both_sources
async def test_what_cannot_be_copied_is_an_error_in_its_place(gpu: Emulator | None, form: str, kind: str) -> None:
    source, seen = Bad(9), list[int]()
    async with opened(prefetch(source.of(kind), depth=2), form) as batches:
        with pytest.raises(TypeError, match="Python objects"):
            await take(batches, seen)
    assert seen == [0, 1, 2]
    assert source.closed
    assert source.taken == 4
    assert in_flight() == 0


@both_forms
async def test_a_place_of_the_wrong_size_is_an_error(gpu: Emulator | None, form: str) -> None:
    async with opened(prefetch(Source().sync(), empty=lambda shape, dtype: DeviceArray(1)), form) as batches:
        with pytest.raises(ValueError, match="sizes must match"):
            await anext(batches)


@both_forms
@both_ways
async def test_a_fault_is_an_error_in_its_place(emulated_gpu: Emulator, form: str, function: Any, source: Any) -> None:
    stream, items, before = Stream(), source(9, BULK), completed()
    made = [items.item(index) for index in range(9)]
    items.item = made.__getitem__
    async with opened(function(items.asynchronous(), depth=2, stream=stream), form) as batches:
        await anext(batches)
        await until(lambda: completed() == before + (3 if form == "with" else 2))
        emulated_gpu.fail_operation("copy")
        arrived = [await anext(batches) for _ in range(items.taken - 1)]
        with pytest.raises(CudaError) as caught:
            await anext(batches)
        assert caught.value.sticky
        assert len(arrived) == (2 if form == "with" else 1)
    assert items.closed
    assert in_flight() == 0


async def test_no_room_is_an_error_in_its_place(emulated_gpu: Emulator) -> None:
    with context_of(0):
        _, free, total = driver.cuMemGetInfo()
    emulated_gpu.limit_memory(device_nbytes=total - free + (1 << 30))
    async with prefetch([np.ones(1), np.empty(1 << 31, np.uint8)]) as batches:
        assert await value(await anext(batches)) == 1
        with pytest.raises(CudaError) as caught:
            await anext(batches)
        assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.mark.asyncio_only
async def test_a_source_that_was_cancelled_is_not_at_its_end() -> None:
    async def source() -> AsyncIterator[Any]:
        yield np.zeros(1)
        raise asyncio.CancelledError("the source's own")

    async with prefetch(source()) as batches:
        await anext(batches)
        with pytest.raises(asyncio.CancelledError, match="own"):
            await anext(batches)


# Ends before the end.


@both_forms
@both_sources
async def test_closing(emulated_gpu: Emulator, form: str, kind: str) -> None:
    stream, source = Stream(), Source(9, BULK)
    async with opened(prefetch(source.of(kind), stream=stream), form) as batches:
        assert await value(await anext(batches)) == 0
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        async with calls() as start:
            start(anext(batches))
            await until(lambda: in_flight() > 0 or source.taken > 3 or form == "bare")
        await batches.aclose()
        assert in_flight() == 0
        assert source.closed
        with pytest.raises(StopAsyncIteration):
            await anext(batches)
        await batches.aclose()


@both_sources
@pytest.mark.parametrize("how", ["break", "raise", "cancel"])
async def test_leaving_early_leaves_nothing(emulated_gpu: Emulator, kind: str, how: str) -> None:
    stream, source = Stream(), Source(9, BULK)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)

    async def consume() -> None:
        async with prefetch(source.of(kind), stream=stream) as batches:
            await until(lambda: in_flight() == 2)
            if how == "raise":
                raise KeyError("the consumer's own")
            if how == "cancel":
                await anext(batches)

    async with calls() as start:
        call = start(consume())
        if how == "cancel":
            await until(lambda: in_flight() == 2)
            await turns()
            call.cancel()
        await call.end()
        assert in_flight() == 0
        assert source.closed
    assert call.cancelled is (how == "cancel")
    assert repr(call.error) == ('KeyError("the consumer\'s own")' if how == "raise" else "None")


async def test_what_is_just_dropped_is_cleared_away(emulated_gpu: Emulator) -> None:
    stream, source = Stream(), Source(9, BULK)
    async for _ in prefetch(source.sync(), stream=stream, depth=3):
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        break
    # The worker thread may have a hand on the source for a moment yet.
    await until(lambda: source.closed and in_flight() == 0)


async def test_a_source_with_a_scope_of_its_own(gpu: Emulator | None) -> None:
    async def source() -> AsyncIterator[Any]:
        with anyio.CancelScope():
            while True:
                await turns(1)
                yield np.zeros(SMALL, np.uint8)

    async with prefetch(source()) as batches:
        await anext(batches)
        await turns(50)


async def test_the_source_may_take_its_time_to_clean_up(gpu: Emulator | None) -> None:
    steps: list[str] = []

    async def source() -> AsyncIterator[Any]:
        try:
            while True:
                yield np.zeros(SMALL, np.uint8)
        finally:
            # Not cancelled, though the consumer has left.
            await turns(1)
            steps.append("cleaned up")

    async with prefetch(source()) as batches:
        await anext(batches)
    assert steps == ["cleaned up"]


@pytest.mark.parametrize("how", ["to the end", "break", "in the middle"])
async def test_leaving_one_that_feeds_the_other(gpu: Emulator | None, how: str) -> None:
    """The inner one's task group is open whenever the generator around it rests."""
    source, forever = Source(nbytes=BULK), anyio.Event()

    async def results() -> AsyncIterator[Any]:
        async with prefetch(source.sync()) as batches:
            async for batch in batches:
                yield batch
                if how == "in the middle":
                    await forever.wait()

    seen: list[int] = []
    async with collect(results()) as hosts:
        async for host in hosts:
            seen.append(await value(host))
            if how != "to the end":
                await turns()
                break
    assert seen == ([0, 1, 2, 3, 4, 5] if how == "to the end" else [0])
    assert source.closed
    assert in_flight() == 0


@both_forms
async def test_what_the_source_raises_when_it_is_closed(gpu: Emulator | None, form: str) -> None:
    async def source() -> AsyncIterator[Any]:
        try:
            while True:
                yield np.zeros(SMALL, np.uint8)
        finally:
            raise KeyError("cannot close")

    async def consume() -> None:
        async with aclosing(prefetch(source())) as batches, opened(batches, form):
            await anext(batches)

    with pytest.raises(KeyError, match="cannot close"):
        await consume()


# Waiting, and being interrupted.


class Blocking(Source):
    """Takes as long as the test wants over each item."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def item(self, index: int) -> Any:
        self.asked.release()
        assert self.go.acquire(timeout=20)
        return super().item(index)


@both_forms
async def test_a_source_that_blocks_does_not_hold_the_loop(gpu: Emulator | None, form: str) -> None:
    source = Blocking()
    async with opened(prefetch(source.sync(), depth=1), form) as batches, calls() as start:
        for index in range(3):
            call = start(anext(batches))
            await until(lambda: source.asked.acquire(blocking=False))
            await turns()
            assert not call.ended
            source.go.release()
            assert await value(await call.result()) == index
        source.go.release(9)
        await batches.aclose()
    assert source.closed


async def test_leaving_waits_for_a_source_that_blocks(gpu: Emulator | None) -> None:
    source = Blocking()

    async def consume() -> None:
        async with prefetch(source.sync()) as batches:
            await anext(batches)

    async with calls() as start:
        call = start(consume())
        await until(lambda: source.asked.acquire(blocking=False))
        call.cancel()
        await turns(50)
        assert not call.ended
        source.go.release()
        await call.end()
    assert call.cancelled
    assert source.closed
    assert source.taken == 1


@both_forms
async def test_an_interrupted_wait_loses_nothing(emulated_gpu: Emulator, form: str) -> None:
    stream, seen = Stream(), list[int]()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with opened(prefetch(Source().sync(), stream=stream), form) as batches, calls() as start:
        call = start(anext(batches))
        await until(lambda: in_flight() == 2)
        call.cancel()
        await call.end()
        assert call.cancelled
        emulated_gpu.release(stream)
        await take(batches, seen)
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.asyncio_only
async def test_an_item_that_a_thread_was_after_is_not_lost(gpu: Emulator | None) -> None:
    source, seen = Blocking(), list[int]()
    batches = prefetch(source.sync())
    # asyncio's own cancellation does not wait for the thread.
    task = asyncio.ensure_future(anext(batches))
    await until(lambda: source.asked.acquire(blocking=False))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    source.go.release(9)
    await take(batches, seen)
    assert seen == [0, 1, 2, 3, 4, 5]


async def test_one_at_a_time(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with prefetch(Source().sync(), stream=stream) as batches, calls() as start:
        start(anext(batches))
        await turns()
        with pytest.raises(anyio.BusyResourceError):
            await anext(batches)
        with pytest.raises(RuntimeError, match="entered before"):
            await batches.__aenter__()


async def test_closed_by_somebody_else(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with prefetch(Source().sync(), stream=stream) as batches, calls() as start:
        call = start(anext(batches))
        await until(lambda: in_flight() == 2)
        await batches.aclose()
        await call.end()
        assert isinstance(call.error, StopAsyncIteration | RuntimeError)


def test_another_loop_is_refused(emulated_gpu: Emulator) -> None:
    batches = prefetch(Source().sync())

    async def one() -> Any:
        return await anext(batches)

    assert anyio.run(one).shape == (SMALL,)
    with pytest.raises(RuntimeError, match="another event loop"):
        anyio.run(one)


async def test_several_at_once(gpu: Emulator | None) -> None:
    async def one() -> list[int]:
        return [await value(batch) async for batch in prefetch(Source().sync())]

    async with calls() as start:
        assert [await call.result() for call in [start(one()) for _ in range(4)]] == [[0, 1, 2, 3, 4, 5]] * 4


@pytest.mark.asyncio_only
async def test_closing_is_not_cut_short(emulated_gpu: Emulator) -> None:
    """asyncio's own cancellation, and whoever closes a second time, waits until nothing touches the memory."""
    source = [pinned_array(BULK, 1)]
    batches = prefetch(source, depth=1, empty=DeviceArray)
    emulated_gpu.hold()
    asked = asyncio.ensure_future(anext(batches))
    await until(lambda: in_flight() == 1 and copies_enqueued(emulated_gpu) > 0)
    asked.cancel()
    await asyncio.wait([asked])
    first = asyncio.ensure_future(batches.aclose())
    await turns(20)
    first.cancel()
    second = asyncio.ensure_future(batches.aclose())
    await turns(20)
    assert not first.done()
    assert not second.done()
    emulated_gpu.release()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.exception() is None
    assert in_flight() == 0


def test_closing_in_another_loop(emulated_gpu: Emulator) -> None:
    async def begin() -> Any:
        batches = prefetch(Source().sync(), depth=3)
        await anext(batches)
        return batches

    batches = anyio.run(begin)
    anyio.run(batches.aclose)
    assert in_flight() == 0

    async def close_elsewhere() -> None:
        batches = await begin()
        with pytest.raises(RuntimeError, match="another event loop"):
            await anyio.to_thread.run_sync(anyio.run, batches.aclose)
        await batches.aclose()

    anyio.run(close_elsewhere)


@both_forms
async def test_what_ends_the_process_is_not_wrapped(gpu: Emulator | None, form: str) -> None:
    async def consume() -> None:
        async with opened(prefetch(Source().sync()), form) as batches:
            async for _ in batches:
                sys.exit(3)

    with pytest.raises(SystemExit) as caught:
        await consume()
    assert caught.value.code == 3


@both_forms
async def test_a_loader_cannot_end_by_the_wrong_exception(gpu: Emulator | None, form: str) -> None:
    seen: list[int] = []
    source = Source(2, error=StopAsyncIteration())
    async with opened(prefetch(source.sync()), form) as batches:
        with pytest.raises(RuntimeError, match="StopAsyncIteration"):
            await take(batches, seen)
    assert seen == [0, 1]
