"""Cancellation is prompt and final: an await that has returned leaves no one who touches the caller's memory."""

from __future__ import annotations

import asyncio
import gc
import select
import sys
import time
from collections.abc import Coroutine
from typing import Any

import anyio
import numpy as np
import pytest
from calls import (
    BULK,
    FEW_WAYS,
    SMALL,
    WAYS,
    Stream,
    Way,
    calls,
    content,
    copies_enqueued,
    on_device,
    pinned_array,
    turns,
    until,
)

from aiocuda_copy import Copier, _dispatcher, copy_to_device, copy_to_host, synchronize
from aiocuda_copy._copies import _default_copier
from aiocuda_copy.testing import Emulator

# In these ways the device itself works on the caller's memory, piece by piece.
DIRECT = [way for way in WAYS if way.name in ("direct to host", "direct to device", "between devices")]


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_behind_a_busy_stream_it_is_prompt_and_touches_nothing(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    before = _default_copier().stats().cancelled
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        call.cancel()
        await call.end()
        assert call.cancelled
        assert emulated_gpu.pending(stream) == ["kernel", "event_record"]
        emulated_gpu.release(stream)
        emulated_gpu.settle()
        await start(synchronize(stream)).result()
    assert copies_enqueued(emulated_gpu) == 0
    assert (content(dst) == 2).all()
    assert _default_copier().stats().cancelled == before + 1


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_memory_that_is_freed_after_it_belongs_to_others(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    before = emulated_gpu.live()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    src, dst = way.memory(1, 2)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        call.cancel()
        await call.end()
        del call
        await turns()
        del src, dst
        gc.collect()
        assert emulated_gpu.live()["device_allocations"] == before["device_allocations"]
        # Most likely the same memory, now another's.
        neighbours = [way.memory(7, 8) for _ in range(3)]
        emulated_gpu.release(stream)
        emulated_gpu.settle()
        await start(synchronize(stream)).result()
    for one, other in neighbours:
        assert (content(one) == 7).all()
        assert (content(other) == 8).all()


@pytest.mark.parametrize("way", DIRECT, ids=repr)
async def test_while_a_piece_is_in_flight_it_waits_for_that_piece_alone(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    emulated_gpu.hold()
    emulated_gpu.release(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await until(lambda: copies_enqueued(emulated_gpu) > 0)
        call.cancel()
        await turns()
        emulated_gpu.settle()
        assert not call.ended
        emulated_gpu.release()
        await call.end()
        assert call.cancelled
        # The memory is the caller's again.
        if not isinstance(dst, np.ndarray):
            return
        dst.fill(9)
        emulated_gpu.settle()
        await start(synchronize(stream)).result()
        assert (dst == 9).all()


async def test_it_may_be_asked_for_more_than_once(emulated_gpu: Emulator) -> None:
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    emulated_gpu.hold()
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=Stream()))
        await until(lambda: copies_enqueued(emulated_gpu) > 0)
        for _ in range(5):
            call.cancel()
            await turns(2)
        assert not call.ended
        emulated_gpu.release()
        await call.end()
        assert call.cancelled


@pytest.mark.asyncio_only
async def test_a_task_may_be_cancelled_more_than_once(emulated_gpu: Emulator) -> None:
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    emulated_gpu.hold()
    task = asyncio.create_task(copy_to_host(src, dst, stream=Stream()))
    await until(lambda: copies_enqueued(emulated_gpu) > 0)
    for _ in range(5):
        task.cancel()
        await turns(2)
    assert not task.done()
    emulated_gpu.release()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_in_the_stream_it_waits_for_the_stream(emulated_gpu: Emulator, nbytes: int) -> None:
    stream = Stream()
    src, dst = on_device(nbytes, 1), pinned_array(nbytes, 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=stream, in_stream=True))
        await turns()
        call.cancel()
        await turns()
        emulated_gpu.settle()
        assert not call.ended
        emulated_gpu.release(stream)
        await call.end()
        assert call.cancelled
        dst.fill(9)
        emulated_gpu.settle()
    assert (dst == 9).all()


async def test_synchronize_is_cancelled_at_once(emulated_gpu: Emulator) -> None:
    stream = Stream()
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    emulated_gpu.hold()
    emulated_gpu.release(stream)
    async with calls() as start:
        copy = start(copy_to_host(src, dst, stream=stream))
        await until(lambda: copies_enqueued(emulated_gpu) > 0)
        # The stream has been reached: what it waits for are the library's own copies.
        wait = start(synchronize(stream))
        await turns()
        emulated_gpu.settle()
        wait.cancel()
        await wait.end()
        assert wait.cancelled
        assert not copy.ended
        emulated_gpu.release()
        await copy.result()


async def test_aclose_is_cancelled_at_once(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    copier = Copier()
    async with calls() as start:
        dst = bytearray(SMALL)
        copy = start(copier.copy_to_host(on_device(SMALL, 1), dst, stream=stream))
        await turns()
        closing = start(copier.aclose())
        await turns()
        assert not closing.ended
        closing.cancel()
        await closing.end()
        assert closing.cancelled
        emulated_gpu.release(stream)
        await copy.result()
        await start(copier.aclose()).result()
    assert copier.stats().in_flight == 0


async def test_half_of_many_copies(emulated_gpu: Emulator) -> None:
    stream = Stream()
    src = on_device(SMALL, 1)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    targets = [bytearray(64) for _ in range(200)]
    async with calls() as start:
        running = [start(copy_to_host(src[:64], dst, stream=stream.handle)) for dst in targets]
        await turns()
        for call in running[::2]:
            call.cancel()
        for call in running[::2]:
            await call.end()
        emulated_gpu.release(stream)
        for call in running[1::2]:
            await call.result()
    assert all(call.cancelled for call in running[::2])
    assert all(dst == bytes(64) for dst in targets[::2])
    assert all(dst == bytes([1]) * 64 for dst in targets[1::2])


def dispatcher_of_this_loop() -> Any:
    return _dispatcher.current()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("nbytes", [SMALL, BULK])
@pytest.mark.parametrize("moment", ["pushed", "drained", "woken", "resumed"])
async def test_at_the_moment_of_completion(emulated_gpu: Emulator, nbytes: int, moment: str) -> None:
    stream = Stream()
    dst = bytearray(nbytes)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    task = asyncio.create_task(copy_to_host(on_device(nbytes, 1), dst, stream=stream))
    await turns(2)
    dispatcher = dispatcher_of_this_loop()
    emulated_gpu.release(stream)
    # The loop does not run meanwhile: the completion is in the queue, and nobody has seen it.
    assert select.select([dispatcher.queue.fileno()], [], [], 10)[0]
    while not dispatcher.queue.has_finished:  # it may only have been announced
        pass
    if moment == "drained":
        dispatcher._on_readable()
    elif moment == "woken":
        dispatcher._on_readable()
        await asyncio.sleep(0)
    elif moment == "resumed":
        await turns(5)
    cancelled = task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, asyncio.CancelledError):
        assert cancelled
    else:
        assert outcome is dst
        assert dst == bytes([1]) * nbytes
    assert isinstance(outcome, asyncio.CancelledError) == (moment in ("pushed", "drained"))
    # The dispatcher lives on.
    assert await copy_to_host(on_device(SMALL, 3), bytearray(SMALL), stream=stream) == bytes([3]) * SMALL


@pytest.mark.parametrize("way", FEW_WAYS, ids=repr)
@pytest.mark.parametrize("after", range(4))
async def test_in_any_turn_after_the_stream_has_got_there(emulated_gpu: Emulator, way: Way, after: int) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns(3)
        emulated_gpu.release(stream)
        await turns(after)
        call.cancel()
        await call.end()
        assert call.error is None
        if call.returned:
            assert (content(dst) == 1).all()
        elif not hasattr(dst, "ptr"):
            # Final: what is written here now stays.
            np.frombuffer(dst, np.uint8)[:] = 9 if isinstance(dst, bytearray | np.ndarray) else 0
            emulated_gpu.settle()
            await start(synchronize(stream)).result()
            assert (content(dst) == 9).all()


async def warm_up() -> None:
    """Copies until one has finished inside its call, as the next one then most likely does.

    With one processor none does.
    """
    before = _default_copier().stats().inline_completions
    for _ in range(50):
        await copy_to_host(on_device(16, 1), bytearray(16), stream=0)
        if _default_copier().stats().inline_completions > before:
            break
        await turns(1)


async def test_a_pending_cancellation_comes_first(gpu: Emulator | None) -> None:
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    await warm_up()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await copy_to_host(src, dst, stream=0)
    assert scope.cancelled_caught
    assert dst == bytes(SMALL)


@pytest.mark.asyncio_only
async def test_a_pending_cancellation_of_the_task_comes_first(gpu: Emulator | None) -> None:
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    await warm_up()

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await copy_to_host(src, dst, stream=0)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(run())
    assert dst == bytes(SMALL)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_asyncio_timeout(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await way.copy(src, dst, stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(way.copy(src, dst, stream), 0.001)
    async with asyncio.timeout(10):
        emulated_gpu.release(stream)
        await way.copy(src, dst, stream)
    assert (content(dst) == 1).all()


@pytest.mark.asyncio_only
async def test_a_task_group_whose_other_task_fails(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    ways = [way.memory(1, 2) for way in WAYS]

    async def fail() -> None:
        await turns()
        raise LookupError

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for way, (src, dst) in zip(WAYS, ways, strict=True):
                group.create_task(way.copy(src, dst, stream))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert caught.group_contains(LookupError)
    assert len(caught.value.exceptions) == 1
    assert all((content(dst) == 2).all() for _, dst in ways)


async def test_cancel_scopes_nested_and_shielded(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    src = on_device(SMALL, 1)
    shielded, plain = bytearray(SMALL), bytearray(SMALL)
    reached = []
    async with anyio.create_task_group() as group:

        async def run() -> None:
            with anyio.CancelScope() as outer:
                reached.append(outer)
                with anyio.CancelScope(shield=True):
                    await copy_to_host(src, shielded, stream=stream)
                reached.append("shield")
                await copy_to_host(src, plain, stream=stream)
            assert outer.cancelled_caught
            reached.append("end")

        group.start_soon(run)
        await turns(3)
        reached[0].cancel()
        await turns()
        assert len(reached) == 1
        emulated_gpu.release(stream)
        await until(lambda: len(reached) == 3)
    assert shielded == bytes([1]) * SMALL
    assert plain == bytes(SMALL)


async def test_anyio_timeouts_around_a_piece_in_flight(emulated_gpu: Emulator) -> None:
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    stream = Stream()
    emulated_gpu.hold()
    emulated_gpu.release(stream)
    ended = anyio.Event()
    outer = anyio.CancelScope()
    async with anyio.create_task_group() as group:

        async def run() -> None:
            with outer, anyio.CancelScope() as inner:
                await copy_to_host(src, dst, stream=stream)
            assert outer.cancelled_caught
            assert not inner.cancelled_caught
            ended.set()

        group.start_soon(run)
        await until(lambda: copies_enqueued(emulated_gpu) > 0)
        outer.deadline = anyio.current_time()
        await until(lambda: outer.cancel_called)
        await turns()
        assert not ended.is_set()
        emulated_gpu.release()
        await ended.wait()


def pending_step(coroutine: Coroutine[Any, Any, Any]) -> None:
    """The first step of a coroutine, by hand, which must suspend."""
    coroutine.send(None)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_a_coroutine_that_is_closed(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    coroutine = way.copy(src, dst, stream)
    pending_step(coroutine)
    coroutine.close()
    emulated_gpu.release(stream)
    emulated_gpu.settle()
    await synchronize(stream)
    assert copies_enqueued(emulated_gpu) == 0
    assert (content(dst) == 2).all()


@pytest.mark.asyncio_only
async def test_a_coroutine_that_is_closed_with_a_piece_in_flight_keeps_the_memory(emulated_gpu: Emulator) -> None:
    stream = Stream()
    before = emulated_gpu.live()["device_allocations"]
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    emulated_gpu.hold()
    coroutine = copy_to_host(src, dst, stream=stream)
    del src, dst
    pending_step(coroutine)
    await until(lambda: copies_enqueued(emulated_gpu) > 0)
    coroutine.close()
    del coroutine
    gc.collect()
    assert emulated_gpu.live()["device_allocations"] == before + 1
    emulated_gpu.release()
    await until(lambda: emulated_gpu.live()["device_allocations"] == before)


@pytest.mark.parametrize("in_flight", [False, True])
async def test_progress_that_raises_cancels(emulated_gpu: Emulator, in_flight: bool) -> None:
    stream = Stream()
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    emulated_gpu.hold()
    if in_flight:
        emulated_gpu.release(stream)
    else:
        emulated_gpu.kernel(stream)
    raised = []

    def progress(done: int, total: int) -> None:
        raised.append((done, total))
        raise LookupError("enough")

    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=stream, progress=progress))
        await until(lambda: bool(raised))
        assert raised == [(0, BULK)]
        if in_flight:
            await turns()
            assert not call.ended
            emulated_gpu.release()
        with pytest.raises(LookupError, match="enough"):
            await call.result()
        emulated_gpu.release()
        dst.fill(9)
        emulated_gpu.settle()
        await start(synchronize(stream)).result()
    assert raised == [(0, BULK)]
    assert (dst == 9).all()


@pytest.mark.parametrize("error", [StopIteration, KeyError])
async def test_whatever_progress_raises(emulated_gpu: Emulator, error: type[Exception]) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)

    def progress(done: int, total: int) -> None:
        raise error

    # No coroutine can raise StopIteration.
    expected = RuntimeError if error is StopIteration else error
    with pytest.raises(expected):
        await copy_to_host(on_device(SMALL, 1), bytearray(SMALL), stream=stream, progress=progress)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("at_once", [False, True])
async def test_progress_that_cancels_its_task_and_raises(emulated_gpu: Emulator, at_once: bool) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)

    def progress(done: int, total: int) -> None:
        if at_once:
            task.cancel()
        else:
            # Between the exception's arrival and the task's next step.
            asyncio.get_running_loop().call_soon(task.cancel)
        raise LookupError

    task = asyncio.create_task(copy_to_host(on_device(SMALL, 1), bytearray(SMALL), stream=stream, progress=progress))
    with pytest.raises((LookupError, asyncio.CancelledError)):
        await task


@pytest.mark.parametrize("way", [way for way in WAYS if not way.name.startswith("batch")], ids=repr)
async def test_progress_is_called_at_the_end(gpu: Emulator | None, way: Way) -> None:
    src, dst = way.memory(1, 2)
    seen: list[tuple[int, int]] = []
    await way.copy(src, dst, Stream(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (way.nbytes, way.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


async def test_progress_is_called_at_most_twenty_times_a_second(emulated_gpu: Emulator) -> None:
    stream, src, dst = Stream(), on_device(BULK, 1), bytearray(BULK)
    seen: list[tuple[int, int]] = []
    async with calls() as start:
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        begin = time.monotonic()
        call = start(copy_to_host(src, dst, stream=stream, progress=lambda done, total: seen.append((done, total))))
        await until(lambda: len(seen) >= 4)
        assert len(seen) <= (time.monotonic() - begin) * 20 + 1  # a timer may be early by the tick of its clock
        emulated_gpu.release(stream)
        await call.result()
    assert seen.count((BULK, BULK)) == 1
    assert seen[-1] == (BULK, BULK)


async def test_progress_that_raises_at_the_end_is_raised(gpu: Emulator | None) -> None:
    def progress(done: int, total: int) -> None:
        if done == total:
            raise LookupError

    with pytest.raises(LookupError):
        await copy_to_device(bytes(SMALL), on_device(SMALL, 1), stream=Stream(), progress=progress)


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
@pytest.mark.parametrize("as_object", [False, True])
async def test_a_buffer_can_be_resized_as_soon_as_the_await_has_ended(
    emulated_gpu: Emulator, nbytes: int, as_object: bool
) -> None:
    stream = Stream()
    dst = bytearray(nbytes)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    src = on_device(nbytes, 1)
    async with calls() as start:

        async def run() -> None:
            try:
                await copy_to_host(src, dst, stream=stream if as_object else stream.handle)
            finally:
                assert sys.exc_info()[0] is not None
                dst.clear()

        call = start(run())
        await turns()
        with pytest.raises(BufferError):
            dst.clear()
        call.cancel()
        await call.end()
        assert call.cancelled
        assert call.error is None
    assert dst == b""
