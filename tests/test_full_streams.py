"""While some thread is blocked because the driver takes no more, which delays neither the loop nor other copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest
from calls import (
    PATIENCE,
    SMALL,
    Stream,
    calls,
    check,
    forget_the_kernel,
    on_device,
    pinned_array,
    turns,
    use_device,
)
from cuda.bindings import driver

from aiocuda_copy import Copier, _native, copy_batch
from aiocuda_copy.testing import Emulator

# Measured: what the channels of one direction take behind a kernel.
PLACES, CHANNELS = 1021, 4
# So many seconds a call is made to wait, and for so many at least none is tried inside then.
WAIT, PARKED = 0.02, 2.0
LONG_WAIT, LONG_PARKED = 0.2, 10.0
# After a call that took a millisecond, the way back to the GIL included, copies park for a while.
QUICK = 0.0009


@contextmanager
def full(gpu: Emulator, n: int, *, beside: int = 0) -> Iterator[list[Stream]]:
    """Streams that hold so many copies to the host that a thread waits in the next call until one is released, beside
    so many that wait already."""
    streams = [Stream() for _ in range(n)]
    src, dst = on_device(4, 1), pinned_array(4, 0)
    for stream in streams:
        gpu.hold(stream)

    def fill() -> None:
        use_device()
        # The first is with the hardware, and takes no place.
        for index in range(n * (PLACES + 1) + 1):
            check(driver.cuMemcpyAsync(dst.ctypes.data, src.ptr, 4, streams[index % n].handle))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        gpu.wait_for_waiting_threads(1 + beside)
        yield streams
    finally:
        for stream in streams:
            gpu.release(stream)
        thread.join()


@pytest.mark.parametrize("inline", [True, False])
async def test_only_what_comes_after_a_busy_stream_waits(emulated_gpu: Emulator, inline: bool) -> None:
    """The driver holds up every launch of a host function then, and the library has one launched behind a long wait."""
    src, busy = on_device(SMALL, 1), Stream()
    async with Copier(inline=inline) as copier, calls() as start:
        with full(emulated_gpu, 1):
            earlier = len(emulated_gpu.waits())
            emulated_gpu.hold(busy)
            emulated_gpu.kernel(busy)
            waiting = start(copier.copy_to_host(src, bytearray(SMALL), stream=busy))
            await turns()
            # The one that fills, and the one that launches.
            emulated_gpu.wait_for_waiting_threads(2)
            assert [wait.entry_point for wait in emulated_gpu.waits()[earlier:]] == ["cuLaunchHostFunc"]
            assert await copier.copy_to_host(src, bytearray(SMALL), stream=Stream()) == bytes([1]) * SMALL
            assert not waiting.ended
            emulated_gpu.release(busy)
            assert await waiting.result() == bytes([1]) * SMALL
            assert threading.get_native_id() not in {wait.thread_id for wait in emulated_gpu.waits()[earlier:]}


def enqueued_by_this_thread(gpu: Emulator) -> int:
    own = threading.get_native_id()
    return sum(call.thread_id == own for call in gpu.logged_calls() if call.entry_point.startswith("cuMemcpy"))


async def until_copies_end_inside(gpu: Emulator, copy: Callable[[], Awaitable[object]]) -> None:
    """Until what the calls need is open, and one was so quick that those after it do not park."""
    gpu.call_log()
    with anyio.fail_after(PATIENCE):
        before, took = enqueued_by_this_thread(gpu), 1.0
        while enqueued_by_this_thread(gpu) == before or took > QUICK:
            before, begin = enqueued_by_this_thread(gpu), time.perf_counter()
            await copy()
            took = time.perf_counter() - begin


# Under one, no call is so quick that those after it do not park.
@pytest.mark.no_sanitizer
async def test_after_a_call_that_waited_copies_park(emulated_gpu: Emulator) -> None:
    """With all channels of a direction full any copy may be made to wait; the loop is held up by one at most."""
    src, dst, idle = on_device(SMALL, 1), bytearray(SMALL), Stream()
    released = 0.0

    def enqueued_by_the_loop() -> int:
        return enqueued_by_this_thread(emulated_gpu)

    async with Copier() as copier:
        await until_copies_end_inside(emulated_gpu, lambda: copier.copy_to_host(src, dst, stream=idle))
        with full(emulated_gpu, CHANNELS) as streams:

            def release() -> None:
                nonlocal released
                emulated_gpu.wait_for_waiting_threads(2)
                time.sleep(WAIT)  # nothing is waited for: the loop's call is held up for so long
                released = time.monotonic()
                for stream in streams:
                    emulated_gpu.release(stream)

            thread = threading.Thread(target=release)
            thread.start()
            before, earlier = enqueued_by_the_loop(), len(emulated_gpu.waits())
            await copier.copy_to_host(src, dst, stream=idle)
            assert enqueued_by_the_loop() == before + 1
            own = [wait for wait in emulated_gpu.waits()[earlier:] if wait.thread_id == threading.get_native_id()]
            assert [wait.entry_point for wait in own] == ["cuMemcpyDtoHAsync"]
            await copier.copy_to_host(src, dst, stream=idle)
            assert enqueued_by_the_loop() == before + 1 or time.monotonic() > released + PARKED
            thread.join()


# Under one, no call is so quick that those after it do not park.
@pytest.mark.no_sanitizer
async def test_what_waits_while_the_kernel_is_loaded_parks_nothing(emulated_gpu: Emulator) -> None:
    """The driver may have to compile it, once; a copy that waits for that is no sign of full channels, after which none
    would end inside its call for a hundred times as long."""
    src, dst, idle, busy = on_device(SMALL, 1), bytearray(SMALL), Stream(), Stream()
    async with Copier() as copier:

        async def copy() -> None:
            await copier.copy_to_host(src, dst, stream=idle)

        # Loading waits for kernels that run; copies that park may keep all else from happening for longer.
        with anyio.fail_after(PATIENCE):
            loading = False
            while not loading:
                await forget_the_kernel(emulated_gpu)
                emulated_gpu.kernel(busy, 1500.0)
                await until_copies_end_inside(emulated_gpu, copy)
                await copy_batch(0, [src] * 64, list(pinned_array(64 * SMALL, 0).reshape(64, SMALL)))
                loading = _native.engine_scatter(0)[0] == "loading"
        with full(emulated_gpu, CHANNELS, beside=1) as streams:

            def release() -> None:
                emulated_gpu.wait_for_waiting_threads(3)
                time.sleep(LONG_WAIT)  # nothing is waited for: the loop's call is held up for so long
                for stream in streams:
                    emulated_gpu.release(stream)

            thread = threading.Thread(target=release)
            thread.start()
            before = enqueued_by_this_thread(emulated_gpu)
            await copy()
            assert enqueued_by_this_thread(emulated_gpu) == before + 1
            thread.join()
        with anyio.fail_after(LONG_PARKED):
            await until_copies_end_inside(emulated_gpu, copy)
