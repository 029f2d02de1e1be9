"""The two roads of small copies to the host: what is late on the copy engine is put on the kernel's road as well."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import numpy as np
import pytest
from calls import (
    BULK,
    PATIENCE,
    SMALL,
    Call,
    Stream,
    calls,
    copies_enqueued,
    forget_the_kernel,
    nothing_held,
    on_device,
    pinned_array,
    streams_with,
    turns,
    until,
)

from aiocuda_copy import Copier, CudaError, _native, copy_batch, copy_to_device, copy_to_host
from aiocuda_copy._copies import _default_copier
from aiocuda_copy._native import leaked_owners
from aiocuda_copy.testing import DeviceArray, Emulator

INLINE = pytest.mark.parametrize("inline", [True, False], ids=["inside the call", "parked"])


async def kernel_is_loaded(gpu: Emulator) -> None:
    """A crowd of small copies asks for it."""

    def state() -> str:
        return _native.engine_scatter(0)[0]

    if state() == "absent":
        await forget_the_kernel(gpu)
    src, targets = on_device(SMALL, 1), [bytearray(SMALL) for _ in range(64)]
    with anyio.fail_after(20):
        while state() != "ready":
            async with anyio.create_task_group() as group:
                for dst in targets:
                    group.start_soon(copy_to_host, src, dst)
    await nothing_held()


@contextmanager
def road_times(*, avoided: float = 0, linger: float = 0, number: float = 0.000005) -> Iterator[None]:
    """How long the copy engine is avoided once a copy was late there, and how long the slower road is waited for."""
    before = _native.set_road_times(avoided=avoided, linger=linger, number=number)
    try:
        yield
    finally:
        _native.set_road_times(**before)


@pytest.fixture(autouse=True)
def either_road_at_any_time() -> Iterator[None]:
    with road_times():
        yield


async def on_both_roads(gpu: Emulator) -> None:
    """Waits until a copy is on each."""
    await until(lambda: bool(streams_with(gpu, "copy")) and bool(streams_with(gpu, "kernel")))


async def by_one_road(gpu: Emulator, call: Call, road: str) -> None:
    """Ends a call while the other road stays held."""

    def ended() -> bool:
        for stream in streams_with(gpu, road):
            gpu.release(stream)
        return call.ended

    await until(ended)
    await call.result()


async def it_is_held_until_it_has_landed(gpu: Emulator, alive: Callable[[], object]) -> None:
    gc.collect()
    assert alive() is not None
    gpu.release()
    await nothing_held()
    gc.collect()
    assert alive() is None


@INLINE
@pytest.mark.parametrize("quicker", ["copy", "kernel"])
async def test_the_first_to_arrive_wins_and_the_other_is_let_land(
    emulated_gpu: Emulator, inline: bool, quicker: str
) -> None:
    await kernel_is_loaded(emulated_gpu)
    src, dst = on_device(SMALL, 1), bytearray([2]) * SMALL
    alive = weakref.ref(src)
    async with Copier(inline=inline) as copier, calls() as start:
        emulated_gpu.hold()
        call = start(copier.copy_to_host(src, dst, stream=Stream()))
        del src
        await on_both_roads(emulated_gpu)
        await by_one_road(emulated_gpu, call, quicker)
        del call
        assert dst == bytes([1]) * SMALL
        # The slower road still reads the source, and writes to a slot that is nobody's.
        gc.collect()
        assert alive() is not None
        dst[:] = bytes([3]) * SMALL
        emulated_gpu.release()
        await nothing_held()
        gc.collect()
        assert alive() is None
        assert dst == bytes([3]) * SMALL
        assert copier.stats().completed == 1


@INLINE
@pytest.mark.parametrize("quicker", ["copy", "kernel"])
async def test_the_slower_road_is_waited_for(emulated_gpu: Emulator, inline: bool, quicker: str) -> None:
    """So whoever closes a Buffer after the await does not free what is still read."""
    await kernel_is_loaded(emulated_gpu)
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    alive = weakref.ref(src)
    async with Copier(inline=inline) as copier, calls() as start:
        with road_times(linger=3600):
            emulated_gpu.hold()
            call = start(copier.copy_to_host(src, dst, stream=Stream()))
            del src
            await on_both_roads(emulated_gpu)
            for stream in streams_with(emulated_gpu, quicker):
                emulated_gpu.release(stream)
            emulated_gpu.settle()
            await turns(50)
            assert not call.ended
            emulated_gpu.release()
            await call.result()
        del call
        gc.collect()
        assert alive() is None
        assert dst == bytes([1]) * SMALL
        assert copier.stats().completed == 1


@pytest.mark.parametrize("waits_first", [True, False])
@pytest.mark.parametrize("what", ["synchronize", "aclose"])
async def test_a_synchronisation_waits_for_a_copy_that_waits_for_the_slower_road(
    emulated_gpu: Emulator, what: str, waits_first: bool
) -> None:
    await kernel_is_loaded(emulated_gpu)
    stream, src, dst = Stream(), on_device(SMALL, 1), bytearray(SMALL)
    copier = Copier(inline=False)
    async with calls() as start:
        with road_times(linger=3600):
            emulated_gpu.hold()
            emulated_gpu.release(stream)
            call = start(copier.copy_to_host(src, dst, stream=stream))
            await on_both_roads(emulated_gpu)
            waiting = []
            if waits_first:
                waiting.append(start(copier.synchronize(stream) if what == "synchronize" else copier.aclose()))
                await turns()
            for road in streams_with(emulated_gpu, "kernel"):
                emulated_gpu.release(road)
            emulated_gpu.settle()
            await turns(50)
            assert copier.stats().in_flight > 0
            if not waits_first:
                waiting.append(start(copier.synchronize(stream) if what == "synchronize" else copier.aclose()))
            await turns(50)
            assert not waiting[0].ended
            emulated_gpu.release()
            await waiting[0].result()
            assert dst == bytes([1]) * SMALL
            await call.result()
    await copier.aclose()
    await nothing_held()


@INLINE
async def test_a_wait_for_the_slower_road_can_be_cancelled(emulated_gpu: Emulator, inline: bool) -> None:
    await kernel_is_loaded(emulated_gpu)
    src = on_device(SMALL, 1)
    alive = weakref.ref(src)
    async with Copier(inline=inline) as copier, calls() as start:
        with road_times(linger=3600):
            emulated_gpu.hold()
            call = start(copier.copy_to_host(src, bytearray(SMALL), stream=Stream()))
            del src
            await on_both_roads(emulated_gpu)
            for stream in streams_with(emulated_gpu, "kernel"):
                emulated_gpu.release(stream)
            emulated_gpu.settle()
            await turns(50)
            call.cancel()
            await call.end()
            assert call.cancelled
        del call
        await it_is_held_until_it_has_landed(emulated_gpu, alive)
        stats = copier.stats()
        assert (stats.completed, stats.cancelled) == (0, 1)


@INLINE
async def test_the_copy_engine_is_avoided_after_it_was_late(emulated_gpu: Emulator, inline: bool) -> None:
    await kernel_is_loaded(emulated_gpu)
    stream, src = Stream(), on_device(SMALL, 1)
    async with Copier(inline=inline) as copier, calls() as start:
        with road_times(avoided=3600):
            emulated_gpu.hold()
            late = start(copier.copy_to_host(src, bytearray(SMALL), stream=stream))
            await on_both_roads(emulated_gpu)
            assert _native.avoids_copy_engine(0)
            emulated_gpu.release()
            await late.result()
            await nothing_held()
            launches = _native.engine_scatter(0)[1]
            for value in range(20):
                dst = bytearray(SMALL)
                await copier.copy_to_host(on_device(SMALL, value), dst, stream=stream)
                assert dst == bytes([value]) * SMALL
            assert _native.engine_scatter(0)[1] - launches >= 20
            # Those that have one road stay on the copy engine: the kernel may be late for longer.
            pinned = pinned_array(SMALL, 2)
            addresses = np.array([src.ptr], np.uint64), np.array([pinned.ctypes.data], np.uint64)
            copies, launches = emulated_gpu.calls("cuMemcpyDtoHAsync"), _native.engine_scatter(0)[1]
            for _ in range(20):
                await copier.copy_batch(stream, *addresses, sizes=SMALL)
            assert emulated_gpu.calls("cuMemcpyDtoHAsync") - copies == 20
            assert _native.engine_scatter(0)[1] == launches
            assert (pinned == 1).all()
        assert not _native.avoids_copy_engine(0)


async def test_the_long_way_lets_go_of_the_destination_as_well(emulated_gpu: Emulator) -> None:
    await kernel_is_loaded(emulated_gpu)
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    async with calls() as start:
        emulated_gpu.hold()
        call = start(copy_to_host(src, dst, stream=Stream(), progress=lambda done, total: None))
        await on_both_roads(emulated_gpu)
        await by_one_road(emulated_gpu, call, "kernel")
        dst.append(0)
        assert dst == bytes([1]) * SMALL + b"\0"
        emulated_gpu.release()
        await nothing_held()


@INLINE
async def test_a_late_copy_does_not_block_the_next(emulated_gpu: Emulator, inline: bool) -> None:
    await kernel_is_loaded(emulated_gpu)
    stream = Stream()
    arrays = [on_device(SMALL, value) for value in range(100)]
    async with Copier(inline=inline) as copier, calls() as start:
        emulated_gpu.hold()
        first = start(copier.copy_to_host(arrays[1], bytearray(SMALL), stream=stream))
        await on_both_roads(emulated_gpu)
        await by_one_road(emulated_gpu, first, "kernel")
        # While the copy engine holds the first, the others go by the kernel, as long as that is not late too.
        targets = [bytearray(SMALL) for _ in range(100)]
        for value, dst in enumerate(targets):
            src = arrays[value]
            await by_one_road(emulated_gpu, start(copier.copy_to_host(src, dst, stream=stream)), "kernel")
        assert all(dst == bytes([value]) * SMALL for value, dst in enumerate(targets))
        late = sum(emulated_gpu.pending(road).count("copy") for road in streams_with(emulated_gpu, "copy"))
        assert 0 < late < len(targets) / 4
        emulated_gpu.release()
        await nothing_held()


@INLINE
async def test_dropping_does_not_wait_for_the_device(emulated_gpu: Emulator, inline: bool) -> None:
    src, dst = on_device(SMALL, 1), bytearray([2]) * SMALL
    alive = weakref.ref(src)
    async with Copier(inline=inline) as copier, calls() as start:
        emulated_gpu.hold()
        call = start(copier.copy_to_host(src, dst, stream=Stream()))
        del src
        await until(lambda: bool(streams_with(emulated_gpu, "copy")))
        call.cancel()
        await call.end()
        assert call.cancelled
        del call
        # The caller's memory is the caller's again, its size included, although the device reads the source.
        dst.extend(b"x")
        await it_is_held_until_it_has_landed(emulated_gpu, alive)
        assert dst == bytes([2]) * SMALL + b"x"
        assert copier.stats().cancelled == 1


@INLINE
async def test_a_fault_on_both_roads(emulated_gpu: Emulator, inline: bool) -> None:
    await kernel_is_loaded(emulated_gpu)
    src, kept = on_device(SMALL, 1), len(leaked_owners)
    async with Copier(inline=inline) as copier, calls() as start:
        emulated_gpu.hold()
        call = start(copier.copy_to_host(src, bytearray(SMALL), stream=Stream()))
        await on_both_roads(emulated_gpu)
        emulated_gpu.fault()
        await call.end()
        assert isinstance(call.error, CudaError)
        await nothing_held()
        emulated_gpu.reset()
    assert all(any(owner is src for owner in owners) for owners in leaked_owners[kept:])
    assert leaked_owners[kept:]


async def test_a_kernel_that_is_refused(emulated_gpu: Emulator) -> None:
    await kernel_is_loaded(emulated_gpu)
    stream = Stream()
    for _ in range(2):
        src, dst = on_device(SMALL, 1), bytearray(SMALL)
        emulated_gpu.hold()
        emulated_gpu.fail_call("cuLaunchKernel", 1, 1)
        async with calls() as start:
            call = start(copy_to_host(src, dst, stream=stream))
            await until(lambda: bool(streams_with(emulated_gpu, "copy")))
            await turns()
            emulated_gpu.release()
            await call.result()
        assert dst == bytes([1]) * SMALL
        await nothing_held()


@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to device"])
async def test_a_crowd_travels_by_the_kernel(emulated_gpu: Emulator, to_host: bool) -> None:
    await kernel_is_loaded(emulated_gpu)
    stream, count = Stream(), 200
    arrays = [on_device(SMALL, value) for value in range(count)]
    hosts = [pinned_array(SMALL, 255 - value) for value in range(count)]
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    launches, copies = _native.engine_scatter(0)[1], emulated_gpu.calls("cuMemcpyHtoDAsync")
    async with calls() as start:
        copy = copy_to_host if to_host else copy_to_device
        pairs = zip(arrays, hosts, strict=True) if to_host else zip(hosts, arrays, strict=True)
        begun = [start(copy(src, dst, stream=stream)) for src, dst in pairs]
        await turns()
        emulated_gpu.release(stream)
        for call in begun:
            await call.result()
    assert 0 < _native.engine_scatter(0)[1] - launches < count / 4
    assert emulated_gpu.calls("cuMemcpyHtoDAsync") - copies < count / 4
    for value, (array, host) in enumerate(zip(arrays, hosts, strict=True)):
        expected = value if to_host else 255 - value
        assert (host == expected).all()
        assert (array.to_numpy() == expected).all()


async def test_many_at_once_on_a_gpu() -> None:
    """Real or emulated: whichever road each takes, every byte is right."""
    arrays = [DeviceArray((4 + value,)) for value in range(500)]
    sources = [bytes([value % 256]) * (4 + value) for value in range(500)]
    targets = [bytearray(4 + value) for value in range(500)]
    for _ in range(3):
        async with anyio.create_task_group() as group:
            for source, array in zip(sources, arrays, strict=True):
                group.start_soon(copy_to_device, source, array)
        async with anyio.create_task_group() as group:
            for array, target in zip(arrays, targets, strict=True):
                group.start_soon(copy_to_host, array, target)
        assert targets == sources
        sources = [bytes([source[0] ^ 0xFF]) * len(source) for source in sources]


@pytest.mark.parametrize("code", [2, 700])
async def test_no_event_for_the_other_road(emulated_gpu: Emulator, code: int) -> None:
    """The second road is refused its event while the first is under way: errors, and nothing worse."""
    await kernel_is_loaded(emulated_gpu)
    src, stream = on_device(SMALL, 7), Stream()
    async with Copier(inline=False) as copier, calls() as start:
        emulated_gpu.hold()
        begun = [start(copier.copy_to_host(src, bytearray(SMALL), stream=stream))]
        await until(lambda: bool(streams_with(emulated_gpu, "copy")))
        emulated_gpu.fail_call("cuEventCreate", 1, code)
        for _ in range(12):
            begun.append(start(copier.copy_to_host(src, bytearray(SMALL), stream=stream)))
            await turns()
        emulated_gpu.release()
        for call in begun:
            await call.end()
            assert call.returned or isinstance(call.error, CudaError)
        emulated_gpu.reset()
    await nothing_held()


async def test_the_kernel_is_refused_while_the_copy_engine_is_late(emulated_gpu: Emulator) -> None:
    await kernel_is_loaded(emulated_gpu)
    src, stream = on_device(SMALL, 7), Stream()
    async with Copier() as copier, calls() as start:
        emulated_gpu.hold()
        first = start(copier.copy_to_host(src, bytearray(SMALL), stream=stream))
        await on_both_roads(emulated_gpu)
        await by_one_road(emulated_gpu, first, "kernel")
        # The copy engine is late, so the kernel is asked first.
        emulated_gpu.fail_call("cuLaunchKernel", 1, 1)
        dst = bytearray(SMALL)
        call = start(copier.copy_to_host(src, dst, stream=stream))
        await turns()
        emulated_gpu.release()
        await call.result()
        assert dst == bytes([7]) * SMALL
        await nothing_held()


async def test_what_is_behind_a_full_channel_is_dropped_at_once(emulated_gpu: Emulator) -> None:
    """Admitted, but not given to the device, which is busy with others for as long as it likes."""
    stream = Stream()
    sources = [pinned_array(BULK, 5) for _ in range(6)]
    targets = [on_device(BULK, 0) for _ in range(6)]
    before = _default_copier().stats().nbytes_direct
    emulated_gpu.hold()
    emulated_gpu.release(stream)
    async with calls() as start:

        def begin(index: int) -> Call:
            return start(copy_to_device(sources[index], targets[index], stream=stream.handle))

        first = [begin(index) for index in range(2)]
        await until(lambda: copies_enqueued(emulated_gpu) == 2)
        behind = [begin(index) for index in range(2, 6)]
        await until(lambda: _default_copier().stats().nbytes_direct >= 6 * BULK + before)
        for call in behind:
            call.cancel()
        for call in behind:
            await call.end()
            assert call.cancelled
        emulated_gpu.release()
        for call in first:
            await call.result()
    for index, target in enumerate(targets):
        assert (target.to_numpy() == (5 if index < 2 else 0)).all()


async def test_bare_addresses_have_one_road_and_are_waited_for(emulated_gpu: Emulator) -> None:
    """Nobody owns them, so the device must be done with them before the await returns."""
    await kernel_is_loaded(emulated_gpu)
    src, dst, stream = on_device(SMALL, 1), pinned_array(SMALL, 2), Stream()
    addresses = np.array([src.ptr], np.uint64), np.array([dst.ctypes.data], np.uint64)
    async with calls() as start:
        emulated_gpu.hold()
        call = start(copy_batch(stream, *addresses, sizes=SMALL))
        await until(lambda: bool(streams_with(emulated_gpu, "copy")))
        launches = _native.engine_scatter(0)[1]
        call.cancel()
        await turns(50)
        emulated_gpu.settle()
        assert not call.ended
        assert _native.engine_scatter(0)[1] == launches
        emulated_gpu.release()
        await call.end()
        assert call.cancelled
        assert (dst == 2).all()


# What is in a slot before a number comes.
NOTHING = 0xA5C396F15A3C690F
# Sizes and offsets: those that are read and written at once, and others.
NUMBERS = [(1, 0), (2, 2), (4, 4), (8, 8), (1, 3), (2, 1), (4, 2), (8, 4), (3, 0), (5, 0), (16, 0)]


@pytest.mark.parametrize("value", [0, 2**64 - 1, NOTHING ^ 1, NOTHING], ids=hex)
async def test_numbers_need_no_flag(emulated_gpu: Emulator, value: int) -> None:
    """The slot tells of them, unless they look like what was there before."""
    source, own = DeviceArray(64), threading.get_native_id()

    def calls_of_the_loop() -> Counter[str]:
        return Counter(call.entry_point for call in emulated_gpu.logged_calls() if call.thread_id == own)

    # Less than what makes the calls after it park.
    with road_times(number=0.008):
        async with Copier() as copier:
            for nbytes, offset in NUMBERS:
                content = (value.to_bytes(8, "little") * 2)[:nbytes]
                part = source[offset : offset + nbytes]
                await copy_to_device(content, part)
                needed = nbytes not in (1, 2, 4, 8) or offset % nbytes != 0 or value == NOTHING
                # After a slow way back to the GIL none goes inside its call for a while.
                deadline = time.monotonic() + PATIENCE
                while time.monotonic() < deadline:
                    emulated_gpu.reset()  # with it the log begins anew
                    emulated_gpu.call_log()
                    dst, before = bytearray(nbytes), copier.stats().inline_completions
                    await copier.copy_to_host(part, dst)
                    assert dst == content
                    # Where the one before is still under way it goes by the kernel.
                    calls = calls_of_the_loop()
                    if copier.stats().inline_completions > before and calls["cuMemcpyDtoHAsync"]:
                        # The kernel, by which one that is late goes as well, always has a flag.
                        flags = calls["cuStreamWriteValue32"] - calls["cuLaunchKernel"]
                        if flags == needed:
                            break
                        # One that comes after all that time has a flag as well, and none that needs one is without.
                        assert flags == 1, (nbytes, offset)
                else:
                    pytest.fail(f"never inside the call: {nbytes} bytes at {offset}")


async def test_numbers_are_those_that_are_there(gpu: Emulator | None) -> None:
    """Each read at once after it was written, through slots that others have been in before."""
    random, memory = np.random.default_rng(7), DeviceArray(64)
    for _ in range(100):
        for nbytes in (1, 2, 3, 4, 6, 8, 16):
            start = int(random.integers(0, 48))
            part, content = memory[start : start + nbytes], random.bytes(nbytes)
            await copy_to_device(content, part)
            assert await copy_to_host(part, bytearray(nbytes)) == content
