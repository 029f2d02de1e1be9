"""Device memory to a file and back, at the speed of the disk or of the link, whichever is lower.

    python examples/checkpoint.py [--mib 64] [--path FILE] [--direct]

A few page-locked slots are all the host memory that it takes, however large the array is. Each slot has a task: it
copies a piece from the device into its slot, has a thread write the slot to the file, and takes the next piece. While
some slots are being written others are being filled, and a disk that is slower than the link holds up the copies by
itself, for want of a slot. Reading is the same the other way. There are more slots than threads, so that a thread finds
its next slot waiting when it has ended one.

Whatever goes wrong, a full disk, a file that is too short, a cancellation: when `save` or `load` has ended, no copy and
no thread is at work any more, and under the final name there is either a whole file or what was there before.

AIOCUDA_COPY_DRIVER=emulated runs it without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import anyio.to_thread
import numpy as np

from aiocuda_copy import Blocks, copy_batch, pinned_empty_async
from aiocuda_copy.testing import DeviceArray

# Several writes at once are what disks want; a file system that takes them one by one costs nothing by it. Reading from
# memory, a RAM disk or the page cache, takes a dozen threads to keep up with the link.
THREADS = 12
# Half as many again, which are with the device or wait for a thread.
SLOTS = 18
# Small enough that the processor's caches hold a slot that has been read until the device takes it, large enough that
# what the loop does for each (0.1 ms) is hidden: with a RAM disk, 4 and 16 MiB are slower by a quarter or more.
SLOT_NBYTES = 8 << 20
# What direct I/O asks of offsets and sizes.
PAGE = 4096

START = np.zeros(1, np.int64)


@dataclass
class Transfer:
    """What one direction took."""

    nbytes: int
    seconds: float = 0.0
    # How long slots were with the device or waited for it, and likewise for the file, added up over all slots.
    device_seconds: float = 0.0
    file_seconds: float = 0.0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - begin)

    def __str__(self) -> str:
        file = self.file_seconds / max(self.file_seconds + self.device_seconds, 1e-9)
        bound = "the file" if file > 0.5 else "the link"
        rate = self.nbytes / max(self.seconds, 1e-9) / 1e9
        return f"{rate:.2f} GB/s, bound by {bound} ({file:.0%} of the slots' time went to the file)"


async def save(
    array: Any,
    path: str | Path,
    *,
    stream: Any = None,
    slots: int = SLOTS,
    slot_nbytes: int = SLOT_NBYTES,
    threads: int = THREADS,
    direct: bool = False,
) -> Transfer:
    """Writes a C-contiguous array on a device to a file, which is complete when it appears.

    Parameters
    ----------
    array
        Of any framework. Nothing may write to it meanwhile.
    path
        The file. One that exists is replaced when the new one is complete.
    stream
        The stream that the copies are ordered in, as for ``copy_batch``.
    slots, slot_nbytes
        How much page-locked memory it may take; a slot is a multiple of 4096 bytes.
    threads
        How many of them may be with the file at a time.
    direct
        Whether to go round the page cache (``O_DIRECT``), where the file system can.
    """
    _check(slots, slot_nbytes, threads)
    path = Path(path)
    # Without the file's own name in it, which may be as long as names can be.
    partial_path = path.with_name(f".{uuid4().hex}.partial")
    transfer, file_threads = Transfer(array.nbytes), Threads(threads)
    file = _open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct)

    async def move(slot: np.ndarray, offset: int, nbytes: int) -> None:
        with transfer.timed("device_seconds"):
            await copy_batch(stream, Blocks(array, np.array([offset])), Blocks(slot, START), sizes=nbytes)
        with transfer.timed("file_seconds"):
            await file_threads.run(_write, file, slot[: _whole_pages(nbytes)], offset)

    try:
        with transfer.timed("seconds"), file_threads:
            await _through_slots(array.nbytes, slots, slot_nbytes, move)
            await _in_thread(_complete, file, array.nbytes, partial_path, path)
    except BaseException:
        # A file of gigabytes is not gone in an instant. There may be no thread for it, or a second cancellation.
        try:
            with suppress(Exception):  # the first error is the one to raise
                await _in_thread(partial_path.unlink, True)
        finally:
            partial_path.unlink(True)
        raise
    finally:
        os.close(file)
    return transfer


async def load(
    path: str | Path,
    array: Any,
    *,
    stream: Any = None,
    slots: int = SLOTS,
    slot_nbytes: int = SLOT_NBYTES,
    threads: int = THREADS,
    direct: bool = False,
) -> Transfer:
    """Reads a file into a C-contiguous array on a device, of the file's size; the parameters are those of `save`.

    When it fails, the contents of the array are undefined.
    """
    _check(slots, slot_nbytes, threads)
    transfer, file_threads = Transfer(array.nbytes), Threads(threads)
    file = _open(path, os.O_RDONLY, direct)

    async def move(slot: np.ndarray, offset: int, nbytes: int) -> None:
        with transfer.timed("file_seconds"):
            await file_threads.run(_read, file, slot[: _whole_pages(nbytes)], offset, nbytes)
        with transfer.timed("device_seconds"):
            await copy_batch(stream, Blocks(slot, START), Blocks(array, np.array([offset])), sizes=nbytes)

    try:
        size = os.fstat(file).st_size
        if size != array.nbytes:
            raise ValueError(f"{path} has {size} bytes, and the array {array.nbytes}")
        with transfer.timed("seconds"), file_threads:
            await _through_slots(array.nbytes, slots, slot_nbytes, move)
    finally:
        os.close(file)
    return transfer


def _check(slots: int, slot_nbytes: int, threads: int) -> None:
    """Without a slot nothing would be moved, and what `save` leaves would be a file of zeros."""
    for name, value in (("slots", slots), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if slot_nbytes < 1 or slot_nbytes % PAGE:
        raise ValueError(f"slot_nbytes must be a positive multiple of {PAGE}, not {slot_nbytes}")


class Threads:
    """Threads that go from one call to the next by themselves, without a turn of the event loop in between.

    Of `anyio.to_thread` a thread has its next call from the loop, by which reading a RAM disk is slower by a quarter.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "checkpoint")
        self._call_soon = _call_soon_from_threads()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # All calls have ended, save one for which no thread could be started, but which another thread may have taken.
        self._pool.shutdown(cancel_futures=True)

    async def run(self, function: Callable[..., object], *arguments: object) -> None:
        """A call that has begun is waited for, also when this is cancelled: it uses a slot and the file."""
        ended = anyio.Event()
        call = self._pool.submit(function, *arguments)
        call.add_done_callback(lambda _: self._call_soon(ended.set))
        try:
            await ended.wait()
        except BaseException:
            if not call.cancel():
                with anyio.CancelScope(shield=True):
                    await ended.wait()
            raise
        call.result()


def _call_soon_from_threads() -> Callable[[Callable[[], object]], object]:
    """Has the caller's event loop call something soon, from any thread."""
    try:
        return asyncio.get_running_loop().call_soon_threadsafe
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token().run_sync_soon


async def _through_slots(
    nbytes: int, slots: int, slot_nbytes: int, move: Callable[[np.ndarray, int, int], Awaitable[None]]
) -> None:
    """Moves all pieces, each through whichever slot is free first."""
    offsets = range(0, nbytes, slot_nbytes)
    left = iter(offsets)

    async def work() -> None:
        slot = await pinned_empty_async(slot_nbytes)
        for offset in left:
            await move(slot, offset, min(slot_nbytes, nbytes - offset))

    await _together([work] * min(slots, len(offsets)))


async def _together(tasks: list[Callable[[], Awaitable[object]]]) -> None:
    """Runs tasks at the same time. The first error stops the others, and is raised when they have stopped.

    A thread cannot be stopped, so the end waits for those at work: they use a slot and the file. asyncio's own
    cancellation would not wait if the threads were awaited here; but it reaches this task only, and the group waits.
    """
    errors: list[Exception] = []

    async def run(task: Callable[[], Awaitable[object]]) -> None:
        try:
            await task()
        except Exception as exc:
            errors.append(exc)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(run, task)
    if errors:
        raise errors[0]


async def _in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Runs to its end, even if the caller is being cancelled."""
    with anyio.CancelScope(shield=True):
        await _together([partial(anyio.to_thread.run_sync, function, *arguments)])


# What the threads do.


def _open(path: str | Path, flags: int, direct: bool) -> int:
    return os.open(path, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), 0o666)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _write(file: int, data: np.ndarray, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _read(file: int, target: np.ndarray, offset: int, nbytes: int) -> None:
    done = 0
    while done < nbytes:
        count = os.preadv(file, [target[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset + done}, in the middle of what it had when it was opened")
        done += count


def _complete(file: int, nbytes: int, partial_path: Path, path: Path) -> None:
    # The last page was written whole.
    os.ftruncate(file, nbytes)
    os.fsync(file)
    os.replace(partial_path, path)


# The demonstration.


def _pattern(offset: int, nbytes: int) -> np.ndarray:
    """What belongs at an offset: bytes of which no run is like another one."""
    return np.random.default_rng(offset).integers(0, 256, nbytes, np.uint8)


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    return ((offset, min(SLOT_NBYTES, nbytes - offset)) for offset in range(0, nbytes, SLOT_NBYTES))


def _check_file(path: Path, nbytes: int) -> None:
    assert path.stat().st_size == nbytes
    with path.open("rb") as file:
        for offset, size in _pieces(nbytes):
            assert file.read(size) == _pattern(offset, size).tobytes(), f"the file differs behind byte {offset}"


async def main(nbytes: int, path: Path, direct: bool) -> None:
    array = DeviceArray(nbytes)
    everywhere = np.array([0])
    for offset, size in _pieces(nbytes):
        source = Blocks(_pattern(offset, size), everywhere)
        await copy_batch(None, source, Blocks(array, np.array([offset])), sizes=size)
    print(f"{nbytes} bytes on device {array.device}, {path}")

    print(f"to the file:   {await save(array, path, direct=direct)}")
    await anyio.to_thread.run_sync(_check_file, path, nbytes)

    loaded = DeviceArray(nbytes)
    print(f"from the file: {await load(path, loaded, direct=direct)}")
    piece = np.empty(SLOT_NBYTES, np.uint8)
    for offset, size in _pieces(nbytes):
        await copy_batch(None, Blocks(loaded, np.array([offset])), Blocks(piece, everywhere), sizes=size)
        assert np.array_equal(piece[:size], _pattern(offset, size)), f"the device differs behind byte {offset}"
    print(f"every byte is the same; page-locked memory for it: {SLOTS} slots of {SLOT_NBYTES >> 20} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=float, default=64, help="how much device memory (default: 64)")
    parser.add_argument("--path", type=Path, help="the file, which is kept (default: a temporary one)")
    parser.add_argument("--direct", action="store_true", help="go round the page cache (O_DIRECT)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(main, int(arguments.mib * (1 << 20)), arguments.path or Path(folder) / "checkpoint", arguments.direct)
