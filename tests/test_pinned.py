"""The pinned pool on the emulated driver: what it costs, what it holds, and who gets memory back."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiocuda_copy import _native, _pinned
from aiocuda_copy._errors import ClosedError, CudaError, ForkedError
from aiocuda_copy._pinned import PinnedPool, default_limit, pinned_empty, pinned_empty_async, size_class
from aiocuda_copy.testing import Emulator

pytestmark = pytest.mark.emulated_only

MIB = 1 << 20
BACKENDS = ["asyncio", "trio"]


@pytest.fixture
def pool(emulated_gpu: Emulator) -> Iterator[PinnedPool]:
    before = emulated_gpu.live()["registrations"]
    pool = PinnedPool(64 * MIB)
    yield pool
    emulated_gpu.reset()
    gc.collect()
    pool.close()
    assert pool.stats().held_nbytes == 0
    assert emulated_gpu.live()["registrations"] == before


def attributes(array: np.ndarray) -> tuple[int, int, bool, int, int, int]:
    return _native.pointer_attributes(array.__array_interface__["data"][0])


# Hits and misses.


@pytest.mark.parametrize("shape", [1, (), 5000, (3, 5), 3 * MIB, np.int64(7), [2, 2]])
def test_arrays_are_page_locked_in_one_registration(pool: PinnedPool, shape: Any) -> None:
    array = pool.empty(shape, "<f8")
    assert array.shape == np.empty(shape).shape
    assert array.dtype == np.dtype("<f8")
    _, memory_type, managed, _, start, nbytes = attributes(array)
    assert (memory_type, managed) == (1, False)
    address = array.__array_interface__["data"][0]
    assert start <= address
    assert address + array.nbytes <= start + nbytes
    array[...] = 1
    assert array.sum() == array.size


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, MIB, 2 * MIB, 9 * MIB])
def test_a_hit_makes_no_driver_call(emulated_gpu: Emulator, pool: PinnedPool, nbytes: int) -> None:
    array = pool.empty(nbytes)
    address = array.__array_interface__["data"][0]
    del array
    emulated_gpu.reset()
    for _ in range(10):
        array = pool.empty(nbytes)
        assert array.__array_interface__["data"][0] == address
        del array
        found = pool.try_empty(nbytes)
        assert found is not None
        assert found.__array_interface__["data"][0] == address
        del found
    assert emulated_gpu.calls() == 0
    stats = pool.stats()
    assert (stats.hits, stats.misses, stats.in_use_nbytes) == (20, 1, 0)


def test_small_arrays_share_a_registration(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    arrays = [pool.empty(4096) for _ in range(512)]
    assert emulated_gpu.calls("cuMemHostRegister") == 1
    assert len({array.__array_interface__["data"][0] for array in arrays}) == 512
    assert pool.stats().in_use_nbytes == pool.stats().held_nbytes == 2 * MIB
    for number, array in enumerate(arrays):
        array[:] = number % 251
    assert all((array == number % 251).all() for number, array in enumerate(arrays))


def test_nothing_at_hand_is_none_and_makes_no_driver_call(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    pool.empty(1)
    emulated_gpu.reset()
    assert pool.try_empty(MIB) is None
    assert emulated_gpu.calls() == 0


def test_a_block_that_is_a_little_too_large_is_used(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    pool.empty(10 * MIB)
    assert pool.try_empty(8 * MIB) is not None
    assert pool.try_empty(6 * MIB) is None


@given(st.integers(1, 1 << 40))
def test_size_classes_waste_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % 4096 == 0
    assert size_class(size) == size
    if nbytes > 2 * MIB:
        assert size % (2 * MIB) == 0
        assert size - nbytes < max(2 * MIB, nbytes / 8 + 1)
    else:
        assert size < max(2 * nbytes, 4097)


def test_empty_arrays_need_no_memory(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    assert pool.empty((3, 0)).shape == (3, 0)
    assert pool.try_empty(0, "f4") is not None
    assert pool.stats().held_nbytes == 0


def test_what_cannot_be_an_array_is_refused(pool: PinnedPool) -> None:
    with pytest.raises(TypeError, match="Python objects"):
        pool.empty(3, object)
    with pytest.raises(ValueError, match="negative"):
        pool.empty((3, -1))
    with pytest.raises(TypeError):
        pool.empty("3")
    with pytest.raises(ValueError, match="negative"):
        PinnedPool(-1)


# Whose the memory is.


def test_views_keep_the_memory(pool: PinnedPool) -> None:
    array = pool.empty((4, 1024), "u1")
    view = array[1:, ::2].T
    raw = memoryview(view[0])
    del array, view
    assert pool.stats().in_use_nbytes == 4096
    del raw
    assert pool.stats().in_use_nbytes == 0


def test_memory_comes_back_from_another_thread(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    arrays = [pool.empty(MIB) for _ in range(3)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert pool.stats().in_use_nbytes == 0
    emulated_gpu.reset()
    again = [pool.empty(MIB) for _ in range(3)]
    assert emulated_gpu.calls() == 0
    assert len(again) == 3


def test_memory_comes_back_from_the_garbage_collector_in_the_middle_of_anything(pool: PinnedPool) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.array = pool.empty(5000)

        def __del__(self) -> None:
            # A finalizer that uses the pool itself, wherever it interrupts it.
            pool.empty(5000)[:] = 1

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            Cycle()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert pool.stats().in_use_nbytes == 0


def test_threads_never_share_memory(pool: PinnedPool) -> None:
    wrong: list[int] = []

    def work(mark: int) -> None:
        generator = np.random.default_rng(mark)
        for _ in range(300):
            array = pool.empty(int(generator.integers(1, 200_000)))
            array[:] = mark
            if generator.random() < 0.1:
                time.sleep(0)
            if (array != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    stats = pool.stats()
    assert (stats.in_use_nbytes, stats.hits + stats.misses) == (0, 1200)


def test_reused_memory_is_zeroed_when_asked_for(emulated_gpu: Emulator) -> None:
    pool = PinnedPool(64 * MIB, zero_on_reuse=True)
    for nbytes in (10_000, 3 * MIB):
        pool.empty(nbytes)[:] = 7
        assert not pool.empty(nbytes).any()
    assert pool.try_empty(10_000) is not None
    # Zeroing that would be felt is left to the call that may take long.
    assert pool.try_empty(3 * MIB) is None
    pool.close()


# Limits.


def test_the_limit_holds(emulated_gpu: Emulator) -> None:
    pool = PinnedPool(10 * MIB)
    arrays = [pool.empty(2 * MIB) for _ in range(5)]
    assert pool.try_empty(1) is None
    with pytest.raises(MemoryError, match="of at most 10485760, 10485760 of them in use"):
        pool.empty(1)
    assert pool.stats().refusals == 1
    arrays.pop()
    assert pool.empty(1).nbytes == 1
    arrays.clear()
    # Free memory of other sizes makes room.
    assert pool.empty(10 * MIB).nbytes == 10 * MIB
    assert pool.stats().held_nbytes == 10 * MIB
    pool.close()


def test_a_tiny_limit_is_used_to_the_full(emulated_gpu: Emulator) -> None:
    pool = PinnedPool(8192)
    first, second = pool.empty(4096), pool.empty(1)
    with pytest.raises(MemoryError):
        pool.empty(1)
    pool.limit_nbytes = 3 * 4096
    third = pool.empty(1)
    assert pool.stats().in_use_nbytes == 12288
    del first, second, third
    assert pool.trim(1) == 4096
    assert pool.trim() == 8192
    assert pool.limit_nbytes == 12288


@pytest.mark.parametrize("code", [1, 2, 304, 801])
def test_a_refusal_shrinks_the_limit(emulated_gpu: Emulator, pool: PinnedPool, code: int) -> None:
    held = pool.empty(4 * MIB)
    emulated_gpu.fail_call("cuMemHostRegister", code=code)
    with pytest.raises(MemoryError, match="limit is now 8388608 bytes, of which it holds 4194304") as caught:
        pool.empty(8 * MIB)
    assert isinstance(caught.value.__cause__, CudaError)
    assert caught.value.__cause__.code == code
    stats = pool.stats()
    assert (stats.limit_nbytes, stats.held_nbytes, stats.refusals) == (8 * MIB, held.nbytes, 1)
    pool.empty(4 * MIB)


def test_the_limit_finds_what_the_driver_allows(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    emulated_gpu.limit_memory(pinned_nbytes=emulated_gpu.pinned_nbytes + 11 * MIB)
    held = []
    while pool.limit_nbytes > pool.stats().held_nbytes + 2 * MIB:
        try:
            held.append(pool.empty(4 * MIB))
        except MemoryError:
            continue
    assert pool.stats().held_nbytes == 8 * MIB
    assert pool.limit_nbytes == 10 * MIB


def test_a_device_fault_is_no_refusal(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    emulated_gpu.fail_call("cuMemHostRegister", code=700)
    with pytest.raises(CudaError) as caught:
        pool.empty(1)
    assert caught.value.sticky
    assert (pool.limit_nbytes, pool.stats().held_nbytes) == (64 * MIB, 0)


def test_memory_that_the_driver_keeps_is_not_unmapped(emulated_gpu: Emulator) -> None:
    pool = PinnedPool(64 * MIB)
    array = pool.empty(4 * MIB)
    address = array.__array_interface__["data"][0]
    del array
    emulated_gpu.fail_call("cuMemHostUnregister", code=700)
    assert pool.trim() == 0
    assert pool.stats().held_nbytes == 4 * MIB
    ctypes.memset(address, 1, 4 * MIB)
    assert _native.host_unregister(address) == 0


def test_a_closed_pool_takes_its_memory_back_later(emulated_gpu: Emulator) -> None:
    registered = emulated_gpu.live()["registrations"]
    pool = PinnedPool(64 * MIB)
    array = pool.empty(2 * MIB)
    pool.close()
    with pytest.raises(ClosedError):
        pool.try_empty(1)
    array[:] = 1
    del array
    other = PinnedPool(64 * MIB)
    other.empty(1)
    assert pool.stats().held_nbytes == 0
    other.close()
    assert emulated_gpu.live()["registrations"] == registered


def test_a_dropped_pool_does_too(emulated_gpu: Emulator) -> None:
    registered = emulated_gpu.live()["registrations"]
    pool = PinnedPool(64 * MIB)
    array = pool.empty(2 * MIB)
    del pool
    gc.collect()
    array[:] = 1
    other = PinnedPool(64 * MIB)
    other.empty(1)
    assert emulated_gpu.live()["registrations"] == registered + 2
    del array
    other.empty(1), other.empty(4 * MIB)
    other.close()
    assert emulated_gpu.live()["registrations"] == registered


def test_the_default_limit_is_a_part_of_what_there_is(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < default_limit() <= total // 4
    for path, content in {
        "proc/self/cgroup": "0::/a/b\n3:cpu,memory:/old\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": "8000\n",
        "sys/fs/cgroup/memory/old/memory.limit_in_bytes": "9000\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert sorted(_pinned._cgroup_limits(f"{tmp_path}/")) == [8000, 9000]
    monkeypatch.setattr(_pinned, "_cgroup_limits", lambda: [8000, 9000])
    assert default_limit() == 2000


# The driver's side.


def test_growing_needs_no_current_context_and_changes_none(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    from cuda.bindings import driver

    def current() -> int:
        return int(driver.cuCtxGetCurrent()[1])

    found: list[Any] = []

    def work() -> None:
        found.append(current())
        found.append(pool.empty(MIB, device=1))
        found.append(current())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (found[0], found[2]) == (0, 0)
    assert attributes(found[1])[3] == 1


def test_growing_leaves_a_capture_of_another_thread_alone(emulated_gpu: Emulator, pool: PinnedPool) -> None:
    from cuda.bindings import driver

    pool.empty(1)
    _, context = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(context)
    _, stream = driver.cuStreamCreate(1)
    driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def work() -> None:
        pool.empty(5 * MIB)
        pool.trim()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    code, graph = driver.cuStreamEndCapture(stream)
    assert int(code) == 0
    driver.cuGraphDestroy(graph)
    driver.cuStreamDestroy(stream)
    driver.cuCtxSetCurrent(driver.CUcontext(0))
    driver.cuDevicePrimaryCtxRelease(0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_growing_does_not_hold_the_loop(emulated_gpu: Emulator, pool: PinnedPool, backend: str) -> None:
    ticks = []

    async def main() -> None:
        emulated_gpu.hold_pinning()
        async with anyio.create_task_group() as group:
            arrays: list[np.ndarray] = []

            async def grow() -> None:
                arrays.append(await pool.empty_async((2, MIB)))

            group.start_soon(grow)
            await anyio.to_thread.run_sync(emulated_gpu.wait_for_waiting_threads)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
                ticks.append(len(arrays))
            emulated_gpu.release_pinning()
        assert arrays[0].shape == (2, MIB)
        emulated_gpu.reset()
        arrays.clear()
        assert (await pool.empty_async((2, MIB))).shape == (2, MIB)
        assert emulated_gpu.calls() == 0

    anyio.run(main, backend=backend)
    assert ticks == [0] * 10


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_waits_for_growth_that_is_not_wanted_any_more(
    emulated_gpu: Emulator, backend: str, closed: bool
) -> None:
    pool, other = PinnedPool(64 * MIB), PinnedPool(64 * MIB)

    async def main() -> None:
        emulated_gpu.hold_pinning()
        async with anyio.create_task_group() as group:
            group.start_soon(pool.empty_async, 2 * MIB)
            await anyio.to_thread.run_sync(emulated_gpu.wait_for_waiting_threads)
            group.cancel_scope.cancel()
        assert pool.stats().misses == 1
        assert not pool._slabs
        if closed:
            pool.close()
        emulated_gpu.release_pinning()
        with anyio.fail_after(60):
            while not pool._slabs or pool.stats().in_use_nbytes:  # noqa: ASYNC110 - no event tells of it
                await anyio.sleep(0.001)

    anyio.run(main, backend=backend)
    if not closed:
        assert pool.try_empty(2 * MIB) is not None
        pool.close()
    other.empty(1)
    assert not pool._slabs
    other.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_growth_that_is_cancelled_leaves_the_memory_to_the_pool(
    emulated_gpu: Emulator, pool: PinnedPool, backend: str
) -> None:
    async def main() -> None:
        with anyio.move_on_after(0):
            await pool.empty_async(MIB)
            pytest.fail("a pending cancellation comes first")

    anyio.run(main, backend=backend)
    assert pool.stats().in_use_nbytes == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_public_functions(emulated_gpu: Emulator, backend: str) -> None:
    array = pinned_empty((2, 3), np.float32)
    again = anyio.run(pinned_empty_async, (4,), "u2", backend=backend)
    assert (array.shape, array.dtype, again.shape, again.dtype) == ((2, 3), np.float32, (4,), np.uint16)
    assert attributes(array)[1] == attributes(again)[1] == 1


# Forks and exits.


def exit_of_child(run: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()
            os._exit(run())
        except BaseException:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_arrays_and_gets_no_new_ones(pool: PinnedPool) -> None:
    array = pool.empty(5 * MIB)
    array[:] = 42
    small = pool.empty(10)
    small[:] = 43
    spare = pool.empty(20 * MIB)
    free = memoryview(spare)  # type: ignore[arg-type]
    address = spare.__array_interface__["data"][0]
    del spare, free
    assert exit_of_child(lambda: int(array[-1])) == 42
    assert exit_of_child(lambda: int(small[-1])) == 43

    def ask() -> int:
        try:
            pool.try_empty(10)
        except ForkedError:
            array[:] = 1
            return 7
        return 0

    assert exit_of_child(ask) == 7
    assert array[0] == 42
    # Free memory is not copied into children.
    assert exit_of_child(lambda: ctypes.string_at(address, 1)[0]) == -signal.SIGSEGV


def test_exit_with_arrays_alive_is_quiet() -> None:
    script = """
import threading, sys
from aiocuda_copy import testing
testing.use_emulated_driver()
from aiocuda_copy._pinned import pinned_empty, pinned
import numpy as np
keep = [pinned_empty(n) for n in (10, 3 << 20)]
class Cycle: pass
c = Cycle(); c.me = c; c.array = pinned_empty(99)
sys.modules["keep"] = keep[0]
with pinned(np.zeros(10)):
    threading.Thread(target=lambda: keep.append(pinned_empty(5))).start()
    sys.exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_makes_no_driver_call() -> None:
    script = """
import sys, threading
import aiocuda_copy._pinned
assert "cuda.bindings.driver" not in sys.modules
assert threading.active_count() == 1
from aiocuda_copy import testing
emulator = testing.use_emulated_driver()
aiocuda_copy._pinned.PinnedPool()
assert emulator.calls() == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
