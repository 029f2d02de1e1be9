"""A copy comes after what was in its stream when the call began, and before what is enqueued after it has returned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import (
    BULK,
    SMALL,
    WAYS,
    WAYS_TO_DEVICE,
    WAYS_TO_HOST,
    Stream,
    Way,
    calls,
    check,
    content,
    copies_enqueued,
    on_device,
    one_loop,
    pinned_array,
    turns,
    until,
    use_device,
)
from cuda.bindings import driver
from kinds import context_of, need_two_devices

from aiocuda_copy import Copier, copy_batch, copy_to_device, copy_to_host, synchronize
from aiocuda_copy.testing import DeviceArray, Emulator


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_the_copy_waits_for_earlier_work(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        emulated_gpu.settle()
        assert not call.ended
        assert (content(dst) == 2).all()
        # The kernel, and the mark of where the copy stands; nothing else of the library's is in the stream.
        assert emulated_gpu.step(stream, 3) == 2
        await call.result()
    assert (content(dst) == 1).all()


@one_loop
@pytest.mark.parametrize("way", WAYS_TO_HOST, ids=repr)
async def test_a_source_on_the_device_is_what_earlier_work_made_it(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    emulated_gpu.hold(stream)
    stream.fill(src, 9)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        emulated_gpu.release(stream)
        await call.result()
    assert (content(dst) == 9).all()


@one_loop
@pytest.mark.parametrize("way", WAYS_TO_DEVICE, ids=repr)
async def test_earlier_readers_see_what_was_there_before(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    seen = DeviceArray(way.nbytes)
    emulated_gpu.hold(stream)
    stream.copy(dst, seen)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        emulated_gpu.release(stream)
        await call.result()
    assert (content(seen) == 2).all()
    assert (content(dst) == 1).all()


@one_loop
@pytest.mark.parametrize("way", [w for w in WAYS_TO_DEVICE if w.name != "between devices"], ids=repr)
async def test_a_source_on_the_host_is_read_when_the_stream_gets_there(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        emulated_gpu.settle()
        np.frombuffer(src, np.uint8).fill(5) if isinstance(src, bytearray) else src.fill(5)
        emulated_gpu.release(stream)
        await call.result()
    assert (content(dst) == 5).all()


@one_loop
@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_work_after_the_await_comes_after_the_copy(gpu: Emulator | None, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    await way.copy(src, dst, stream)
    side = src if way.to_host else dst
    seen = DeviceArray(way.nbytes)
    stream.copy(side, seen)
    stream.fill(side, 7)
    check(driver.cuStreamSynchronize(stream.handle))
    assert (content(seen) == 1).all()
    assert (content(dst) == (1 if way.to_host else 7)).all()


async def test_a_call_begins_when_its_coroutine_first_runs(emulated_gpu: Emulator) -> None:
    stream = Stream()
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    coroutine = copy_to_host(src, dst, stream=stream)
    emulated_gpu.hold(stream)
    stream.fill(src, 9)
    async with calls() as start:
        call = start(coroutine)
        await turns()
        assert not call.ended
        emulated_gpu.release(stream)
        await call.result()
    assert (content(dst) == 9).all()


async def test_argument_errors_come_with_the_await_and_enqueue_nothing(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    src = on_device(SMALL, 1)
    too_small, constant = bytearray(SMALL - 1), bytes(SMALL)
    coroutines: list[tuple[Any, type[Exception]]] = [
        (copy_to_host(src, too_small, stream=stream), ValueError),
        (copy_to_host(src, constant, stream=stream.handle), ValueError),
        (copy_to_host(src, object(), stream=stream), TypeError),
        (copy_to_host(src, bytearray(SMALL), stream="0"), TypeError),
        (copy_to_device(bytes(SMALL), too_small, stream=stream), ValueError),
        (copy_batch(stream, [src], [bytearray(SMALL), bytearray(SMALL)]), ValueError),
        (copy_batch(stream, src, [bytearray(SMALL)]), TypeError),
        (synchronize(None), TypeError),
    ]
    for coroutine, error in coroutines:
        with pytest.raises(error):
            await coroutine
    assert emulated_gpu.pending(stream) == ["kernel"]
    assert copies_enqueued(emulated_gpu) == 0


async def test_streams_do_not_wait_for_each_other(emulated_gpu: Emulator) -> None:
    busy, idle = Stream(), Stream()
    emulated_gpu.hold(busy)
    emulated_gpu.kernel(busy)
    async with calls() as start:
        held = [start(way.copy(*way.memory(1, 2), busy)) for way in WAYS]
        await turns()
        for way in WAYS:
            src, dst = way.memory(3, 4)
            await start(way.copy(src, dst, idle)).result()
            assert (content(dst) == 3).all()
        assert not any(call.ended for call in held)
        emulated_gpu.release(busy)
        for call in held:
            await call.result()


async def test_overlapping_awaits_on_one_stream_resolve_one_by_one(emulated_gpu: Emulator) -> None:
    stream = Stream()
    sources = [on_device(SMALL, 10 + k) for k in range(4)]
    targets = [bytearray(SMALL) for _ in sources]
    emulated_gpu.hold(stream)
    async with calls() as start:
        running = []
        for src, dst in zip(sources, targets, strict=True):
            emulated_gpu.kernel(stream)
            running.append(start(copy_to_host(src, dst, stream=stream)))
            await turns(3)
        assert emulated_gpu.pending(stream) == ["kernel", "event_record"] * 4
        for k, call in enumerate(running):
            emulated_gpu.step(stream, 2)
            await call.result()
            emulated_gpu.settle()
            await turns()
            assert not any(later.ended for later in running[k + 1 :])
    assert [dst[0] for dst in targets] == [10, 11, 12, 13]


@pytest.mark.parametrize("named", [0, 1, None])
async def test_the_legacy_stream_waits_for_blocking_streams(emulated_gpu: Emulator, named: int | None) -> None:
    blocking = Stream(blocking=True)
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    emulated_gpu.hold(blocking)
    blocking.fill(src, 9)
    emulated_gpu.kernel(1)
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=named))
        await turns()
        emulated_gpu.settle()
        assert not call.ended
        emulated_gpu.release(blocking)
        await call.result()
    assert (content(dst) == 9).all()


@pytest.mark.parametrize("as_object", [False, True])
async def test_blocking_streams_wait_for_the_legacy_stream(emulated_gpu: Emulator, as_object: bool) -> None:
    blocking, independent = Stream(blocking=True), Stream()
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    use_device()
    emulated_gpu.hold(1)
    check(driver.cuMemsetD8Async(src.ptr, 9, SMALL, 1))
    async with calls() as start:
        await start(copy_to_host(src, bytearray(SMALL), stream=independent)).result()
        call = start(copy_to_host(src, dst, stream=blocking if as_object else blocking.handle))
        await turns()
        emulated_gpu.settle()
        assert not call.ended
        emulated_gpu.release(1)
        await call.result()
    assert (content(dst) == 9).all()


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_the_stream_that_an_array_names_is_waited_for(emulated_gpu: Emulator, nbytes: int) -> None:
    producer, own = Stream(), Stream()
    src = DeviceArray(nbytes, stream=producer.handle)
    dst = bytearray(nbytes)
    emulated_gpu.hold(producer)
    producer.fill(src, 6)
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=own))
        after = start(copy_to_host(on_device(SMALL, 3), bytearray(SMALL), stream=own))
        await after.result()
        assert not call.ended
        emulated_gpu.release(producer)
        await call.result()
    assert (content(dst) == 6).all()


async def test_both_the_own_stream_and_the_arrays_stream_are_waited_for(emulated_gpu: Emulator) -> None:
    producer, own = Stream(), Stream()
    src = DeviceArray(SMALL, stream=producer.handle)
    dst = bytearray(SMALL)
    emulated_gpu.hold(producer)
    emulated_gpu.hold(own)
    emulated_gpu.kernel(own)
    producer.fill(src, 6)
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=own))
        await turns()
        emulated_gpu.release(own)
        # What comes later in the own stream is not held up by the other one.
        await start(copy_to_host(on_device(SMALL, 3), bytearray(SMALL), stream=own)).result()
        assert not call.ended
        emulated_gpu.release(producer)
        await call.result()
    assert (content(dst) == 6).all()


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_later_work_is_ordered_behind_a_copy_in_the_stream(emulated_gpu: Emulator, nbytes: int) -> None:
    stream = Stream()
    src, dst = on_device(nbytes, 1), pinned_array(nbytes, 2)
    emulated_gpu.hold(stream)
    stream.fill(src, 3)
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=stream, in_stream=True))
        await turns()
        assert "copy" in emulated_gpu.pending(stream)
        stream.fill(src, 4)
        emulated_gpu.release(stream)
        await call.result()
    check(driver.cuStreamSynchronize(stream.handle))
    assert (dst == 3).all()
    assert (content(src) == 4).all()


async def test_in_stream_needs_memory_that_the_driver_does_not_wait_for(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    src = on_device(SMALL, 1)
    for call in (
        copy_to_host(src, bytearray(SMALL), stream=stream, in_stream=True),
        copy_to_device(bytes(SMALL), src, stream=stream, in_stream=True),
        copy_batch(stream, [src], [bytearray(SMALL)], in_stream=True),
    ):
        with pytest.raises(ValueError, match="pinned_empty"):
            await call
    assert emulated_gpu.pending(stream) == ["kernel"]


async def test_a_copy_in_the_stream_does_not_make_later_work_wait_for_host_functions(emulated_gpu: Emulator) -> None:
    stream = Stream()
    src, dst, later = on_device(SMALL, 1), pinned_array(SMALL, 2), on_device(SMALL, 0)
    emulated_gpu.stall_host_functions()
    await copy_to_host(src, dst, stream=stream, in_stream=True)
    stream.fill(later, 7)
    emulated_gpu.settle()
    assert emulated_gpu.pending(stream) == []
    assert (dst == 1).all()


@pytest.mark.parametrize("as_object", [False, True])
async def test_a_batch_that_is_long_to_plan_waits_for_nothing_later(emulated_gpu: Emulator, as_object: bool) -> None:
    stream = Stream()
    sources = [on_device(64, k % 251) for k in range(200)]
    targets = [bytearray(64) for _ in sources]
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        batch = start(copy_batch(stream, sources, targets))
        await turns(2)
        # The batch has its place in the stream, and is still being planned.
        assert emulated_gpu.pending(stream) == ["kernel", "event_record"]
        emulated_gpu.kernel(stream)
        dst = bytearray(SMALL)
        later = start(copy_to_host(on_device(SMALL, 3), dst, stream=stream if as_object else stream.handle))
        await turns(20)
        emulated_gpu.step(stream, 2)
        await batch.result()
        assert not later.ended
        emulated_gpu.release(stream)
        await later.result()
    assert [target[63] for target in targets] == [k % 251 for k in range(200)]


async def test_synchronize_waits_for_the_stream(emulated_gpu: Emulator) -> None:
    stream, other = Stream(), Stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(synchronize(stream))
        await start(synchronize(other)).result()
        assert not call.ended
        # Work that comes later is not waited for.
        await turns()
        emulated_gpu.kernel(stream)
        emulated_gpu.step(stream, 2)
        await call.result()
        assert "kernel" in emulated_gpu.pending(stream)


async def test_synchronize_waits_for_the_librarys_own_copies(emulated_gpu: Emulator) -> None:
    stream, elsewhere = Stream(), Stream()
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    emulated_gpu.hold()
    emulated_gpu.release(stream)
    emulated_gpu.release(elsewhere)
    async with calls() as start:
        copy = start(copy_to_host(src, dst, stream=stream))
        await until(lambda: copies_enqueued(emulated_gpu) > 0)
        wait = start(synchronize(stream))
        other = start(synchronize(elsewhere))
        await turns()
        emulated_gpu.settle()
        assert not wait.ended
        await other.result()
        emulated_gpu.release()
        await wait.result()
        assert (dst == 1).all()
        await copy.result()


async def test_synchronize_waits_for_calls_that_have_not_submitted_yet(emulated_gpu: Emulator) -> None:
    """The pool is growing for one, and the other is long to plan."""
    stream = Stream()
    src, many = on_device(5 * BULK, 1), on_device(4096 * 16, 2).to_numpy()
    rows = DeviceArray.from_numpy(many.reshape(4096, 16))
    targets = [bytearray(16) for _ in rows]
    emulated_gpu.hold_pinning()
    async with calls() as start:
        new = start(copy_to_host(src, stream=stream))
        batch = start(copy_batch(stream, list(rows), targets))
        await turns(1)
        wait = start(synchronize(stream))
        await turns()
        assert not wait.ended
        emulated_gpu.release_pinning()
        await wait.result()
        assert all(set(target) == {2} for target in targets)
        await batch.result()
        assert (await new.result() == 1).all()


async def test_synchronize_does_not_wait_for_other_streams_of_the_same_handle(emulated_gpu: Emulator) -> None:
    """A destroyed one, whose handle is given again, and the legacy stream of another device."""
    source, near = on_device(SMALL, 1), bytearray(SMALL)
    use_device()
    old = int(check(driver.cuStreamCreate(1)))
    emulated_gpu.hold(old)
    emulated_gpu.kernel(old)
    async with calls() as start:
        copy = start(copy_to_host(source, near, stream=old))
        await turns()
        check(driver.cuStreamDestroy(old))
        new = int(check(driver.cuStreamCreate(1)))
        assert new == old, "the emulated driver gives handles again"
        await synchronize(new)
        assert not copy.ended
        emulated_gpu.release()
        await copy.result()
        need_two_devices()
        source, far = DeviceArray(SMALL, device=1), bytearray(SMALL)
        with context_of(1):
            blocking = int(check(driver.cuStreamCreate(0)))
        emulated_gpu.hold(blocking)
        emulated_gpu.kernel(blocking)
        copy = start(copy_to_host(source, far, stream=0))
        await turns()
        await Copier(device=0).synchronize(0)
        assert not copy.ended
        wait = start(Copier(device=1).synchronize(0))
        await turns()
        assert not wait.ended
        emulated_gpu.release()
        await copy.result()
        await wait.result()
    check(driver.cuStreamDestroy(new))
    check(driver.cuStreamDestroy(blocking))


async def test_a_default_stream_that_says_which_devices_it_is(emulated_gpu: Emulator) -> None:
    need_two_devices()

    class OfTorch:
        """Its default streams have the handle 0 on every device."""

        device_index = 1

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0

    with context_of(1):
        blocking = int(check(driver.cuStreamCreate(0)))
    emulated_gpu.hold(blocking)
    emulated_gpu.kernel(blocking)
    async with calls() as start:
        wait = start(synchronize(OfTorch()))
        await synchronize(0)
        await turns()
        assert not wait.ended
        emulated_gpu.release()
        await wait.result()
    with pytest.raises(ValueError, match="device 1"):
        await Copier(device=0).synchronize(OfTorch())
    check(driver.cuStreamDestroy(blocking))


async def test_synchronizations_do_not_wait_for_each_other(emulated_gpu: Emulator) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    async with calls() as start:
        waits = []
        for _ in range(3):
            emulated_gpu.kernel(stream)
            waits.append(start(synchronize(stream)))
            await turns()
        for k, wait in enumerate(waits):
            emulated_gpu.step(stream, 2)
            await wait.result()
            assert not any(later.ended for later in waits[k + 1 :])


async def test_synchronize_with_an_event(emulated_gpu: Emulator) -> None:
    stream = Stream()
    event = check(driver.cuEventCreate(2))
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    check(driver.cuEventRecord(event, stream.handle))
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(synchronize(event))
        await turns()
        emulated_gpu.settle()
        assert not call.ended
        emulated_gpu.step(stream, 2)
        await call.result()
    emulated_gpu.release(stream)
    check(driver.cuEventDestroy(event))


async def test_one_slot_serves_many_copies(emulated_gpu: Emulator) -> None:
    stream = Stream()
    n, nbytes = 20, 33_000
    sources = [on_device(nbytes, k + 1) for k in range(n)]
    targets = [bytearray(nbytes) for _ in sources]
    there = [on_device(nbytes, 0) for _ in sources]
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with Copier(slots=1, slot_nbytes=4096) as copier, calls() as start:
        running = [
            start(copier.copy_to_host(src, dst, stream=stream)) for src, dst in zip(sources, targets, strict=True)
        ]
        running += [
            start(copier.copy_to_device(bytes([k + 101]) * nbytes, dst, stream=stream)) for k, dst in enumerate(there)
        ]
        await turns()
        assert copier.stats().slots_in_use == 0
        emulated_gpu.release(stream)
        for call in running:
            await call.result()
        assert copier.stats().slots_in_use == 0
    for k in range(n):
        assert targets[k] == bytes([k + 1]) * nbytes
        assert (there[k].to_numpy() == k + 101).all()
