"""Data in motion, by the examples: key-value pages out and back at the same time, and a checkpoint to a RAM disk."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ... import pinned_empty
from ...testing import DeviceArray
from ._decode import Model
from ._machine import Machine
from ._registry import LINK, Figure, Skipped, case

__all__ = [
    "BACK",
    "CHECKPOINT",
    "FROM_FILE",
    "OFFLOAD",
    "OFFLOAD_BESIDE_READER",
    "OFFLOAD_SMALL",
    "OUT",
    "SLOWED",
    "SLOWER",
    "TO_FILE",
]

OFFLOAD = "offload of a key-value cache, 2 MiB pages, both ways at once"
OFFLOAD_SMALL = "offload of a key-value cache, 64 KiB pages, both ways at once"
OFFLOAD_BESIDE_READER = "offload of a key-value cache, 2 MiB pages, beside a kernel that only reads"
CHECKPOINT = "offload of a checkpoint to a RAM disk and back"

OUT, BACK = "rate, out", "rate, back"
SLOWED = "decoding takes longer by"
TO_FILE, FROM_FILE = "rate, to the file", "rate, from the file"
SLOWER = "the slower of link and file system"

_KIB = 1 << 10
# 16 tokens of Llama 3.1 8B in all of its 32 layers, side by side, as vLLM lays them out for offloading since 0.12 (its
# pull request 27743); in one layer they are 64 KiB.
_PAGE_NBYTES, _SMALL_PAGE_NBYTES = 2048 * _KIB, 64 * _KIB
_SEQUENCES = 8
_RAM_DISK = Path("/dev/shm")
_MIB = 1 << 20


@functools.cache
def _example(name: str) -> Any:
    """An example as a module: what is measured is what users are shown, and there is one of it."""
    for root in (Path(__file__).parents[3], Path.cwd()):
        path = root / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"aiocuda_copy_example_{name}", path)
        if path.exists() and spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
            return module
    raise Skipped(f"examples/{name}.py is neither beside the package nor in the current folder")


# A key-value cache. Half of its sequences are on the device and half in host memory; they change places.


def _decoder(machine: Machine) -> Callable[[], float]:
    """A model's steps, by torch; without torch, or without a GPU, a kernel that reads memory as fast as it can."""
    model = None if machine.emulated or importlib.util.find_spec("torch") is None else _model()
    return machine.decode if model is None else model


@functools.cache
def _model() -> Model | None:
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        return Model(torch)
    except (AttributeError, TypeError, torch.OutOfMemoryError) as exc:
        raise Skipped(f"a model's decoding takes torch 2.5 or later, and 6 GB of the device: {exc}") from exc


def _forget_model() -> None:
    """Gives its memory back."""
    _model.cache_clear()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


async def _offload(machine: Machine, page_nbytes: int, decode: Callable[[], float]) -> list[Figure]:
    page_nbytes = min(page_nbytes, machine.bulk_nbytes // _SEQUENCES)
    count = machine.bulk_nbytes // page_nbytes
    pages = DeviceArray((2 * count, page_nbytes))
    offloader = _example("kv_offload").KVOffloader(pages, pinned_empty((2 * count, page_nbytes)), stream=machine.stream)
    sides = [[f"{side} {number}" for number in range(_SEQUENCES)] for side in "ab"]
    for key in sides[0] + sides[1]:
        await offloader.allocate(key, count // _SEQUENCES)
        offloader.release(key)
    await offloader.offload(sides[1])

    alone = await asyncio.to_thread(decode)
    decoding = asyncio.create_task(asyncio.to_thread(decode))
    before, begin = copy.deepcopy(offloader.figures), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for leaving, coming in zip(*sides, strict=True):
            group.create_task(_change_places(offloader, leaving, coming, decoding))
    seconds, after = time.perf_counter() - begin, offloader.figures
    beside = await decoding
    return [
        Figure(OUT, (after.out.nbytes - before.out.nbytes) / seconds / 1e9, "GB/s"),
        Figure(BACK, (after.back.nbytes - before.back.nbytes) / seconds / 1e9, "GB/s"),
        Figure(SLOWED, (beside / alone - 1) * 100, "%"),
    ]


async def _change_places(offloader: Any, leaving: str, coming: str, decoding: asyncio.Task[float]) -> None:
    """Again and again, as long as decoding goes on."""

    async def bring(key: str) -> None:
        await offloader.restore(key)
        offloader.release(key)

    while not decoding.done():
        async with asyncio.TaskGroup() as group:
            group.create_task(offloader.offload([leaving]))
            group.create_task(bring(coming))
        leaving, coming = coming, leaving


@case(OFFLOAD, at_most=3)
async def offload(machine: Machine) -> list[Figure]:
    return await _offload(machine, _PAGE_NBYTES, _decoder(machine))


@case(OFFLOAD_SMALL, at_most=3)
async def offload_of_small_pages(machine: Machine) -> list[Figure]:
    return await _offload(machine, _SMALL_PAGE_NBYTES, _decoder(machine))


@case(OFFLOAD_BESIDE_READER, at_most=3)
async def offload_beside_a_reader(machine: Machine) -> list[Figure]:
    _forget_model()
    return await _offload(machine, _PAGE_NBYTES, machine.decode)


@case(OFFLOAD_SMALL, by=LINK)
@case(OFFLOAD_BESIDE_READER, by=LINK)
@case(OFFLOAD, by=LINK)
async def link_each_way(machine: Machine) -> list[Figure]:
    """Each direction alone."""
    return [
        Figure(OUT, await machine.link(to_host=True) / 1e9, "GB/s"),
        Figure(BACK, await machine.link(to_host=False) / 1e9, "GB/s"),
    ]


# A checkpoint.


def _checkpoint_nbytes(machine: Machine) -> int:
    if not _RAM_DISK.is_dir():
        raise Skipped(f"there is no {_RAM_DISK}")
    nbytes = min(machine.checkpoint_nbytes, shutil.disk_usage(_RAM_DISK).free // 2 // _MIB * _MIB)
    if nbytes < _MIB:
        raise Skipped(f"{_RAM_DISK} is full")
    return nbytes


@case(CHECKPOINT, at_most=3)
async def checkpoint(machine: Machine) -> list[Figure]:
    example, nbytes = _example("checkpoint"), _checkpoint_nbytes(machine)
    array = DeviceArray((nbytes,))
    with tempfile.TemporaryDirectory(dir=_RAM_DISK) as folder:
        saved = await example.save(array, Path(folder) / "file", stream=machine.stream)
        loaded = await example.load(Path(folder) / "file", array, stream=machine.stream)
    size = f"{nbytes >> 20} MiB"
    return [
        Figure(TO_FILE, nbytes / saved.seconds / 1e9, "GB/s", size),
        Figure(FROM_FILE, nbytes / loaded.seconds / 1e9, "GB/s", size),
    ]


@case(CHECKPOINT, by=SLOWER, at_most=3)
async def slower(machine: Machine) -> list[Figure]:
    """Either alone: a bare copy, and threads that write the same pieces to a file, and read them."""
    example, nbytes = _example("checkpoint"), _checkpoint_nbytes(machine)
    with tempfile.TemporaryDirectory(dir=_RAM_DISK) as folder:
        disk = await asyncio.to_thread(_file_system, Path(folder) / "file", nbytes, example)
    figures = []
    for metric, rate, to_host in zip((TO_FILE, FROM_FILE), disk, (True, False), strict=True):
        link = await machine.link(to_host=to_host) / 1e9
        note = f"link {link:.1f} GB/s, file system {rate:.1f} GB/s"
        figures.append(Figure(metric, min(link, rate), "GB/s", note))
    return figures


def _file_system(path: Path, nbytes: int, example: Any) -> tuple[float, float]:
    """GB/s of writing a file and of reading it, as the example does it but without a device. Blocks."""
    size = example.SLOT_NBYTES
    slots = [pinned_empty(size) for _ in range(example.THREADS)]

    def rate(move: Callable[[Any, int], int]) -> float:
        offsets = iter(range(0, nbytes, size))

        def work(slot: Any) -> None:
            for offset in offsets:
                done = move(slot[: min(size, nbytes - offset)], offset)
                assert done == min(size, nbytes - offset)

        begin = time.perf_counter()
        with ThreadPoolExecutor(len(slots)) as pool:
            list(pool.map(work, slots))
        return nbytes / (time.perf_counter() - begin) / 1e9

    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        return (
            rate(lambda part, offset: os.pwrite(file, part, offset)),
            rate(lambda part, offset: os.preadv(file, [part], offset)),
        )
    finally:
        os.close(file)
