"""Which stream a copy is ordered in, on which device, from which thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from cuda.bindings import driver
from kinds import check, context_of, need_two_devices, one_loop, pattern, stream_of

from aiocuda_copy import copy_batch, copy_to_device, copy_to_host, pinned_empty, synchronize
from aiocuda_copy.testing import DeviceArray

SIZES = [64, 100_000]


class Named:
    """A stream by the protocol alone."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class Begun:
    """A call that has been made and has not ended."""

    def __init__(self) -> None:
        self.ended = False

    async def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        await call(*args, **kwargs)
        self.ended = True


async def passed_by(device: int = 0) -> None:
    """Copies on an idle stream, small and large: whatever the engine could have done before them is done now."""
    with stream_of(device) as stream:
        for nbytes in SIZES:
            array = DeviceArray(nbytes, device=device)
            await copy_to_host(array, np.empty(nbytes, np.uint8), stream=stream)
            await copy_to_device(np.empty(nbytes, np.uint8), array, stream=stream)
            await copy_to_device(DeviceArray(nbytes, device=device), array, stream=stream)


def enqueue_update(array: DeviceArray, fresh: DeviceArray, stream: int) -> None:
    """Work in a stream that a copy must come after: an array gets new contents."""
    with context_of(array.device):
        check(driver.cuMemcpyDtoDAsync(array.ptr, fresh.ptr, fresh.nbytes, stream))


async def assert_ordered(emulator: Any, handle: int, stream: Any, nbytes: int, device: int = 0) -> None:
    """Copies to the host, both sizes, come after what is in the stream, and those to the device too."""
    data = pattern(nbytes)
    source = DeviceArray.from_numpy(np.zeros(nbytes, np.uint8), device=device)
    target = DeviceArray.from_numpy(np.zeros(nbytes, np.uint8), device=device)
    host, seen = np.zeros(nbytes, np.uint8), DeviceArray(nbytes, device=device)
    fresh = DeviceArray.from_numpy(data, device=device)
    with context_of(device):
        emulator.hold(handle)
    enqueue_update(source, fresh, handle)
    # vllm-project/vllm#47282: what reads the destination before the copy reads what was there.
    with context_of(device):
        check(driver.cuMemcpyDtoDAsync(seen.ptr, target.ptr, nbytes, handle))
    to_host, to_device = Begun(), Begun()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: to_host.run(copy_to_host, source, host, stream=stream))
        group.start_soon(lambda: to_device.run(copy_to_device, data, target, stream=stream))
        await passed_by(device)
        assert not to_host.ended
        assert not to_device.ended
        with context_of(device):
            emulator.release(handle)
    assert np.array_equal(host, data)
    assert np.array_equal(target.to_numpy(), data)
    assert not seen.to_numpy().any()


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("handle", [0, 1])
async def test_the_legacy_stream(emulated_gpu: Any, handle: int, nbytes: int) -> None:
    await assert_ordered(emulated_gpu, handle, handle, nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
async def test_the_per_thread_stream(emulated_gpu: Any, nbytes: int) -> None:
    await assert_ordered(emulated_gpu, 2, 2, nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
async def test_none_is_the_legacy_stream(emulated_gpu: Any, nbytes: int) -> None:
    # sgl-project/sglang#20611: a copy that races the producer.
    await assert_ordered(emulated_gpu, 0, None, nbytes)


@pytest.mark.parametrize("form", [int, Named], ids=["int", "__cuda_stream__"])
@pytest.mark.parametrize("blocking", [False, True], ids=["non-blocking", "blocking"])
@pytest.mark.parametrize("nbytes", SIZES)
async def test_own_streams(emulated_gpu: Any, nbytes: int, blocking: bool, form: Callable[[int], Any]) -> None:
    with stream_of(0, blocking=blocking) as handle:
        await assert_ordered(emulated_gpu, handle, form(handle), nbytes)


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_stream_of_cuda_core(emulated_gpu: Any, nbytes: int) -> None:
    from cuda.core import Device

    with context_of(0):
        device = Device(0)
        device.set_current()
        stream = device.create_stream()
        await assert_ordered(emulated_gpu, int(stream.handle), stream, nbytes)
        stream.close()


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_blocking_stream_comes_after_the_legacy_one(emulated_gpu: Any, nbytes: int) -> None:
    data = pattern(nbytes)
    host = np.zeros(nbytes, np.uint8)
    source, fresh = DeviceArray.from_numpy(np.zeros(nbytes, np.uint8)), DeviceArray.from_numpy(data)
    with stream_of(0, blocking=True) as stream, context_of(0):
        emulated_gpu.hold(0)
        enqueue_update(source, fresh, 0)
        begun = Begun()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: begun.run(copy_to_host, source, host, stream=stream))
            await passed_by()
            assert not begun.ended
            emulated_gpu.release(0)
        assert np.array_equal(host, data)


@pytest.mark.parametrize("nbytes", SIZES)
async def test_a_non_blocking_stream_does_not_wait_for_the_legacy_one(emulated_gpu: Any, nbytes: int) -> None:
    source = DeviceArray.from_numpy(pattern(nbytes))
    with stream_of(0) as stream, context_of(0):
        emulated_gpu.hold(0)
        emulated_gpu.kernel(0)
        found = await copy_to_host(source, np.zeros(nbytes, np.uint8), stream=stream)
        assert np.array_equal(found, pattern(nbytes))
        assert emulated_gpu.pending(0) == ["kernel"]


@pytest.mark.parametrize("nbytes", SIZES)
async def test_the_stream_that_an_array_names_is_waited_for_as_well(emulated_gpu: Any, nbytes: int) -> None:
    data = pattern(nbytes)
    with stream_of(0) as stream, stream_of(0) as named:
        source = DeviceArray.from_numpy(np.zeros(nbytes, np.uint8), stream=named)
        fresh = DeviceArray.from_numpy(data)
        emulated_gpu.hold(named)
        enqueue_update(source, fresh, named)
        for copy in (
            lambda host: copy_to_host(source, host, stream=stream),
            lambda host: copy_batch(stream, [source], [host]),
        ):
            host, begun = np.zeros(nbytes, np.uint8), Begun()
            emulated_gpu.hold(named)
            emulated_gpu.kernel(named)
            async with anyio.create_task_group() as group:
                group.start_soon(lambda begun=begun, copy=copy, host=host: begun.run(copy, host))
                await passed_by()
                assert not begun.ended
                emulated_gpu.release(named)
            assert np.array_equal(host, data)


async def test_a_stream_that_never_advances_holds_up_its_own_copies_only(emulated_gpu: Any) -> None:
    source = DeviceArray.from_numpy(pattern(100_000))
    with stream_of(0) as stuck, stream_of(0) as free:
        emulated_gpu.hold(stuck)
        emulated_gpu.kernel(stuck)
        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(lambda: copy_to_host(source, np.empty(100_000, np.uint8), stream=stuck))
            await anyio.lowlevel.checkpoint()
            for _ in range(3):
                found = await copy_to_host(source, np.empty(100_000, np.uint8), stream=free)
                assert np.array_equal(found, pattern(100_000))
            emulated_gpu.release(stuck)


async def test_overlapping_awaits_on_one_stream_resolve_by_themselves(emulated_gpu: Any) -> None:
    # vllm-project/vllm#53960: one shared event that was recorded again.
    source = DeviceArray.from_numpy(pattern(64))
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        calls = [Begun() for _ in range(4)]
        async with anyio.create_task_group() as group:
            for begun in calls:
                emulated_gpu.kernel(stream)
                group.start_soon(
                    lambda begun=begun: begun.run(copy_to_host, source, np.empty(64, np.uint8), stream=stream)
                )
                await anyio.lowlevel.checkpoint()
                await passed_by()
            for n, begun in enumerate(calls):
                assert [one.ended for one in calls] == [True] * n + [False] * (4 - n)
                while emulated_gpu.step(stream) and emulated_gpu.pending(stream)[:1] == ["event_record"]:
                    pass
                with anyio.fail_after(5):
                    while not begun.ended:
                        await anyio.lowlevel.checkpoint()
                await passed_by()


# Devices, contexts and threads.


def current_context() -> int:
    return int(check(driver.cuCtxGetCurrent()))


@pytest.mark.parametrize("nbytes", SIZES)
async def test_the_buffers_decide_not_the_current_device(nbytes: int) -> None:
    # NVIDIA/cuda-python#2311: GPU 0 current, data on GPU 1.
    need_two_devices()
    for current in (0, 1):
        with context_of(current):
            before = current_context()
            for device in (1, 0):
                array = DeviceArray(nbytes, device=device)
                await copy_to_device(pattern(nbytes, device), array)
                assert np.array_equal(await copy_to_host(array), pattern(nbytes, device))
                await copy_batch(0, [array], [host := np.empty(nbytes, np.uint8)])
                assert np.array_equal(host, pattern(nbytes, device))
                await synchronize(0)
                assert current_context() == before


@pytest.mark.parametrize("nbytes", SIZES)
async def test_the_legacy_stream_is_that_of_the_buffers_device(emulated_gpu: Any, nbytes: int) -> None:
    need_two_devices()
    with context_of(0):
        await assert_ordered(emulated_gpu, 0, None, nbytes, device=1)
        await assert_ordered(emulated_gpu, 1, 1, nbytes, device=1)


@pytest.mark.parametrize("nbytes", [*SIZES, 5 << 20])
async def test_between_two_devices(nbytes: int) -> None:
    need_two_devices()
    for current in (0, 1):
        with context_of(current):
            before = current_context()
            for source, destination in ((0, 1), (1, 0), (1, 1)):
                src = DeviceArray.from_numpy(pattern(nbytes), device=source)
                dst = DeviceArray(nbytes, device=destination)
                assert await copy_to_device(src, dst) is dst
                assert np.array_equal(dst.to_numpy(), pattern(nbytes))
            assert current_context() == before


@pytest.mark.parametrize("stream", [None, 0, 1])
@pytest.mark.parametrize("producer", [0, 1])
async def test_between_two_devices_both_legacy_streams_count(
    emulated_gpu: Any, producer: int, stream: int | None
) -> None:
    # 0 means the legacy stream in the context of the buffers, and here they have two.
    need_two_devices()
    source = DeviceArray.from_numpy(np.zeros(1000, np.uint8), device=0)
    destination = DeviceArray.from_numpy(np.zeros(1000, np.uint8), device=1)
    fresh = DeviceArray.from_numpy(pattern(1000), device=0)
    with context_of(producer):
        emulated_gpu.hold(0)
        if producer == 0:
            enqueue_update(source, fresh, 0)
        else:
            source = fresh
            emulated_gpu.kernel(0)
    begun = Begun()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: begun.run(copy_to_device, source, destination, stream=stream))
        await passed_by(1)
        assert not begun.ended
        with context_of(producer):
            emulated_gpu.release(0)
    assert np.array_equal(destination.to_numpy(), pattern(1000))


async def test_a_special_stream_that_an_array_names_is_that_of_its_device(emulated_gpu: Any) -> None:
    need_two_devices()
    source = DeviceArray.from_numpy(np.zeros(1000, np.uint8), device=0, stream=1)
    destination, fresh = DeviceArray(1000, device=1), DeviceArray.from_numpy(pattern(1000))
    with context_of(0):
        emulated_gpu.hold(1)
        enqueue_update(source, fresh, 1)
    begun = Begun()
    with stream_of(1) as stream:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: begun.run(copy_to_device, source, destination, stream=stream))
            await passed_by(1)
            assert not begun.ended
            with context_of(0):
                emulated_gpu.release(1)
    assert np.array_equal(destination.to_numpy(), pattern(1000))


@one_loop
@pytest.mark.parametrize("device", [0, 1])
async def test_a_thread_without_a_context(device: int) -> None:
    # cupy/cupy#72, pytorch/pytorch#195256: asyncio.to_thread, and a loop in a fresh thread.
    if device:
        need_two_devices()
    found: list[Any] = []

    async def there_and_back() -> None:
        for nbytes in SIZES:
            array = DeviceArray(nbytes, device=device)
            for stream in (None, 0, 1, 2):
                await copy_to_device(pattern(nbytes), array, stream=stream)
                found.append(np.array_equal(await copy_to_host(array, stream=stream), pattern(nbytes)))
            pinned = pinned_empty(nbytes)
            await copy_to_host(array, pinned, in_stream=True)
            found.append(np.array_equal(pinned, pattern(nbytes)))
            await synchronize(2)

    def run() -> None:
        assert int(check(driver.cuCtxGetCurrent())) == 0
        anyio.run(there_and_back)
        found.append(int(check(driver.cuCtxGetCurrent())) == 0)

    await anyio.to_thread.run_sync(run)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 22
    assert all(found)


@pytest.mark.parametrize("context_is_current", [False, True])
async def test_the_callers_contexts_are_as_before(context_is_current: bool) -> None:
    need_two_devices()
    source, destination = DeviceArray.from_numpy(pattern(1000), device=1), DeviceArray(1000, device=1)

    async def all_calls() -> None:
        host = np.empty(1000, np.uint8)
        await copy_to_host(source, host)
        await copy_to_host(source)
        await copy_to_device(host, destination)
        await copy_to_device(source, destination)
        await copy_batch(0, [source, host], [np.empty(1000, np.uint8), destination])
        await copy_to_host(source, pinned_empty(1000), in_stream=True)
        with stream_of(1) as stream:
            await copy_to_host(source, host, stream=stream)
            await synchronize(stream)
        with pytest.raises(ValueError, match="sizes must match"):
            await copy_to_host(source, bytearray(3))

    if context_is_current:
        with context_of(0):
            before = current_context()
            await all_calls()
            assert current_context() == before
    else:
        before = current_context()
        await all_calls()
        assert current_context() == before


async def test_between_devices_the_quick_way_is_asked_for_once(emulated_gpu: Any) -> None:
    """Without peer access a copy between two devices goes through the host's memory, at a tenth of the rate."""
    data = pattern(100_000)
    source, target = DeviceArray.from_numpy(data), DeviceArray(100_000, device=1)
    before = emulated_gpu.calls("cuCtxEnablePeerAccess")
    for _ in range(3):
        await copy_to_device(source, target)
        await copy_to_device(target, source)
    assert np.array_equal(target.to_numpy(), data)
    assert np.array_equal(source.to_numpy(), data)
    # By the engines of both devices, in both contexts each; none where an earlier test's copies did it.
    assert emulated_gpu.calls("cuCtxEnablePeerAccess") - before <= 4
    for device, other in ((0, 1), (1, 0)):
        with context_of(other):
            peer = check(driver.cuCtxGetCurrent())
        with context_of(device):
            assert driver.cuCtxEnablePeerAccess(peer, 0)[0] == driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    # Inside one device there is nobody to meet.
    here = DeviceArray(100_000)
    asked = emulated_gpu.calls("cuCtxEnablePeerAccess")
    await copy_to_device(source, here)
    assert emulated_gpu.calls("cuCtxEnablePeerAccess") == asked


class Asked:
    """A stream that gives the next of its answers each time that it is asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __cuda_stream__(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((0, 0), None),
        ((0, np.int64(0)), None),
        ([0, 0], TypeError),
        ((0, 0, 0), TypeError),
        ((0, None), TypeError),
        ((1, 0), ValueError),
        ((0, -1), ValueError),
        ((0, 2**64), ValueError),
        (OSError("it is gone"), OSError),
    ],
)
async def test_a_stream_is_asked_once_for_each_copy(answer: Any, error: type[Exception] | None) -> None:
    device, host = DeviceArray.from_numpy(pattern(64)), bytearray(64)
    await copy_to_host(device, host, stream=Asked((0, 0)))
    stream = Asked(answer, (0, 0))
    if error is None:
        await copy_to_host(device, host, stream=stream)
    else:
        with pytest.raises(error):
            await copy_to_host(device, host, stream=stream)
    assert stream.answers == [(0, 0)]
    await copy_to_host(device, host, stream=stream)
    assert host == pattern(64).tobytes()


def test_the_stream_that_an_array_names_may_change() -> None:
    array = DeviceArray(8)
    assert array.__cuda_array_interface__["stream"] is None
    array.stream = 5
    assert (array.stream, array[:4].stream) == (5, 5)
    assert array.__cuda_array_interface__["stream"] == array[:4].__cuda_array_interface__["stream"] == 5
