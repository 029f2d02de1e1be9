"""A key-value cache that is larger than the device: pages go out to page-locked host memory and come back by `await`.

    python examples/kv_offload.py [--pages 256] [--page-kib 64] [--turns 96]

`KVOffloader` keeps the pages of sequences. Those that are being decoded are on the device; when pages run short, the
sequences that have not been used for longest are copied out, in one batch for all of them, and when the host's room
runs short as well, the oldest there are forgotten. Batches in both directions, for whatever sequences, run at the same
time, and while they do, decoding goes on.

The demonstration has more conversations than the device has pages. Each turn restores one (or computes it again, where
it has been forgotten), compares every byte, decodes some tokens, and lets go of it.

AIOCUDA_COPY_DRIVER=emulated runs it without a GPU. On a GPU decoding is torch's, where torch is there.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import importlib.util
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from aiocuda_copy import Blocks, copy_batch, pinned_empty
from aiocuda_copy.testing import DeviceArray, current_emulator, driver_from_environment


class Gone(KeyError):
    """The sequence is neither on the device nor in host memory: it has to be computed again."""


class Full(RuntimeError):
    """There is no room, and what takes it up is in use."""


class Where(enum.Enum):
    DEVICE = enum.auto()
    LEAVING = enum.auto()
    HOST = enum.auto()
    COMING = enum.auto()


NOTHING = np.empty(0, np.int64)


class _Free:
    """Numbers that are free. Taken and given as arrays, so that a thousand of them cost what one does."""

    def __init__(self, count: int) -> None:
        self._numbers = np.arange(count)[::-1].copy()
        self._count = count

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> np.ndarray:
        self._count -= count
        return self._numbers[self._count : self._count + count].copy()

    def give(self, numbers: np.ndarray) -> None:
        self._numbers[self._count : self._count + len(numbers)] = numbers
        self._count += len(numbers)


@dataclass(eq=False)
class _Sequence:
    key: Hashable
    # Numbers of pages on the device, and in host memory: of both only while it moves.
    pages: np.ndarray = field(default_factory=lambda: NOTHING)
    slots: np.ndarray = field(default_factory=lambda: NOTHING)
    where: Where = Where.DEVICE
    users: int = 0

    @property
    def new(self) -> bool:
        """Whether it is still to have its first pages."""
        return not len(self.pages) and not len(self.slots)

    @property
    def moving(self) -> bool:
        return self.where in (Where.LEAVING, Where.COMING)

    def check_used(self, others: int) -> None:
        if not others and not self.new:
            raise ValueError(f"{self.key!r} is not in use; restore it")


@dataclass
class Traffic:
    """What went in one direction. ``seconds`` is for how long there was at least one batch."""

    nbytes: int = 0
    batches: int = 0
    seconds: float = 0.0
    _running: int = 0
    _begin: float = 0.0

    @contextmanager
    def batch(self, nbytes: int) -> Iterator[None]:
        if not self._running:
            self._begin = time.perf_counter()
        self._running += 1
        try:
            yield
            self.nbytes += nbytes
            self.batches += 1
        finally:
            self._running -= 1
            if not self._running:
                self.seconds += time.perf_counter() - self._begin

    def __str__(self) -> str:
        rate = self.nbytes / max(self.seconds, 1e-9) / 1e9
        return f"{self.nbytes / 1e6:.0f} MB in {self.batches} batches, {rate:.2f} GB/s"


@dataclass
class Figures:
    """What happened so far: where `restore` found sequences, and what was moved or forgotten for want of room."""

    on_device: int = 0
    in_host_memory: int = 0
    gone: int = 0
    forgotten: int = 0
    out: Traffic = field(default_factory=Traffic)
    back: Traffic = field(default_factory=Traffic)


class KVOffloader:
    """Keeps the pages of sequences, on the device and in page-locked host memory. For one event loop.

    Whoever has a sequence from `allocate` or `restore` uses it until `release`; as long as somebody does, its pages
    stay where they are. A copy holds the pages of both its sides until it has ended: none of them is handed out before.
    When it is cancelled or fails, its sequences are where they were.

    Parameters
    ----------
    pages
        The cache: one C-contiguous array on a device, whose first dimension is that of the pages.
    host
        One C-contiguous array of page-locked memory, likewise. Its length is how many pages it may hold.
    stream
        The stream that decoding is enqueued in. Copies out come after what it has of decoding, and what is enqueued
        after `restore` has returned comes after the copy.
    """

    def __init__(self, pages: Any, host: np.ndarray, *, stream: Any = None) -> None:
        if not pages.nbytes:
            raise ValueError("the cache has no pages, or pages of no bytes")
        self.page_nbytes = pages.nbytes // len(pages)
        if host.nbytes != len(host) * self.page_nbytes:
            raise ValueError(f"pages have {self.page_nbytes} bytes on the device and {host[0].nbytes} in host memory")
        self.figures = Figures()
        self._pages, self._host, self._stream = pages, host, stream
        self._free_pages = _Free(len(pages))
        self._free_slots = _Free(len(host))
        # The least recently used first.
        self._sequences: OrderedDict[Hashable, _Sequence] = OrderedDict()
        self._copies = 0
        self._change: anyio.Event | None = None

    # For decoding.

    async def allocate(self, key: Hashable, count: int) -> np.ndarray:
        """Gives a sequence pages on the device: a new one, which is then in use, or one that is in use.

        Raises
        ------
        Full
            Even without all sequences that nobody uses there would not be that many.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        sequence = self._sequences.setdefault(key, _Sequence(key))
        sequence.check_used(sequence.users)
        sequence.users += 1
        pages = NOTHING
        try:
            await self._until_still(sequence)
            # Whoever used it may have let go of it meanwhile, or have been cancelled while bringing it.
            sequence.check_used(sequence.users - 1)
            if sequence.where is Where.HOST:
                await self._bring(sequence)
            pages = await self._take_pages(count)
            sequence.check_used(sequence.users - 1)
        except BaseException:
            self._free_pages.give(pages)
            self.release(key)
            if sequence.new and not sequence.users:
                self._drop(sequence)
            raise
        # Of several that are at it, the one that comes first makes it, and keeps it in use.
        new = sequence.new
        sequence.pages = np.concatenate([sequence.pages, pages])
        if not new:
            self.release(key)
        return pages

    async def restore(self, key: Hashable) -> np.ndarray:
        """Brings a sequence to the device, where it is not there, and uses it; returns its pages in their order.

        Raises
        ------
        Gone
            It has never been there, or has been forgotten.
        Full
            As for `allocate`.
        """
        self.figures.gone += self.where(key) is None
        sequence = self._find(key)
        # From now on nobody moves it, or forgets it.
        sequence.users += 1
        try:
            await self._until_still(sequence)
            if sequence.where is Where.HOST:
                await self._bring(sequence)
                self.figures.in_host_memory += 1
            else:
                self.figures.on_device += 1
        except BaseException:
            self.release(key)
            raise
        return sequence.pages.copy()

    def release(self, key: Hashable) -> None:
        """Ends the use of a sequence, which may now be copied out when its pages are needed."""
        sequence = self._find(key)
        if not sequence.users:
            raise ValueError(f"{key!r} is not in use")
        sequence.users -= 1
        # Only those that nobody uses are ever compared, so this is when it was last used.
        self._sequences.move_to_end(key)

    async def offload(self, keys: Iterable[Hashable]) -> None:
        """Copies sequences out in one batch, before their pages are needed. Nobody may use them; none is forgotten.

        Raises
        ------
        Gone, Full
            As for `restore`; nothing has been moved.
        """
        keys = list(dict.fromkeys(keys))
        while True:
            asked = [self._find(key) for key in keys]
            leaving = [one for one in asked if one.where is not Where.HOST]
            in_use = [one.key for one in leaving if one.users]
            if in_use:
                raise ValueError(f"in use: {in_use}")
            if not any(one.moving for one in leaving):
                slots = self._take_slots(sum(len(one.pages) for one in leaving), set(asked))
                if slots is not None:
                    break
                if not self._copies:
                    raise Full(f"host memory has {len(self._host)} pages, too few for {keys} beside those in use")
            await self._until_change()
        await self._send(leaving, slots)

    def forget(self, key: Hashable) -> None:
        """Frees the pages of a sequence that nobody uses and that is not being copied."""
        sequence = self._find(key)
        if sequence.users or sequence.moving:
            raise ValueError(f"{key!r} is in use")
        self._drop(sequence)

    def where(self, key: Hashable) -> Where | None:
        sequence = self._sequences.get(key)
        return None if sequence is None else sequence.where

    # Room.

    def _find(self, key: Hashable) -> _Sequence:
        try:
            return self._sequences[key]
        except KeyError:
            raise Gone(key) from None

    def _drop(self, sequence: _Sequence) -> None:
        self._free_pages.give(sequence.pages)
        self._free_slots.give(sequence.slots)
        del self._sequences[sequence.key]
        self._changed()

    def _idle(self, where: Where) -> list[_Sequence]:
        """Those that may be moved, or forgotten; the least recently used first."""
        return [one for one in self._sequences.values() if one.where is where and not one.users]

    async def _take_pages(self, count: int) -> np.ndarray:
        while (missing := count - len(self._free_pages)) > 0:
            missing -= sum(len(one.pages) for one in self._sequences.values() if one.where is Where.LEAVING)
            if missing <= 0:
                await self._until_change()
                continue
            victims = _enough(self._idle(Where.DEVICE), missing)
            if victims is None:
                raise Full(f"{count} pages are not to be had: {missing} too many are in use")
            await self._evict(victims)
        return self._free_pages.take(count)

    async def _evict(self, victims: list[_Sequence]) -> None:
        while victims:
            slots = self._take_slots(sum(len(one.pages) for one in victims))
            if slots is not None:
                await self._send(victims, slots)
                return
            if self._copies:
                # They end, and whatever is right then is found anew.
                await self._until_change()
                return
            self.figures.forgotten += 1
            self._drop(victims.pop(0))

    def _take_slots(self, count: int, kept: Collection[_Sequence] = frozenset()) -> np.ndarray | None:
        """Room in host memory, if there is or can be made that much."""
        missing = count - len(self._free_slots)
        oldest = _enough([one for one in self._idle(Where.HOST) if one not in kept], missing)
        if oldest is None:
            return None
        for one in oldest:
            self.figures.forgotten += 1
            self._drop(one)
        return self._free_slots.take(count)

    # Copies.

    async def _send(self, sequences: list[_Sequence], slots: np.ndarray) -> None:
        for one in sequences:
            one.slots, slots = np.split(slots, [len(one.pages)])
            one.where = Where.LEAVING
        device, host = self._blocks(sequences)
        try:
            await self._copy(device, host, self.figures.out)
        except BaseException:
            for one in sequences:
                self._free_slots.give(one.slots)
                one.slots, one.where = NOTHING, Where.DEVICE
            raise
        else:
            for one in sequences:
                self._free_pages.give(one.pages)
                one.pages, one.where = NOTHING, Where.HOST
        finally:
            self._changed()

    async def _bring(self, sequence: _Sequence) -> None:
        sequence.where = Where.COMING
        try:
            sequence.pages = await self._take_pages(len(sequence.slots))
            device, host = self._blocks([sequence])
            await self._copy(host, device, self.figures.back)
        except BaseException:
            self._free_pages.give(sequence.pages)
            sequence.pages, sequence.where = NOTHING, Where.HOST
            raise
        else:
            self._free_slots.give(sequence.slots)
            sequence.slots, sequence.where = NOTHING, Where.DEVICE
        finally:
            self._changed()

    def _blocks(self, sequences: list[_Sequence]) -> tuple[Blocks, Blocks]:
        pages = np.concatenate([NOTHING, *(one.pages for one in sequences)])
        slots = np.concatenate([NOTHING, *(one.slots for one in sequences)])
        return Blocks(self._pages, pages * self.page_nbytes), Blocks(self._host, slots * self.page_nbytes)

    async def _copy(self, source: Blocks, target: Blocks, traffic: Traffic) -> None:
        self._copies += 1
        try:
            with traffic.batch(len(source) * self.page_nbytes):
                await copy_batch(self._stream, source, target, sizes=self.page_nbytes)
        finally:
            self._copies -= 1

    # Waiting for others.

    async def _until_still(self, sequence: _Sequence) -> None:
        while sequence.moving:
            await self._until_change()

    async def _until_change(self) -> None:
        if self._change is None:
            self._change = anyio.Event()
        await self._change.wait()

    def _changed(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None


def _enough(sequences: list[_Sequence], count: int) -> list[_Sequence] | None:
    """As many of them, from the first on, as have that many pages together; ``None`` where all have fewer."""
    chosen = []
    for one in sequences:
        if count <= 0:
            break
        chosen.append(one)
        count -= len(one.pages) or len(one.slots)
    return chosen if count <= 0 else None


# The demonstration: decoding, and the conversations.

TOKENS_PER_PAGE = 16


class Decoding:
    """A stream in which tokens are decoded: a kernel that takes its time, then the token's row of its page."""

    def __init__(self, pages: int, page_nbytes: int) -> None:
        from cuda.core import Buffer, Device

        self._device = Device()
        self._device.set_current()
        self.stream: Any = self._device.create_stream()
        self.pages: Any = DeviceArray((pages, page_nbytes))
        self._all = Buffer.from_handle(self.pages.ptr, self.pages.nbytes, owner=self.pages)
        self._part = Buffer.from_handle

    def token(self, page: int, begin: int, end: int, value: int) -> None:
        """Enqueues the decoding of one token; ``value`` stands for its keys and values."""
        # This may be another thread than the one that it was made in.
        self._device.set_current()
        if (emulator := current_emulator()) is not None:
            emulator.kernel(self.stream, 0.05)
        self._part(self.pages[page].ptr + begin, end - begin, owner=self._all).fill(value, stream=self.stream)


class TorchDecoding:
    """The same by torch: the product of two matrices stands for the model."""

    def __init__(self, pages: int, page_nbytes: int) -> None:
        import torch

        self._torch = torch
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.pages = torch.zeros((pages, page_nbytes), dtype=torch.uint8, device="cuda")
            self._weights = torch.ones((2048, 2048), dtype=torch.float16, device="cuda")

    def token(self, page: int, begin: int, end: int, value: int) -> None:
        with self._torch.cuda.stream(self.stream):
            self._weights @ self._weights
            self.pages[page, begin:end] = value


def decoding(pages: int, page_nbytes: int) -> Decoding | TorchDecoding:
    """Torch's on a GPU, where torch is there and works; else the driver's own."""
    driver_from_environment()
    if current_emulator() is None and importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return TorchDecoding(pages, page_nbytes)
    return Decoding(pages, page_nbytes)


class Conversations:
    """A cache on the current device, what every page of it must hold, and the turns that decode more."""

    def __init__(self, pages: int, page_nbytes: int, *, prompt_pages: int = 6) -> None:
        self.decoder = decoder = decoding(pages, page_nbytes)
        self.offloader = KVOffloader(decoder.pages, pinned_empty((pages, page_nbytes)), stream=decoder.stream)
        self.prompt_pages = prompt_pages
        self.compared_nbytes = 0
        # By key: all its pages, and how many tokens it has.
        self._expected: dict[Hashable, np.ndarray] = {}
        self._tokens: dict[Hashable, int] = {}

    async def serve(self, turns: int, *, at_once: int = 4, tokens: int = 4, seed: int = 0) -> None:
        """Serves turns of conversations that together have twice the device's pages, some of them at a time."""
        each = max(2 * len(self.decoder.pages) // self.prompt_pages // at_once, 1)

        async def serve_some(first: int, count: int) -> None:
            random = np.random.default_rng((seed, first))
            for _ in range(count):
                # Some are more popular than others, as in life.
                number = min(int(random.geometric(min(2 / each, 1))), each) - 1
                await self.turn(first + number, tokens)

        async with anyio.create_task_group() as group:
            for index in range(at_once):
                group.start_soon(serve_some, index * each, turns // at_once)

    async def turn(self, key: Hashable, tokens: int) -> None:
        """Restores a conversation, or computes it again, compares it, and decodes some tokens."""
        try:
            pages = (await self.offloader.restore(key)).tolist()
        except Gone:
            pages = await self._prefill(key)
        try:
            await self._compare(key, pages)
            for _ in range(tokens):
                await self._decode(key, pages)
        finally:
            self.offloader.release(key)

    async def give(self, key: Hashable) -> tuple[np.ndarray, int]:
        """Hands a conversation over: its pages, as an array in host memory, and how many tokens it has."""
        pages = (await self.offloader.restore(key)).tolist()
        try:
            content = await self._compare(key, pages)
        finally:
            self.offloader.release(key)
        self.offloader.forget(key)
        del self._expected[key]
        return content, self._tokens.pop(key)

    async def take(self, key: Hashable, content: np.ndarray, tokens: int) -> None:
        """Takes a conversation over."""
        self._expected[key], self._tokens[key] = content.copy(), tokens
        await self._fill(key, content)
        self.offloader.release(key)

    async def _prefill(self, key: Hashable) -> list[int]:
        if key not in self._expected:
            shape = self.prompt_pages, self.offloader.page_nbytes
            self._expected[key] = np.random.default_rng(abs(hash(key))).integers(0, 256, shape, np.uint8)
            self._tokens[key] = self.prompt_pages * TOKENS_PER_PAGE
        return await self._fill(key, self._expected[key])

    async def _fill(self, key: Hashable, content: np.ndarray) -> list[int]:
        """A stand-in for the model, which would compute the pages on the device."""
        pages = (await self.offloader.allocate(key, len(content))).tolist()
        try:
            await self._copy(*self._both(content, pages))
        except BaseException:
            self.offloader.release(key)
            self.offloader.forget(key)
            raise
        return pages

    async def _decode(self, key: Hashable, pages: list[int]) -> None:
        index, row = divmod(self._tokens[key], TOKENS_PER_PAGE)
        if index == len(pages):
            pages += (await self.offloader.allocate(key, 1)).tolist()
        if index == len(self._expected[key]):
            blank = np.zeros((1, self.offloader.page_nbytes), np.uint8)
            await self._copy(*self._both(blank, pages[index:]))
            self._expected[key] = np.concatenate([self._expected[key], blank])
        nbytes = self.offloader.page_nbytes // TOKENS_PER_PAGE
        begin, end, value = row * nbytes, (row + 1) * nbytes, self._tokens[key] % 251 + 1
        self.decoder.token(pages[index], begin, end, value)
        self._expected[key][index, begin:end] = value
        self._tokens[key] += 1
        await anyio.lowlevel.checkpoint()

    async def _compare(self, key: Hashable, pages: list[int]) -> np.ndarray:
        found = np.empty_like(self._expected[key])
        host, device = self._both(found, pages[: len(found)])
        await self._copy(device, host)
        if not np.array_equal(found, self._expected[key]):
            raise AssertionError(f"{key!r} has changed on its way")
        self.compared_nbytes += found.nbytes
        return found

    def _both(self, host: np.ndarray, pages: list[int]) -> tuple[Blocks, Blocks]:
        nbytes = self.offloader.page_nbytes
        return Blocks(host, np.arange(len(host)) * nbytes), Blocks(self.decoder.pages, np.array(pages) * nbytes)

    async def _copy(self, source: Blocks, target: Blocks) -> None:
        await copy_batch(self.decoder.stream, source, target, sizes=self.offloader.page_nbytes)


def report(conversations: Conversations) -> str:
    figures = conversations.offloader.figures
    asked = figures.on_device + figures.in_host_memory + figures.gone
    return (
        f"{asked} turns: {figures.on_device} found on the device, {figures.in_host_memory} in host memory, "
        f"{figures.gone} computed; {figures.forgotten} forgotten\n"
        f"out:  {figures.out}\nback: {figures.back}\n"
        f"{conversations.compared_nbytes / 1e6:.0f} MB compared: every byte is the same"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=int, default=256, help="pages on the device, and in host memory (256)")
    parser.add_argument("--page-kib", type=int, default=64, help="KiB of a page (64)")
    parser.add_argument("--turns", type=int, default=192, help="turns of conversations (192)")
    arguments = parser.parse_args()
    if arguments.pages < 1 or arguments.page_kib < 1:
        parser.error("--pages and --page-kib must be at least 1")
    conversations = Conversations(arguments.pages, arguments.page_kib << 10)
    try:
        asyncio.run(conversations.serve(arguments.turns))
    except ExceptionGroup as group:
        if group.split(Full)[1] is not None:
            raise
        parser.error(f"--pages {arguments.pages} are too few for four conversations at a time that grow by every turn")
    print(report(conversations))
