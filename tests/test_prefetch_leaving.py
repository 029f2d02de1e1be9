"""How soon prefetch() and collect() are left, and what is closed then."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
from calls import PATIENCE, one_loop

from aiocuda_copy import CudaError, collect, prefetch
from aiocuda_copy._pinned import default_pool
from aiocuda_copy.testing import DeviceArray, Emulator


@one_loop
async def test_leaving_ends_between_two_arrays(gpu: Emulator | None) -> None:
    started = 0

    class Counted:
        """An array that tells when its copy begins."""

        def __init__(self) -> None:
            self._array = np.zeros(4, np.uint8)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **options: Any) -> Any:
            nonlocal started
            started += 1
            return self._array.__dlpack__()

    async with prefetch([[Counted() for _ in range(500)]]):
        with anyio.fail_after(60):
            while not started:
                await anyio.lowlevel.checkpoint()
    left = started
    assert 0 < left < 500
    await asyncio.sleep(0.01)  # in which others would start
    assert started == left


@pytest.mark.emulated_only
async def test_leaving_does_not_wait_for_memory(emulated_gpu: Emulator) -> None:
    array = DeviceArray(48 << 20)  # to drop it is a call of the driver's, which would wait
    default_pool().trim()
    emulated_gpu.hold_pinning()
    released = threading.Timer(PATIENCE, emulated_gpu.release_pinning)  # else a failure would be a hang
    released.start()
    async with collect([array]):
        await anyio.to_thread.run_sync(emulated_gpu.wait_for_waiting_threads)
    assert released.is_alive()
    released.cancel()
    emulated_gpu.release_pinning()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("turns", range(4))
async def test_closing_that_is_cancelled_closes_the_source(gpu: Emulator | None, turns: int) -> None:
    closed = []

    def source() -> Iterator[np.ndarray[Any, Any]]:
        try:
            while True:
                yield np.zeros(8, np.uint8)
        finally:
            closed.append(True)

    batches = prefetch(source())
    await anext(batches)
    closing = asyncio.create_task(batches.aclose())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    if turns == 0:  # it may not have begun
        await batches.aclose()
    assert closed == [True]


async def two(closed: list[bool], seconds: float) -> AsyncIterator[np.ndarray[Any, Any]]:
    try:
        yield np.zeros(1 << 20, np.uint8)
        await anyio.sleep(seconds)
        yield np.ones(1 << 20, np.uint8)
    finally:
        closed.append(True)


@pytest.mark.emulated_only
@pytest.mark.filterwarnings("error")
async def test_the_error_of_a_copy_while_the_source_waits(emulated_gpu: Emulator) -> None:
    """It is raised where trio makes a cancellation, whose context it is then."""
    closed: list[bool] = []
    batches = prefetch(two(closed, 60))
    async with batches:
        emulated_gpu.fail_operation("copy")
        with pytest.raises(CudaError):
            await anext(batches)
    assert closed == [True]
    emulated_gpu.reset()


@pytest.mark.filterwarnings("error")
async def test_an_error_of_the_consumer_while_the_source_waits(gpu: Emulator | None) -> None:
    closed: list[bool] = []

    async def consume() -> None:
        async with prefetch(two(closed, 60)) as batches:
            await anext(batches)
            await anyio.wait_all_tasks_blocked()
            raise LookupError("the consumer's")

    with pytest.raises(LookupError, match="the consumer's"):
        await consume()
    assert closed == [True]


async def test_a_generator_that_a_cancelled_wait_has_ended(gpu: Emulator | None) -> None:
    closed: list[bool] = []
    batches = prefetch(two(closed, 60), depth=1)
    await anext(batches)
    with anyio.move_on_after(0.001):
        await anext(batches)
    assert closed == [True]
    with pytest.raises(RuntimeError, match="ended by that; in 'async with prefetch"):
        await anext(batches)
    with pytest.raises(StopAsyncIteration):
        await anext(batches)
