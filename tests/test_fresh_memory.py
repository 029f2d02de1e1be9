"""Destinations that nobody has written yet: pieces of a copy end where huge pages do, so that one worker has each."""

from __future__ import annotations

import mmap
from tempfile import TemporaryFile

import numpy as np
import pytest
from calls import Stream, calls, streams_with, until
from kinds import one_loop, pattern

from aiocuda_copy import Blocks, Copier, copy_batch, copy_to_host
from aiocuda_copy.testing import DeviceArray, Emulator

pytestmark = one_loop

MIB = 1 << 20
HUGE_PAGE = 2 * MIB
SLOT = 4 * MIB
SIZE = 11 * MIB + 5


def fresh(nbytes: int, *, skew: int = 0, huge: bool = True) -> np.ndarray:
    """Memory that begins so far behind the beginning of a huge page, and has no pages."""
    memory = mmap.mmap(-1, nbytes + skew + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    begin = -array.ctypes.data % HUGE_PAGE + skew
    return array[begin : begin + nbytes]


@pytest.mark.parametrize("skew", [0, 1, 16, 4096, MIB + 7, HUGE_PAGE - 1])
@pytest.mark.parametrize("huge", [True, False], ids=["huge pages", "small pages"])
async def test_every_byte_arrives(skew: int, huge: bool) -> None:
    data = pattern(SIZE)
    with DeviceArray.from_numpy(data) as device:
        dst = fresh(SIZE, skew=skew, huge=huge)
        assert await copy_to_host(device, dst) is dst
        assert np.array_equal(dst, data)


async def test_where_some_has_been_written() -> None:
    data = pattern(SIZE)
    with DeviceArray.from_numpy(data) as device:
        dst = fresh(SIZE, skew=100)
        dst[5 * MIB : 6 * MIB] = 1
        await copy_to_host(device, dst)
        assert np.array_equal(dst, data)


async def test_nothing_beside_it_is_written() -> None:
    data = pattern(SIZE)
    with DeviceArray.from_numpy(data) as device:
        around = fresh(SIZE + 8192, skew=50)
        await copy_to_host(device, around[4097:][:SIZE])
        assert not around[:4097].any()
        assert np.array_equal(around[4097:][:SIZE], data)
        assert not around[4097 + SIZE :].any()


async def test_shared_memory_and_a_sparse_file() -> None:
    data = pattern(SIZE)
    with DeviceArray.from_numpy(data) as device, TemporaryFile() as file:
        file.truncate(SIZE)
        for memory in (mmap.mmap(-1, SIZE), mmap.mmap(file.fileno(), SIZE)):
            await copy_to_host(device, memory)
            assert np.array_equal(np.frombuffer(memory, np.uint8), data)


async def test_a_batch_of_blocks() -> None:
    data = pattern(SIZE)
    half = SIZE // 2
    with DeviceArray.from_numpy(data) as device:
        dst = fresh(SIZE, skew=3)
        await copy_batch(None, Blocks(device, np.array([half, 0])), Blocks(dst, np.array([0, half])), sizes=half)
        assert np.array_equal(dst[: 2 * half], np.concatenate([data[half : 2 * half], data[:half]]))


@pytest.mark.emulated_only
@pytest.mark.parametrize(
    ("touched", "skew", "nbytes"),
    [
        (False, 0, SLOT),
        (False, 16, SLOT - 16),
        (False, MIB, 3 * MIB),
        (False, HUGE_PAGE - 1, HUGE_PAGE + 1),
        (True, 16, SLOT),
    ],
)
async def test_a_piece_ends_with_a_huge_page(emulated_gpu: Emulator, touched: bool, skew: int, nbytes: int) -> None:
    device = DeviceArray.from_numpy(np.ones(SIZE, np.uint8))
    dst = fresh(SIZE, skew=skew)
    if touched:
        dst[:] = 0
    async with Copier(slot_nbytes=SLOT) as copier, calls() as start:
        emulated_gpu.hold()
        call = start(copier.copy_to_host(device, dst, stream=Stream()))
        await until(lambda: bool(streams_with(emulated_gpu, "copy")))
        # The streams take turns: the other one waits for this one's piece.
        stream = next(one for one in streams_with(emulated_gpu, "copy") if emulated_gpu.pending(one)[0] == "copy")
        emulated_gpu.step(stream, 2)  # and the event behind it
        await until(lambda: bool(dst[nbytes - 1]))
        # The next one is still held.
        assert not dst[nbytes:].any()
        emulated_gpu.release()
        await call.result()
        assert dst.all()
