"""The offloader of key-value caches in examples/: who has to go, what is never handed out, what an error leaves."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Awaitable, Callable, Hashable, Iterator

import anyio
import anyio.lowlevel
import kv_offload
import numpy as np
import pytest
from kinds import one_loop, pattern, stream_of
from kv_offload import TOKENS_PER_PAGE, Conversations, Full, Gone, KVOffloader, Where, report

from aiocuda_copy import Blocks, CudaError, copy_batch, copy_to_device, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator

NBYTES = 4096


class Cache:
    """An offloader, its memory, and what its sequences must hold."""

    def __init__(self, pages: int, slots: int, stream: int) -> None:
        self.device = DeviceArray((pages, NBYTES))
        self.stream = stream
        self.offloader = KVOffloader(self.device, pinned_empty((slots, NBYTES)), stream=stream)
        self.expected: dict[Hashable, np.ndarray] = {}

    async def fill(self, key: str, count: int) -> list[int]:
        """A new sequence that nobody uses."""
        pages = (await self.offloader.allocate(key, count)).tolist()
        self.expected[key] = pattern(count * NBYTES, ord(key)).reshape(count, NBYTES)
        await self._copy(Blocks(self.expected[key], np.arange(count) * NBYTES), self._blocks(pages))
        self.offloader.release(key)
        return pages

    async def restored(self, key: str) -> list[int]:
        """Restores a sequence, compares it and lets go of it."""
        pages = (await self.offloader.restore(key)).tolist()
        await self.compare(key, pages)
        self.offloader.release(key)
        return pages

    async def compare(self, key: str, pages: list[int]) -> None:
        found = np.empty_like(self.expected[key])
        await self._copy(self._blocks(pages), Blocks(found, np.arange(len(pages)) * NBYTES))
        assert np.array_equal(found, self.expected[key])

    def _blocks(self, pages: list[int]) -> Blocks:
        return Blocks(self.device, np.array(pages) * NBYTES)

    async def _copy(self, source: Blocks, target: Blocks) -> None:
        await copy_batch(self.stream, source, target, sizes=NBYTES)

    def places(self) -> str:
        """Where a, b, c and so on are: D, H, or - for forgotten; l and c for those that are under way."""
        letters = {None: "-", Where.DEVICE: "D", Where.HOST: "H", Where.LEAVING: "l", Where.COMING: "c"}
        return "".join(letters[self.offloader.where(key)] for key in self.expected)

    async def all_free(self) -> None:
        """Every page and every slot can be had when nothing is kept: none was lost, and none is there twice."""
        for key in self.expected:
            if self.offloader.where(key) is not None:
                self.offloader.forget(key)
        pages = await self.offloader.allocate("all", len(self.device))
        assert sorted(pages) == list(range(len(self.device)))
        self.offloader.release("all")
        self.offloader.forget("all")
        slots = len(self.offloader._host)
        assert len(self.offloader._free_slots) == slots
        assert sorted(self.offloader._free_slots.take(slots)) == list(range(slots))


@pytest.fixture
def stream(gpu: Emulator | None) -> Iterator[int]:
    with stream_of(0) as handle:
        yield handle


async def under_way(cache: Cache, places: str) -> None:
    """Until the tasks that have been started are where they are to wait."""
    while cache.places() != places:
        await anyio.lowlevel.checkpoint()


async def test_there_and_back(stream: int) -> None:
    cache = Cache(8, 16, stream)
    await cache.fill("a", 3)
    await cache.fill("b", 2)
    await cache.offloader.offload("ab")
    assert cache.places() == "HH"
    # What is on the device next is not what was there.
    await cache.fill("c", 8)
    await cache.restored("a")
    await cache.restored("b")
    figures = cache.offloader.figures
    assert (figures.on_device, figures.in_host_memory, figures.gone) == (0, 2, 0)
    # c has more pages than were missing, and has left as a whole.
    assert cache.places() == "DDH"
    assert figures.back.nbytes == 5 * NBYTES
    await cache.all_free()


async def test_the_least_recently_used_go_first(stream: int) -> None:
    cache = Cache(6, 12, stream)
    for key in "abc":
        await cache.fill(key, 2)
    await cache.restored("a")
    await cache.fill("d", 2)
    assert cache.places() == "DHDD"
    await cache.fill("e", 3)
    assert cache.places() == "HHHDD"
    figures = cache.offloader.figures
    assert figures.out.batches == 2  # c and a left together
    assert figures.out.nbytes == 6 * NBYTES
    await cache.restored("d")
    await cache.restored("b")
    assert cache.places() == "HDHDH"
    for key in "abcde":
        await cache.restored(key)
    await cache.all_free()


async def test_the_host_forgets_its_oldest(stream: int) -> None:
    cache = Cache(2, 4, stream)
    for key in "abcd":
        await cache.fill(key, 2)
    assert cache.places() == "-HHD"
    assert cache.offloader.figures.forgotten == 1
    with pytest.raises(Gone):
        await cache.offloader.restore("a")
    assert cache.offloader.figures.gone == 1
    await cache.restored("d")
    # d has to make room for b, and c to make room for d: b itself is on its way.
    await cache.restored("b")
    assert cache.places() == "-D-H"
    await cache.restored("d")


async def test_what_is_in_use_stays(stream: int) -> None:
    cache = Cache(4, 8, stream)
    await cache.fill("a", 2)
    await cache.fill("b", 2)
    pages = (await cache.offloader.restore("a")).tolist()
    await cache.fill("c", 2)
    assert cache.places() == "DHD"
    await cache.compare("a", pages)
    with pytest.raises(Full, match="in use"):
        await cache.offloader.allocate("d", 3)
    # Neither has the one that could have gone been moved, nor is there a trace of d.
    assert cache.places() == "DHD"
    assert cache.offloader.where("d") is None
    with pytest.raises(ValueError, match="in use"):
        await cache.offloader.offload("ca")
    with pytest.raises(ValueError, match="in use"):
        cache.offloader.forget("a")
    assert cache.places() == "DHD"
    cache.offloader.release("a")
    with pytest.raises(ValueError, match="not in use"):
        cache.offloader.release("a")
    with pytest.raises(ValueError, match="restore it"):
        await cache.offloader.allocate("a", 1)
    await cache.all_free()


async def test_a_sequence_grows(stream: int) -> None:
    cache = Cache(4, 4, stream)
    await cache.fill("a", 2)
    await cache.fill("b", 2)
    pages = (await cache.offloader.restore("a")).tolist()
    more = (await cache.offloader.allocate("a", 2)).tolist()
    assert cache.places() == "DH"
    assert sorted(pages + more) == [0, 1, 2, 3]
    cache.offloader.release("a")
    assert (await cache.offloader.restore("a")).tolist() == pages + more
    cache.offloader.release("a")
    await cache.all_free()


async def test_no_room_at_all(stream: int) -> None:
    cache = Cache(4, 1, stream)
    await cache.fill("a", 2)
    with pytest.raises(Full, match="1 pages"):
        await cache.offloader.offload("a")
    assert cache.places() == "D"
    # Who has to make room, and finds none, is forgotten.
    await cache.fill("b", 4)
    assert cache.places() == "-D"
    with pytest.raises(ValueError, match="bytes"):
        KVOffloader(cache.device, pinned_empty((2, NBYTES // 2)))
    del cache.expected["a"]
    await cache.all_free()


async def test_who_is_to_be_kept_is_not_forgotten(stream: int) -> None:
    cache = Cache(12, 6, stream)
    for key in "abc":
        await cache.fill(key, 3)
    await cache.offloader.offload("a")
    await cache.offloader.offload("c")
    await cache.offloader.offload("ab")
    assert cache.places() == "HH-"
    await cache.fill("d", 3)
    with pytest.raises(Full, match="too few"):
        await cache.offloader.offload("abd")
    assert cache.places() == "HH-D"
    await cache.restored("a")
    await cache.all_free()


async def test_numbers_that_make_no_sense(stream: int) -> None:
    cache = Cache(4, 4, stream)
    await cache.offloader.allocate("a", 1)
    for key in "ab":
        for count in (0, -1):
            with pytest.raises(ValueError, match=f"at least 1, not {count}"):
                await cache.offloader.allocate(key, count)
    assert cache.offloader.where("b") is None
    cache.offloader.release("a")
    cache.offloader.forget("a")
    await cache.all_free()
    for shape in ((0, NBYTES), (4, 0)):
        with pytest.raises(ValueError, match="no pages"):
            KVOffloader(DeviceArray(shape), pinned_empty((4, NBYTES)))


async def cancellable(scope: anyio.CancelScope, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
    with scope:
        await call(*arguments)


@pytest.mark.emulated_only
@pytest.mark.parametrize("another", [False, True])
async def test_a_sequence_does_not_grow_where_it_is_not(emulated_gpu: Emulator, stream: int, another: bool) -> None:
    cache, first = Cache(4, 4, stream), anyio.CancelScope()
    await cache.fill("a", 2)
    await cache.offloader.offload("a")
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)

    async def grow() -> None:
        if another:
            assert len(await cache.offloader.allocate("a", 1)) == 1
            return
        with pytest.raises(ValueError, match="restore it"):
            await cache.offloader.allocate("a", 1)

    async with anyio.create_task_group() as group:
        group.start_soon(cancellable, first, cache.offloader.restore, "a")
        await under_way(cache, "c")
        group.start_soon(grow)
        await anyio.wait_all_tasks_blocked()
        if another:
            group.start_soon(cache.offloader.restore, "a")
            await anyio.wait_all_tasks_blocked()
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        assert cache.places() == ("c" if another else "H")
        emulated_gpu.release(stream)
    if another:
        cache.offloader.release("a")
    pages = (await cache.offloader.restore("a")).tolist()
    assert len(pages) == (3 if another else 2)
    await cache.compare("a", pages[:2])
    cache.offloader.release("a")
    await cache.all_free()


@pytest.mark.emulated_only
async def test_released_while_it_was_to_grow(emulated_gpu: Emulator, stream: int) -> None:
    cache = Cache(4, 4, stream)
    await cache.fill("a", 2)
    await cache.fill("b", 2)
    await cache.offloader.restore("a")
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)

    async def grow() -> None:
        with pytest.raises(ValueError, match="restore it"):
            await cache.offloader.allocate("a", 1)

    async with anyio.create_task_group() as group:
        group.start_soon(grow)
        await under_way(cache, "Dl")
        cache.offloader.release("a")
        emulated_gpu.release(stream)
    assert len(await cache.restored("a")) == 2
    await cache.all_free()


@pytest.mark.emulated_only
@pytest.mark.parametrize("both", [False, True])
async def test_two_who_make_the_same_sequence(emulated_gpu: Emulator, stream: int, both: bool) -> None:
    cache, first, second = Cache(4, 4, stream), anyio.CancelScope(), anyio.CancelScope()
    await cache.fill("a", 4)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with anyio.create_task_group() as group:
        group.start_soon(cancellable, first, cache.offloader.allocate, "b", 1)
        await under_way(cache, "l")
        group.start_soon(cancellable, second, cache.offloader.allocate, "b", 1)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        if both:
            second.cancel()
        await anyio.wait_all_tasks_blocked()
        emulated_gpu.release(stream)
    if both:
        assert cache.offloader.where("b") is None
    else:
        # The second has it, and nobody else.
        cache.offloader.release("b")
        with pytest.raises(ValueError, match="not in use"):
            cache.offloader.release("b")
        cache.offloader.forget("b")
    await cache.all_free()


@pytest.mark.emulated_only
async def test_a_page_in_flight_is_not_handed_out(emulated_gpu: Emulator, stream: int) -> None:
    cache = Cache(6, 6, stream)
    leaving = await cache.fill("a", 4)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    arrived: list[int] = []

    async def take(count: int) -> None:
        arrived.extend(await cache.offloader.allocate("new", count))

    async with anyio.create_task_group() as group:
        group.start_soon(cache.offloader.offload, ["a"])
        await under_way(cache, "l")
        assert not set(await cache.offloader.allocate("b", 2)) & set(leaving)
        # There is no other page now: this one waits for the copy, and does not fail.
        group.start_soon(take, 1)
        await anyio.wait_all_tasks_blocked()
        assert not arrived
        with pytest.raises(ValueError, match="in use"):
            cache.offloader.forget("a")
        emulated_gpu.release(stream)
    assert set(arrived) < set(leaving)
    assert cache.places() == "H"


@pytest.mark.emulated_only
async def test_who_is_wanted_while_leaving_comes_back(emulated_gpu: Emulator, stream: int) -> None:
    cache = Cache(4, 4, stream)
    await cache.fill("a", 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with anyio.create_task_group() as group:
        group.start_soon(cache.offloader.offload, ["a"])
        await under_way(cache, "l")
        # Twice: the second finds it under way, and waits for the first.
        group.start_soon(cache.offloader.restore, "a")
        group.start_soon(cache.offloader.restore, "a")
        await anyio.wait_all_tasks_blocked()
        emulated_gpu.release(stream)
    assert cache.places() == "D"
    assert cache.offloader.figures.back.batches == 1
    cache.offloader.release("a")
    cache.offloader.release("a")
    await cache.restored("a")
    await cache.all_free()


@pytest.mark.emulated_only
async def test_both_directions_at_once(emulated_gpu: Emulator, stream: int) -> None:
    cache = Cache(4, 4, stream)
    await cache.fill("a", 2)
    await cache.offloader.offload("a")
    await cache.fill("b", 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with anyio.create_task_group() as group:
        group.start_soon(cache.restored, "a")
        group.start_soon(cache.offloader.offload, ["b"])
        await under_way(cache, "cl")
        emulated_gpu.release(stream)
    assert cache.places() == "DH"
    await cache.restored("b")
    await cache.all_free()


@pytest.mark.emulated_only
@pytest.mark.parametrize("direction", ["out", "back"])
async def test_cancelled_in_the_middle(emulated_gpu: Emulator, stream: int, direction: str) -> None:
    cache = Cache(4, 4, stream)
    await cache.fill("a", 3)
    if direction == "back":
        await cache.offloader.offload("a")
    before = cache.places()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with anyio.create_task_group() as group:
        if direction == "out":
            group.start_soon(cache.offloader.offload, ["a"])
        else:
            group.start_soon(cache.offloader.restore, "a")
        await under_way(cache, "l" if direction == "out" else "c")
        group.cancel_scope.cancel()
    # The stream is still held, and yet everything is where it was, and whole.
    assert cache.places() == before
    emulated_gpu.release(stream)
    await cache.restored("a")
    await cache.all_free()


@pytest.mark.emulated_only
async def test_a_cancelled_eviction_moves_nothing(emulated_gpu: Emulator, stream: int) -> None:
    cache = Cache(4, 4, stream)
    await cache.fill("a", 4)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with anyio.create_task_group() as group:
        group.start_soon(cache.offloader.allocate, "b", 2)
        await under_way(cache, "l")
        group.cancel_scope.cancel()
    assert cache.places() == "D"
    assert cache.offloader.where("b") is None
    emulated_gpu.release(stream)
    await cache.restored("a")
    await cache.all_free()


@one_loop
@pytest.mark.emulated_only
async def test_a_failed_copy_is_an_error(emulated_gpu: Emulator, stream: int) -> None:
    cache = Cache(4, 4, stream)
    await cache.fill("a", 3)
    emulated_gpu.fault()
    with pytest.raises(CudaError):
        await cache.offloader.offload("a")
    assert cache.places() == "D"
    with pytest.raises(CudaError):
        await cache.offloader.allocate("b", 2)
    assert cache.offloader.where("b") is None


async def test_conversations(gpu: Emulator | None) -> None:
    conversations = Conversations(48, NBYTES)
    await conversations.serve(63, at_once=3, tokens=8)
    figures = conversations.offloader.figures
    assert figures.on_device + figures.in_host_memory + figures.gone == 63
    assert figures.in_host_memory > 0
    assert figures.out.nbytes >= figures.back.nbytes > 0
    # Each turn compares at least the prompt.
    assert conversations.compared_nbytes >= 63 * 6 * NBYTES
    assert "63 turns" in report(conversations)


async def test_a_conversation_goes_to_another_cache(gpu: Emulator | None) -> None:
    here, there = Conversations(16, NBYTES), Conversations(16, NBYTES)
    await here.turn("a", 20)
    content, tokens = await here.give("a")
    assert tokens == 6 * TOKENS_PER_PAGE + 20
    assert here.offloader.where("a") is None
    content.flags.writeable = False  # as of what has come through shared memory
    await there.take("a", content, tokens)
    await there.turn("a", 20)
    assert there.offloader.figures.on_device == 1
    assert there.compared_nbytes == content.nbytes


async def test_changed_bytes_are_noticed(gpu: Emulator | None) -> None:
    conversations = Conversations(8, NBYTES)
    await conversations.turn("a", 0)
    await copy_to_device(np.zeros(NBYTES, np.uint8), conversations.decoder.pages[3])
    with pytest.raises(AssertionError, match="has changed"):
        await conversations.turn("a", 0)


@pytest.mark.parametrize("pages", ["0", "1", "7"])
def test_a_cache_too_small_for_the_demonstration(
    gpu: Emulator | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pages: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["kv_offload.py", "--pages", pages])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(kv_offload.__file__), run_name="__main__")
    assert "error: --pages" in capsys.readouterr().err
