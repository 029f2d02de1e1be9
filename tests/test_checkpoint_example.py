"""Checkpoints, as in examples/: what is written is what is read, in bounded memory, and failures leave nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import checkpoint
import numpy as np
import pytest
from calls import until
from checkpoint import PAGE, load, save
from kinds import bytes_at, one_loop, pattern, stream_of

from aiocuda_copy import CudaError
from aiocuda_copy._pinned import default_pool
from aiocuda_copy.testing import DeviceArray, Emulator

SLOT = 4 * PAGE
SMALL: dict[str, Any] = {"slots": 3, "slot_nbytes": SLOT}


def device(nbytes: int, seed: int = 1) -> DeviceArray:
    return DeviceArray.from_numpy(pattern(nbytes, seed))


def only(folder: Path, *names: str) -> bool:
    return sorted(os.listdir(folder)) == sorted(names)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, SLOT, SLOT + 1, 3 * SLOT, 10 * SLOT + 12345])
async def test_round_trip(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "file"
    saved = await save(device(nbytes), path, **SMALL)
    assert path.read_bytes() == pattern(nbytes).tobytes()
    assert only(tmp_path, "file")
    array = DeviceArray(nbytes)
    loaded = await load(path, array, **SMALL)
    assert np.array_equal(array.to_numpy(), pattern(nbytes))
    for transfer in (saved, loaded):
        assert transfer.nbytes == nbytes
        assert "bound by" in str(transfer)


@one_loop
@pytest.mark.parametrize(
    ("name", "value"),
    [("slots", 0), ("slots", -1), ("threads", 0), ("slot_nbytes", 0), ("slot_nbytes", -PAGE), ("slot_nbytes", 99)],
)
async def test_sizes_that_make_no_sense(tmp_path: Path, gpu: Emulator | None, name: str, value: int) -> None:
    (tmp_path / "file").write_bytes(bytes(SLOT))
    # One that is opened first is not found.
    for path in (tmp_path / "file", tmp_path / "no such folder" / "file"):
        with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
            await save(device(SLOT), path, **{**SMALL, name: value})
        with pytest.raises(ValueError, match=f"{name} must be .*, not {value}"):
            await load(path, DeviceArray(SLOT), **{**SMALL, name: value})
    assert contents(tmp_path) == {"file": bytes(SLOT)}


@one_loop
async def test_the_longest_name(tmp_path: Path, gpu: Emulator | None) -> None:
    name = "n" * os.pathconf(tmp_path, "PC_NAME_MAX")
    await save(device(SLOT), tmp_path / name, **SMALL)
    assert contents(tmp_path) == {name: pattern(SLOT).tobytes()}


@one_loop
async def test_any_shape_and_type(tmp_path: Path, gpu: Emulator | None) -> None:
    content = pattern(6 * SLOT).view(np.float32).reshape(3, -1)
    await save(DeviceArray.from_numpy(content), tmp_path / "file", **SMALL)
    array = DeviceArray(content.shape, content.dtype)
    await load(str(tmp_path / "file"), array, **SMALL)
    assert bytes_at(array.ptr, array.nbytes).tobytes() == content.tobytes()


@one_loop
async def test_round_the_page_cache(tmp_path: Path, gpu: Emulator | None) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder has no direct I/O")
    nbytes = 5 * SLOT + 77
    await save(device(nbytes), tmp_path / "file", direct=True, **SMALL)
    assert (tmp_path / "file").stat().st_size == nbytes
    array = DeviceArray(nbytes)
    await load(tmp_path / "file", array, direct=True, **SMALL)
    assert np.array_equal(array.to_numpy(), pattern(nbytes))


async def test_writes_that_take_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:1000]], offset))
    await save(device(3 * SLOT + 5), tmp_path / "file", **SMALL)
    array = DeviceArray(3 * SLOT + 5)
    await load(tmp_path / "file", array, **SMALL)
    assert np.array_equal(array.to_numpy(), pattern(3 * SLOT + 5))


@pytest.mark.parametrize("threads", [1, 8])
async def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    before = default_pool().stats().in_use_nbytes
    most, lock, at_once = [0, 0], threading.Lock(), 0

    def watched(call: Callable[..., int]) -> Callable[..., int]:
        def watch(*arguments: Any) -> int:
            nonlocal at_once
            with lock:
                at_once += 1
                most[:] = max(most[0], at_once), max(most[1], default_pool().stats().in_use_nbytes - before)
            try:
                return call(*arguments)
            finally:
                with lock:
                    at_once -= 1

        return watch

    monkeypatch.setattr(os, "pwrite", watched(pwrite))
    monkeypatch.setattr(os, "preadv", watched(preadv))
    nbytes = 100 * SLOT
    await save(device(nbytes), tmp_path / "file", threads=threads, **SMALL)
    await load(tmp_path / "file", DeviceArray(nbytes), threads=threads, **SMALL)
    assert 1 <= most[0] <= min(threads, SMALL["slots"])
    assert SLOT <= most[1] <= 3 * SLOT
    # A thread that has written a slot keeps it until it goes on to the next thing.
    await until(lambda: default_pool().stats().in_use_nbytes == before)


class Gate:
    """Lets nobody through until it is opened, and tells when somebody has come."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.inside, self.open = threading.Semaphore(0), threading.Event()
        self.finished = 0
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> int:
        self.inside.release()
        assert self.open.wait(60)
        result = self._call(*arguments)
        with self._lock:
            self.finished += 1
        return result

    async def has_come(self, count: int) -> None:
        for _ in range(count):
            assert await anyio.to_thread.run_sync(self.inside.acquire, True, 60)


async def test_slow_disks_hold_up_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(os.pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    pieces = 0
    copy_batch = checkpoint.copy_batch

    async def counted(*arguments: Any, **options: Any) -> None:
        nonlocal pieces
        pieces += 1
        await copy_batch(*arguments, **options)

    monkeypatch.setattr(checkpoint, "copy_batch", counted)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: save(device(20 * SLOT), tmp_path / "file", **SMALL))
        await gate.has_come(3)
        # All slots are with the disk, so that no other piece can have been asked for.
        assert pieces == 3
        gate.open.set()
    assert pieces == 20


@pytest.mark.parametrize("old", [None, b"what was there before"])
async def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes | None) -> None:
    pwrite, path = os.pwrite, tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def full(file: int, data: Any, offset: int) -> int:
        if offset >= 5 * SLOT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        await save(device(20 * SLOT), path, **SMALL)
    assert contents(tmp_path) == ({} if old is None else {"file": old})


async def test_the_last_steps_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            await save(device(2 * SLOT), tmp_path / "file", **SMALL)
    assert only(tmp_path)
    with pytest.raises(FileNotFoundError):
        await save(device(SLOT), tmp_path / "no such folder" / "file", **SMALL)


async def test_the_first_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no thread can be had to clean up."""

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def refused(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(checkpoint, "_in_thread", refused)
    with pytest.raises(OSError, match="No space left"):
        await save(device(3 * SLOT), tmp_path / "file", **SMALL)
    assert only(tmp_path)


async def test_files_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * SLOT))
    with pytest.raises(ValueError, match=f"{2 * SLOT} bytes, and the array {3 * SLOT}"):
        await load(path, DeviceArray(3 * SLOT), **SMALL)
    # Somebody truncates it while it is read.
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, parts, at) if at < SLOT else 0)
    with pytest.raises(EOFError, match=f"at byte {SLOT}"):
        await load(path, DeviceArray(2 * SLOT), **SMALL)


@pytest.mark.emulated_only
@pytest.mark.parametrize("direction", ["save", "load"])
async def test_cancelled_while_the_stream_is_busy(emulated_gpu: Emulator, tmp_path: Path, direction: str) -> None:
    path, array = tmp_path / "file", device(5 * SLOT)
    path.write_bytes(pattern(5 * SLOT, 2).tobytes())
    calls: dict[str, Callable[..., Awaitable[object]]] = {
        "save": lambda: save(array, path, stream=stream, **SMALL),
        "load": lambda: load(path, array, stream=stream, **SMALL),
    }
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(calls[direction])
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        emulated_gpu.release(stream)
        emulated_gpu.settle()
    assert np.array_equal(array.to_numpy(), pattern(5 * SLOT))
    assert path.read_bytes() == pattern(5 * SLOT, 2).tobytes()
    assert only(tmp_path, "file")


class Writing:
    """A save that has three threads in the gate, and what had been written when the file was deleted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.gate = folder, Gate(os.pwrite)
        self.finished_before: list[int] = []
        unlink = Path.unlink

        def watched(path: Path, missing_ok: bool = False) -> None:
            self.finished_before.append(self.gate.finished)
            unlink(path, missing_ok)

        monkeypatch.setattr(os, "pwrite", self.gate)
        monkeypatch.setattr(Path, "unlink", watched)

    async def save(self) -> None:
        await save(device(20 * SLOT), self.folder / "file", **SMALL)

    async def threads_are_waited_for(self) -> None:
        """To be called when it has been cancelled."""
        await anyio.wait_all_tasks_blocked()
        assert not self.finished_before
        self.gate.open.set()

    def check(self) -> None:
        assert set(self.finished_before) == {3}
        assert self.gate.finished == 3
        assert only(self.folder)


async def test_cancelled_while_threads_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(tmp_path, monkeypatch)
    async with anyio.create_task_group() as group, anyio.create_task_group() as inner:
        inner.start_soon(writing.save)
        await writing.gate.has_come(3)
        group.start_soon(writing.threads_are_waited_for)
        inner.cancel_scope.cancel()
    writing.check()


async def test_what_waits_for_a_thread_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(os.pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    async with anyio.create_task_group() as group, anyio.create_task_group() as inner:
        inner.start_soon(lambda: save(device(20 * SLOT), tmp_path / "file", threads=1, **SMALL))
        await gate.has_come(1)
        await anyio.wait_all_tasks_blocked()
        inner.cancel_scope.cancel()
        group.start_soon(opened_later, gate)
    assert gate.finished == 1
    assert only(tmp_path)


async def opened_later(gate: Gate) -> None:
    await anyio.wait_all_tasks_blocked()
    gate.open.set()


@pytest.mark.asyncio_only
async def test_asyncio_cancels_in_its_own_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(tmp_path, monkeypatch)
    task = asyncio.create_task(writing.save())
    await writing.gate.has_come(3)
    task.cancel()
    await anyio.wait_all_tasks_blocked()
    task.cancel()  # some do it twice
    await writing.threads_are_waited_for()
    with pytest.raises(asyncio.CancelledError):
        await task
    writing.check()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("turns", range(6))
async def test_cancelled_again_while_it_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    gate = Gate(os.pwrite)
    monkeypatch.setattr(os, "pwrite", gate)
    task = asyncio.create_task(save(device(20 * SLOT), tmp_path / "file", **SMALL))
    await gate.has_come(3)
    task.cancel()
    await anyio.wait_all_tasks_blocked()
    gate.open.set()
    await until(lambda: gate.finished == 3)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert only(tmp_path)


async def test_an_error_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, copy_batch = Gate(os.pwrite), checkpoint.copy_batch
    monkeypatch.setattr(os, "pwrite", gate)
    calls, failed = 0, anyio.Event()

    async def third_fails(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            await gate.has_come(2)
            failed.set()
            raise RuntimeError("the third")
        await copy_batch(*arguments, **options)

    async def failing() -> None:
        with pytest.raises(RuntimeError, match="the third"):
            await save(device(20 * SLOT), tmp_path / "file", **SMALL)

    monkeypatch.setattr(checkpoint, "copy_batch", third_fails)
    async with anyio.create_task_group() as group:
        group.start_soon(failing)
        await failed.wait()
        await anyio.wait_all_tasks_blocked()
        gate.open.set()
    assert gate.finished == 2
    assert only(tmp_path)


@pytest.mark.emulated_only
async def test_a_failed_copy(emulated_gpu: Emulator, tmp_path: Path) -> None:
    array = device(20 * SLOT)
    emulated_gpu.fail_operation("copy", nth=4)
    with pytest.raises(CudaError):
        await save(array, tmp_path / "file", **SMALL)
    assert only(tmp_path)
