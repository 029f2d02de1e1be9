"""Many copies at once in one stream: the engine finds out by a few questions which of them may go on, and the loop does
not ask the stream for each."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from calls import Stream, calls, check, context_of, on_device, one_loop, turns, until
from cuda.bindings import driver

from aiocuda_copy import Copier, copy_to_host
from aiocuda_copy.testing import DeviceArray, Emulator

N = 200
WIDTH = 16
ROWS = np.arange(N * WIDTH, dtype=np.uint16).reshape(N, WIDTH)


class DeviceMemory:
    def __init__(self, ptr: int, nbytes: int) -> None:
        self._ptr, self._nbytes = ptr, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self._ptr, False), "shape": (self._nbytes,), "typestr": "|u1"}


def calls_of_this_thread(gpu: Emulator, name: str) -> int:
    return sum(call.entry_point == name and call.thread_id == threading.get_native_id() for call in gpu.logged_calls())


async def test_a_crowd_behind_a_kernel_is_let_on_by_a_few_questions(emulated_gpu: Emulator) -> None:
    stream = Stream()
    sources, targets = DeviceArray.from_numpy(ROWS), np.zeros_like(ROWS)
    emulated_gpu.hold(stream)
    async with calls() as start:
        crowd = []
        for source, target in zip(sources, targets, strict=True):
            emulated_gpu.kernel(stream)
            crowd.append(start(copy_to_host(source, target, stream=stream.handle)))
            await turns(2)
        assert emulated_gpu.pending(stream) == ["kernel", "event_record"] * N
        emulated_gpu.call_log()
        # Where the first mark that has not fired is differs each time.
        for before, fired in ((0, 1), (1, 2), (2, 77), (77, 78), (78, N - 1), (N - 1, N)):
            emulated_gpu.step(stream, 2 * (fired - before))
            for call in crowd[before:fired]:
                await call.result()
            emulated_gpu.settle()
            await turns()
            assert not any(call.ended for call in crowd[fired:])
            assert np.array_equal(targets[:fired], ROWS[:fired])
            assert not targets[fired:].any()
    asked = [call for call in emulated_gpu.logged_calls() if call.entry_point == "cuEventQuery" and call.result == 0]
    assert len(asked) < N / 2


async def test_a_crowd_in_an_idle_stream_is_marked(emulated_gpu: Emulator) -> None:
    stream = Stream()
    sources, targets = DeviceArray.from_numpy(ROWS), np.zeros_like(ROWS)
    async with Copier(inline=False) as copier, calls() as start:
        await copier.copy_to_host(sources[0], targets[0], stream=stream.handle)
        emulated_gpu.call_log()
        crowd = [
            start(copier.copy_to_host(source, target, stream=stream.handle))
            for source, target in zip(sources, targets, strict=True)
        ]
        for call in crowd:
            await call.result()
    assert np.array_equal(targets, ROWS)
    assert calls_of_this_thread(emulated_gpu, "cuStreamQuery") < N / 2
    assert calls_of_this_thread(emulated_gpu, "cuEventRecord") > N / 2


@one_loop  # Trio's order is random
async def test_a_crowd_over_many_streams_is_asked_for(emulated_gpu: Emulator) -> None:
    streams = [Stream() for _ in range(4)]
    sources, targets = DeviceArray.from_numpy(ROWS), np.zeros_like(ROWS)
    async with Copier(inline=False) as copier, calls() as start:
        emulated_gpu.call_log()
        crowd = [
            start(copier.copy_to_host(source, target, stream=streams[k % 4].handle))
            for k, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
        for call in crowd:
            await call.result()
    assert np.array_equal(targets, ROWS)
    # Each mark would have to be asked for by itself.
    assert calls_of_this_thread(emulated_gpu, "cuEventRecord") == 0


async def test_two_contexts_have_a_legacy_stream_each(emulated_gpu: Emulator) -> None:
    """They have one handle, and what one of them has come to says nothing of the other."""
    near = on_device(WIDTH, 1)
    with context_of(0):
        other = check(driver.cuCtxCreate(None, 0, 0))
        ptr = int(check(driver.cuMemAlloc(WIDTH)))
        check(driver.cuMemsetD8(ptr, 2, WIDTH))
        check(driver.cuStreamSynchronize(driver.CU_STREAM_LEGACY))
        emulated_gpu.hold(0)
        emulated_gpu.kernel(0)
        check(driver.cuCtxPopCurrent())
        emulated_gpu.hold(0)
        emulated_gpu.kernel(0)
        far = DeviceMemory(ptr, WIDTH)
        targets = [bytearray(WIDTH) for _ in range(4)]
        async with calls() as start:
            mine, theirs, mine_too, theirs_too = (
                start(copy_to_host(source, target, stream=0))
                for source, target in zip((near, far, near, far), targets, strict=True)
            )
            await until(lambda: len(emulated_gpu.pending(0)) == 3)
            check(driver.cuCtxPushCurrent(other))
            assert len(emulated_gpu.pending(0)) == 3
            emulated_gpu.release(0)
            check(driver.cuCtxPopCurrent())
            await theirs.result()
            await theirs_too.result()
            await turns()
            assert not mine.ended
            assert not mine_too.ended
            emulated_gpu.release(0)
            await mine.result()
            await mine_too.result()
    assert [target[0] for target in targets] == [1, 2, 1, 2]
    check(driver.cuMemFree(ptr))
    check(driver.cuCtxDestroy(other))
