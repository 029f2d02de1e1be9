"""Streams under capture: refused before anything is enqueued, and no capture is ever lost, whosever it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import BULK, SMALL, WAYS, Stream, Way, calls, check, content, on_device, one_loop, pinned_array, turns
from cuda.bindings import driver
from cuda.core import Device
from dlpack_producer import UINT, Producer

from aiocuda_copy import Blocks, collect, copy_batch, copy_to_device, copy_to_host, pinned_empty_async, synchronize
from aiocuda_copy.testing import DeviceArray, Emulator

MODES = ("GLOBAL", "THREAD_LOCAL", "RELAXED")


def begin(stream: Stream, mode: str = "GLOBAL") -> None:
    check(
        driver.cuStreamBeginCapture(
            stream.handle, getattr(driver.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
        )
    )


def end(stream: Stream) -> int:
    """The number of nodes that were captured; fails for a capture that has been lost."""
    graph = check(driver.cuStreamEndCapture(stream.handle))
    result, _, count = driver.cuGraphGetNodes(graph)
    assert result == driver.CUresult.CUDA_SUCCESS
    check(driver.cuGraphDestroy(graph))
    return int(count)


async def refused(coroutine: Any) -> None:
    with pytest.raises(RuntimeError, match="capture"):
        await coroutine


@one_loop
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_a_copy_in_a_capturing_stream_is_refused(gpu: Emulator | None, way: Way, mode: str) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    node = on_device(64, 0)
    begin(stream, mode)
    stream.fill(node, 1)
    await refused(way.copy(src, dst, stream))
    await refused(synchronize(stream))
    stream.fill(node, 2)
    assert end(stream) == 2
    assert (content(dst) == 2).all()
    await way.copy(src, dst, stream)
    assert (content(dst) == 1).all()


async def test_everything_else_that_takes_a_stream(gpu: Emulator | None) -> None:
    stream = Stream()
    device, host = on_device(BULK, 1), pinned_array(BULK, 2)
    empty, nothing = DeviceArray(0), bytearray()
    begin(stream)
    await refused(copy_to_host(device, stream=stream))
    await refused(copy_to_host(device, host, stream=stream, in_stream=True))
    await refused(copy_to_device(host, device, stream=stream, in_stream=True))
    await refused(copy_batch(stream, [device], [host], in_stream=True))
    await refused(copy_to_host(empty, nothing, stream=stream))
    await refused(copy_to_host(empty, stream=stream))
    await refused(copy_batch(stream, [], []))
    await refused(copy_batch(stream, [empty], [nothing]))
    offsets = np.array([0, 4096], np.uint64)
    await refused(copy_batch(stream, Blocks(device, offsets), Blocks(host, offsets), sizes=4096))
    await refused(copy_batch(stream, Blocks(device, offsets), Blocks(host, offsets), sizes=0))
    assert end(stream) == 0
    assert (host == 2).all()


class Lender(Producer):
    """Makes the consumer's stream wait for its own work, as JAX does."""

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        check(driver.cuStreamWaitEvent(stream, self.event, 0))
        return super().__dlpack__(stream=stream, **options)

    event: Any


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_no_lender_is_told_of_a_capturing_stream(gpu: Emulator | None, nbytes: int) -> None:
    stream, own = Stream(), Stream()
    there, host = Lender(on_device(nbytes, 1), (nbytes,), UINT, 8), pinned_array(nbytes, 2)
    there.event = check(driver.cuEventCreate(2))
    check(driver.cuEventRecord(there.event, own.handle))
    offsets = np.array([0], np.uint64)
    begin(stream)
    for named in (stream, stream.handle):
        await refused(copy_to_host(there, host, stream=named))
        await refused(copy_to_host(there, stream=named))
        await refused(copy_to_host(there, host, stream=named, in_stream=True))
        await refused(copy_to_device(host, there, stream=named))
        await refused(copy_batch(named, [there], [host]))
        await refused(copy_batch(named, Blocks(there, offsets), Blocks(host, offsets), sizes=nbytes))
        async with collect([there], stream=named) as results:
            await refused(anext(results))
    assert there.streams == []
    assert end(stream) == 0
    await copy_to_host(there, host, stream=stream)
    assert (host == 1).all()
    check(driver.cuEventDestroy(there.event))


async def test_a_graph_builder(gpu: Emulator | None) -> None:
    device = Device()
    device.set_current()
    builder = device.create_graph_builder()
    builder.begin_building()
    src = on_device(SMALL, 1)
    await refused(copy_to_host(src, bytearray(SMALL), stream=builder))
    await refused(copy_batch(builder, [src], [bytearray(SMALL)]))
    builder.end_building().close()


@one_loop
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_copies_beside_another_streams_capture(gpu: Emulator | None, way: Way, mode: str) -> None:
    capturing, stream = Stream(), Stream()
    src, dst = way.memory(1, 2)
    node = on_device(64, 0)
    begin(capturing, mode)
    capturing.fill(node, 1)
    await way.copy(src, dst, stream)
    await synchronize(stream)
    capturing.fill(node, 2)
    assert end(capturing) == 2
    assert (content(dst) == 1).all()


@pytest.mark.parametrize("mode", MODES)
async def test_growing_beside_a_capture(gpu: Emulator | None, mode: str) -> None:
    capturing = Stream()
    src = on_device(3 * BULK, 1)
    begin(capturing, mode)
    result = await copy_to_host(src, stream=Stream())
    other = await pinned_empty_async(5 * BULK)
    assert end(capturing) == 0
    assert (result == 1).all()
    del result, other


@pytest.mark.parametrize("named", [0, 1, None])
@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_the_legacy_stream_beside_a_capture_of_a_blocking_stream(
    gpu: Emulator | None, named: int | None, nbytes: int
) -> None:
    blocking = Stream(blocking=True)
    src, dst = on_device(nbytes, 1), bytearray(nbytes)
    node = on_device(64, 0)
    begin(blocking)
    blocking.fill(node, 1)
    await refused(copy_to_host(src, dst, stream=named))
    await refused(copy_to_device(dst, src, stream=named))
    blocking.fill(node, 2)
    assert end(blocking) == 2
    assert dst == bytes(nbytes)
    await copy_to_host(src, dst, stream=named)
    assert dst == bytes([1]) * nbytes


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_device_arrays_are_freed_beside_a_capture(mode: str, blocking: bool, gpu: Emulator | None) -> None:
    """Whenever they go: what a closed loop held is dropped by the first call in another one, a refused one perhaps."""
    capturing, array = Stream(blocking=blocking), on_device(SMALL, 1)
    begin(capturing, mode)
    del array
    DeviceArray(SMALL)
    assert end(capturing) == 0


async def test_another_blocking_stream_beside_a_capture_of_a_blocking_stream(gpu: Emulator | None) -> None:
    capturing, blocking = Stream(blocking=True), Stream(blocking=True)
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    begin(capturing)
    await copy_to_host(src, dst, stream=blocking.handle)
    assert end(capturing) == 0
    assert dst == bytes([1]) * SMALL


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_a_capture_that_begins_while_a_copy_waits(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    node = on_device(64, 0)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await turns()
        begin(stream)
        stream.fill(node, 1)
        emulated_gpu.step(stream, 2)
        await call.result()
        stream.fill(node, 2)
        assert end(stream) == 2
    assert (content(dst) == 1).all()


async def test_the_stream_that_an_array_names_is_capturing(gpu: Emulator | None) -> None:
    producer, stream = Stream(), Stream()
    src, dst = DeviceArray(SMALL, stream=producer.handle), bytearray(SMALL)
    begin(producer)
    await refused(copy_to_host(src, dst, stream=stream))
    assert end(producer) == 0
