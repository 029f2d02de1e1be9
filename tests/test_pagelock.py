"""Page-locking of arrays that exist already, on the emulated driver."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from aiocuda_copy import _driver, _native, _pagelock
from aiocuda_copy._errors import CudaError
from aiocuda_copy._pinned import PinnedPool, pinned
from aiocuda_copy.testing import Emulator

pytestmark = pytest.mark.emulated_only

BACKENDS = ["asyncio", "trio"]
PAGE = 4096


@pytest.fixture
def gpu(emulated_gpu: Emulator) -> Iterator[Emulator]:
    _driver.ensure()
    before = emulated_gpu.live()["registrations"]
    yield emulated_gpu
    emulated_gpu.reset()
    assert emulated_gpu.live()["registrations"] == before
    assert not _pagelock._registrations


@pytest.fixture
def array() -> np.ndarray:
    return np.zeros(64 * PAGE, np.uint8)


def is_locked(data: Any) -> bool:
    return _native.pointer_attributes(_native.buffer_address(data))[1] == 1


def join_workers() -> None:
    """A cancelled wait leaves its thread to finish; the loop tells it to end, but does not wait."""
    for thread in threading.enumerate():
        if "AnyIO" in thread.name:
            thread.join(10)


def test_an_array_is_locked_inside_and_not_outside(gpu: Emulator, array: np.ndarray) -> None:
    assert not is_locked(array)
    with pinned(array) as same:
        assert same is array
        assert is_locked(array)
        assert is_locked(array[-1:])
    assert not is_locked(array)
    assert gpu.calls("cuMemHostRegister") == gpu.calls("cuMemHostUnregister") == 1


@pytest.mark.parametrize(
    "data", [bytearray(10_000), b"x" * 5000, np.zeros((30, 40))[::2, 3:7], memoryview(bytearray(9))]
)
def test_host_memory_of_every_kind(gpu: Emulator, data: Any) -> None:
    with pinned(data):
        assert is_locked(data)
    assert not is_locked(data)


def test_it_nests(gpu: Emulator, array: np.ndarray) -> None:
    lock = pinned(array)
    with lock, pinned(array), lock:
        assert is_locked(array)
    assert not is_locked(array)
    assert gpu.calls("cuMemHostRegister") == 1


def test_the_last_one_to_leave_unlocks_in_any_order_and_any_thread(gpu: Emulator, array: np.ndarray) -> None:
    outer, inner = pinned(array), pinned(array[5 * PAGE : 7 * PAGE])
    outer.__enter__()
    thread = threading.Thread(target=inner.__enter__)
    thread.start()
    thread.join()
    assert gpu.calls("cuMemHostRegister") == 1
    outer.__exit__(None, None, None)
    assert is_locked(array[5 * PAGE :])
    inner.__exit__(None, None, None)
    assert not is_locked(array)


def test_only_the_gaps_of_an_overlap_are_registered(gpu: Emulator, array: np.ndarray) -> None:
    with pinned(array[10:20_000]), pinned(array[50_000:60_000]):
        with pinned(array):
            assert gpu.calls("cuMemHostRegister") == 5
            assert all(is_locked(array[at:]) for at in range(0, array.size, 1000))
        assert is_locked(array[10:])
        assert not is_locked(array[20_000:])
        assert is_locked(array[50_000:])
    assert gpu.calls("cuMemHostUnregister") == 5


def test_what_somebody_else_has_registered_is_left_alone(gpu: Emulator, array: np.ndarray) -> None:
    address = _native.buffer_address(array)
    assert _native.host_register(address, array.nbytes, 1) == 0
    with pinned(array), pinned(array[:100]):
        assert is_locked(array)
    assert is_locked(array)
    assert _native.host_unregister(address) == 0


def test_arrays_of_the_pool_are_locked_already(gpu: Emulator) -> None:
    pool = PinnedPool(1 << 22)
    data = pool.empty(10_000)
    with pinned(data):
        assert is_locked(data)
    assert is_locked(data)
    del data
    pool.close()


def test_an_empty_array_has_nothing_to_lock(gpu: Emulator) -> None:
    with pinned(np.zeros(0)), pinned(bytearray()):
        pass
    assert gpu.calls("cuMemHostRegister") == 0


def test_a_read_only_mapping_is_registered_as_one(gpu: Emulator) -> None:
    data = np.frombuffer(mmap.mmap(-1, PAGE, prot=mmap.PROT_READ), np.uint8)
    gpu.fail_call("cuMemHostRegister", code=1)  # as the driver does for want of the flag
    with pinned(data):
        assert is_locked(data)
    assert gpu.calls("cuMemHostRegister") == 2


def test_a_refusal_is_an_error_that_leaves_nothing_behind(gpu: Emulator, array: np.ndarray) -> None:
    with pinned(array[:PAGE]):
        gpu.fail_call("cuMemHostRegister", code=2)
        with pytest.raises(CudaError, match="cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY"), pinned(array):
            pytest.fail("it was refused")
        assert is_locked(array)
    assert not is_locked(array)


def test_what_was_unregistered_behind_our_back_is_no_error(gpu: Emulator, array: np.ndarray) -> None:
    with pinned(array):
        assert _native.host_unregister(_native.buffer_address(array)) == 0


def test_device_memory_is_refused(gpu: Emulator) -> None:
    from aiocuda_copy.testing import DeviceArray

    with pytest.raises(ValueError, match="host memory"):
        pinned(DeviceArray.from_numpy(np.zeros(10)))
    with pytest.raises(TypeError, match="Python objects"):
        pinned(np.array([object()]))
    with pytest.raises(TypeError, match="takes a NumPy array"):
        pinned(5)


def test_threads_that_nest_at_once(gpu: Emulator, array: np.ndarray) -> None:
    wrong = []

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(100):
            start, end = sorted(generator.integers(0, array.size, 2))
            part = array[start : end + 1]
            with pinned(part):
                if not (is_locked(part) and is_locked(part[-1:])):
                    wrong.append((start, end))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_locking_does_not_hold_the_loop(gpu: Emulator, array: np.ndarray, backend: str) -> None:
    async def main() -> None:
        inside = anyio.Event()
        leave = anyio.Event()

        async def lock() -> None:
            async with pinned(array) as same:
                assert same is array
                inside.set()
                await leave.wait()

        async with anyio.create_task_group() as group:
            gpu.hold_pinning()
            group.start_soon(lock)
            await anyio.to_thread.run_sync(gpu.wait_for_waiting_threads)
            await anyio.lowlevel.checkpoint()
            assert not inside.is_set()
            gpu.release_pinning()
            await inside.wait()
            assert is_locked(array)
            async with pinned(array):
                leave.set()
        assert not is_locked(array)

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_inside_it_is_left_all_the_same(gpu: Emulator, array: np.ndarray, backend: str) -> None:
    async def main() -> None:
        with anyio.CancelScope() as scope:
            async with pinned(array):
                scope.cancel()
                await anyio.sleep(1)
        assert scope.cancelled_caught
        assert not is_locked(array)

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("while_locking", [True, False])
def test_a_task_that_is_cancelled_while_it_locks_or_unlocks(
    gpu: Emulator, array: np.ndarray, while_locking: bool
) -> None:
    async def main() -> None:
        inside = asyncio.Event()

        async def lock() -> None:
            async with pinned(array):
                inside.set()
                if not while_locking:
                    gpu.hold_pinning()

        if while_locking:
            gpu.hold_pinning()
        task = asyncio.create_task(lock())
        await asyncio.to_thread(gpu.wait_for_waiting_threads)
        if not while_locking:
            # The cancelled task finishes what its thread has begun.
            threading.Timer(0.05, gpu.release_pinning).start()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert inside.is_set() is not while_locking
        gpu.release_pinning()

    asyncio.run(main())
    join_workers()
    assert not is_locked(array)


@pytest.mark.parametrize("turns", range(10))
def test_a_task_that_is_cancelled_early(gpu: Emulator, array: np.ndarray, turns: int) -> None:
    async def lock() -> None:
        async with pinned(array):
            pass

    async def main() -> None:
        task = asyncio.create_task(lock())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    join_workers()
    assert not is_locked(array)
