"""An error that the caller keeps does not keep the caller's buffers exported: they can be resized again."""

from __future__ import annotations

import array
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiocuda_copy
from aiocuda_copy import Blocks, Copier, copy_batch, copy_to_device, copy_to_host
from aiocuda_copy._threads import once, run_to_end
from aiocuda_copy.testing import DeviceArray, Emulator

Host = Any
Call = Callable[[Host, DeviceArray, DeviceArray], Awaitable[Any]]

MAKERS: dict[str, Callable[[int], Host]] = {"bytearray": bytearray, "array": lambda n: array.array("B", bytes(n))}
SIZES = [64, 1 << 20]
OFFSETS = np.array([0])
NO_STREAM = 0xDEAD0


def blocks(base: Any, *offsets: int) -> Blocks:
    return Blocks(base, np.array(offsets))


# Of a host buffer, a device array of its size, and one of another size.
WRONG: dict[str, Call] = {
    "to host, sizes": lambda host, device, other: copy_to_host(other, host),
    "to host, sizes, progress": lambda host, device, other: copy_to_host(other, host, progress=lambda *_: None),
    "to host, sizes, in the stream": lambda host, device, other: copy_to_host(other, host, in_stream=True),
    "to host, pageable in the stream": lambda host, device, other: copy_to_host(device, host, in_stream=True),
    "to host, from host": lambda host, device, other: copy_to_host(bytes(len(host)), host),
    "to host, another device": lambda host, device, other: Copier(1).copy_to_host(device, host),
    "to host, no such stream": lambda host, device, other: copy_to_host(device, host, stream=NO_STREAM),
    "to new, from host": lambda host, device, other: copy_to_host(host),
    "to device, sizes": lambda host, device, other: copy_to_device(host, other),
    "to device, to host": lambda host, device, other: copy_to_device(host, bytearray(len(host))),
    "to device, to no array": lambda host, device, other: copy_to_device(host, object()),
    "to device, no such stream": lambda host, device, other: copy_to_device(host, device, stream=NO_STREAM),
    "batch, sizes": lambda host, device, other: copy_batch(0, [device, other], [host, host]),
    "batch, overlap": lambda host, device, other: copy_batch(0, [device, device], [host, host]),
    "batch, no array": lambda host, device, other: copy_batch(0, [host, object()], [device, device]),
    "batch, from host": lambda host, device, other: copy_batch(0, [device, host], [host, bytearray(len(host))]),
    "batch, another device": lambda host, device, other: Copier(1).copy_batch(0, [device], [host]),
    "batch, pageable in the stream": lambda host, device, other: copy_batch(0, [device], [host], in_stream=True),
    "batch, no such stream": lambda host, device, other: copy_batch(NO_STREAM, [device], [host]),
    "blocks, outside": lambda host, device, other: copy_batch(
        0, blocks(device, 0), blocks(host, len(host)), sizes=8
    ),
    "blocks, overlap": lambda host, device, other: copy_batch(0, blocks(device, 0, 8), blocks(host, 0, 4), sizes=8),
    "blocks, from host": lambda host, device, other: copy_batch(0, blocks(host, 0), blocks(host, 8), sizes=8),
    "blocks, options": lambda host, device, other: copy_batch(
        0, blocks(device, 0), blocks(host, 0), sizes=8, options=object()
    ),
    "blocks, no array": lambda host, device, other: copy_batch(0, blocks(host, 0), blocks(object(), 0), sizes=8),
    "blocks, another device": lambda host, device, other: Copier(1).copy_batch(
        0, blocks(device, 0), blocks(host, 0), sizes=8
    ),
    "blocks, no such stream": lambda host, device, other: copy_batch(
        NO_STREAM, blocks(device, 0), blocks(host, 0), sizes=8
    ),
}  # fmt: skip


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("name", WRONG)
async def test_a_refused_buffer_can_be_resized(gpu: Emulator | None, name: str, nbytes: int, maker: str) -> None:
    if gpu is None and "no such stream" in name:
        pytest.skip("the driver follows any handle, into the ground")
    host, device, other = MAKERS[maker](nbytes), DeviceArray(nbytes), DeviceArray(nbytes + 1)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        await WRONG[name](host, device, other)
    host.append(0)
    assert len(host) == nbytes + 1
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("count", [2, 100_000])  # numbers that are planned in a thread, too
async def test_buffers_of_numbers_can_be_resized(gpu: Emulator | None, count: int) -> None:
    host, device = bytearray(8 * count), DeviceArray(8 * count)
    offsets, sizes = array.array("q", range(0, 8 * count, 8)), array.array("Q", [8] * count)
    sizes[-1] = 9
    with pytest.raises(ValueError, match=f"entry {count - 1} of the batch") as caught:
        await copy_batch(0, Blocks(device, memoryview(offsets)), Blocks(host, memoryview(offsets)), sizes=sizes)
    host.append(0)
    sizes.append(0)
    assert caught.value is not None


def test_offsets_that_are_no_integers_can_be_resized() -> None:
    offsets = array.array("d", [0.0])
    with pytest.raises(TypeError, match="offsets must be a one-dimensional buffer of int64 or uint64") as caught:
        Blocks(bytearray(8), offsets)
    offsets.append(0.0)
    assert caught.value is not None


def test_records_of_host_functions_can_be_resized() -> None:
    record = bytearray(5)
    with pytest.raises(ValueError, match="bytes") as caught:
        aiocuda_copy.launch_host_func(0, aiocuda_copy.HOST_COPY_FN, record)
    with pytest.raises(ValueError, match="nbytes") as also:
        aiocuda_copy.pack_host_copy_args(record, bytes(6), 6)
    record.append(0)
    assert caught.value is not also.value


@pytest.mark.parametrize("maker", MAKERS)
async def test_what_could_not_be_page_locked_can_be_resized(emulated_gpu: Emulator, maker: str) -> None:
    host = MAKERS[maker](1 << 20)
    pinning: Any = aiocuda_copy.pinned(host)
    emulated_gpu.fail_call("cuMemHostRegister", 1)
    emulated_gpu.fail_call("cuMemHostRegister", 2)
    with pytest.raises(aiocuda_copy.CudaError) as caught, pinning:
        pass
    host.append(0)
    with pytest.raises(aiocuda_copy.CudaError) as also:
        async with pinning:
            pass
    host.append(0)
    assert caught.value is not also.value
    async with pinning:
        with pytest.raises(BufferError):
            host.append(0)
    host.append(0)


async def test_a_thread_has_let_go_of_its_work_when_it_says_that_it_is_done() -> None:
    buffer = bytearray(8)
    view = memoryview(buffer)
    work = once(partial(len, view))
    del view
    with pytest.raises(BufferError):
        buffer.append(0)
    assert work() == 8
    # Whoever still has what has been run, as threads do for a moment, holds nothing.
    buffer.append(0)
    assert await run_to_end(partial(len, memoryview(buffer))) == 9
    buffer.append(0)


async def test_the_memory_of_a_loaders_item_can_be_resized(gpu: Emulator | None) -> None:
    memory = bytearray(64)
    loader = (np.frombuffer(memory, np.uint8) for _ in range(1))
    async with aiocuda_copy.prefetch(loader, empty=lambda shape, dtype: DeviceArray(3)) as batches:
        with pytest.raises(ValueError, match="sizes must match") as caught:
            await anext(batches)
    memory.append(0)
    assert caught.value is not None


async def test_the_frames_of_a_callback_are_left_to_debuggers(gpu: Emulator | None) -> None:
    def progress(done: int, total: int) -> None:
        found = total
        raise LookupError(found)

    with pytest.raises(LookupError) as caught:
        await copy_to_host(DeviceArray(64), bytearray(64), progress=progress)
    traceback = caught.value.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    assert traceback is not None
    assert traceback.tb_frame.f_locals == {"done": 64, "total": 64, "found": 64}
