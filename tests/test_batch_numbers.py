"""copy_batch with Blocks and with addresses: buffers of numbers in place of objects."""

from __future__ import annotations

import array
import asyncio
import functools
import gc
import resource
import threading
from typing import Any

import anyio
import numpy as np
import pytest
from calls import turns, until
from cuda.bindings import driver
from hypothesis import given
from hypothesis import strategies as st
from kinds import HOST_KINDS, Managed, check, context_of, host_view, need_two_devices, one_loop, pattern, stream_of

from aiocuda_copy import Blocks, Copier, _copies, _copy_batch, _driver, _native, copy_batch, pinned, pinned_empty
from aiocuda_copy.testing import DeviceArray

NBYTES = 512


@pytest.fixture(autouse=True, params=["short", "long"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the short way, where a batch is plain, and by the long one."""
    if request.param == "long":
        monkeypatch.setattr(_copy_batch, "_MOST_AT_ONCE", -1)


def shuffled(n: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).permutation(n)


def addresses(base: int, index: np.ndarray, step: int = NBYTES) -> np.ndarray:
    return base + index.astype(np.uint64) * np.uint64(step)


def pages(data: np.ndarray) -> np.ndarray:
    return np.asarray(data).reshape(-1, NBYTES)


# Data.


@one_loop
@pytest.mark.parametrize("host_kind", HOST_KINDS)
async def test_blocks_of_every_kind_both_ways(host_kind: str) -> None:
    n = 100
    order, data = shuffled(n), pattern(n * NBYTES)
    device = DeviceArray.from_numpy(data)
    with HOST_KINDS[host_kind](n * NBYTES) as (host, view):
        into = Blocks(host, np.arange(n, dtype=np.int64) * NBYTES)
        await copy_batch(0, Blocks(device, order.astype(np.uint64) * np.uint64(NBYTES)), into, sizes=NBYTES)
        assert np.array_equal(pages(view), pages(data)[order])
        back = DeviceArray(n * NBYTES)
        await copy_batch(0, into, Blocks(back, order * NBYTES), sizes=NBYTES)
        assert np.array_equal(back.to_numpy(), data)
        del host, view, into


@pytest.mark.parametrize("sizes", [17, np.int32(17), np.uint64(17), np.full(20, 17), array.array("Q", [17] * 20)])
async def test_forms_of_sizes(sizes: Any) -> None:
    device, host = DeviceArray.from_numpy(pattern(1000)), np.zeros(1000, np.uint8)
    offsets = np.arange(20) * 40
    await copy_batch(None, Blocks(device, offsets), Blocks(host, offsets), sizes=sizes)
    expected = np.zeros(1000, np.uint8)
    for offset in offsets:
        expected[offset : offset + 17] = pattern(1000)[offset : offset + 17]
    assert np.array_equal(host, expected)


@pytest.mark.parametrize(
    "make",
    [np.array, lambda v: array.array("q", v), lambda v: memoryview(array.array("Q", v))],
    ids=["ndarray", "array.array", "memoryview"],
)
async def test_forms_of_offsets(make: Any) -> None:
    device, host = DeviceArray.from_numpy(pattern(100)), np.zeros(100, np.uint8)
    blocks = Blocks(device, make([0, 50, 25]))
    assert len(blocks) == 3
    assert "DeviceArray" in repr(blocks)
    await copy_batch(0, blocks, Blocks(host, make([75, 0, 25])), sizes=25)
    assert np.array_equal(host[75:], pattern(100)[:25])
    assert np.array_equal(host[:25], pattern(100)[50:75])
    assert np.array_equal(host[25:50], pattern(100)[25:50])


async def test_sizes_of_their_own_and_nothing_beside_them() -> None:
    sizes = np.array([0, 1, 31, 4096, 0, 32_769, 5, 100_000])
    offsets = np.concatenate([[0], np.cumsum(sizes + 7)[:-1]])
    total = int((sizes + 7).sum())
    data = pattern(total)
    device, host = DeviceArray.from_numpy(data), np.zeros(total, np.uint8)
    await copy_batch(0, Blocks(device, offsets), Blocks(host, offsets), sizes=sizes)
    expected = np.zeros(total, np.uint8)
    for offset, nbytes in zip(offsets, sizes, strict=True):
        expected[offset : offset + nbytes] = data[offset : offset + nbytes]
    assert np.array_equal(host, expected)


async def test_blocks_and_addresses_together() -> None:
    device, host = DeviceArray.from_numpy(pattern(1000)), np.zeros(1000, np.uint8)
    at = addresses(host.ctypes.data, np.array([1, 0]), 500)
    await copy_batch(0, Blocks(device, np.array([0, 500])), at, sizes=500)
    assert np.array_equal(host, np.roll(pattern(1000), 500))
    back = DeviceArray(1000)
    await copy_batch(0, at, Blocks(back, np.array([0, 500])), sizes=500)
    assert np.array_equal(back.to_numpy(), pattern(1000))


async def test_addresses_of_many_kinds_in_one_batch() -> None:
    source, copy, managed = DeviceArray.from_numpy(pattern(100)), DeviceArray(100), Managed(100)
    pageable, page_locked, into = np.zeros(100, np.uint8), pinned_empty(100), DeviceArray(100)
    views = host_view(managed.address, 100)
    views[:] = pattern(100, 2)
    srcs = [source.ptr, source.ptr, source.ptr, managed.address]
    dsts = [pageable.ctypes.data, page_locked.ctypes.data, copy.ptr, into.ptr]
    await copy_batch(0, np.array(srcs, np.uint64), np.array(dsts, np.uint64), sizes=100)
    assert np.array_equal(pageable, pattern(100))
    assert np.array_equal(page_locked, pattern(100))
    assert np.array_equal(copy.to_numpy(), pattern(100))
    assert np.array_equal(into.to_numpy(), pattern(100, 2))
    managed.free()


@one_loop
@pytest.mark.parametrize("form", ["addresses", "blocks"])
async def test_a_million_entries_in_bounded_memory(form: str) -> None:
    # vllm-project/vllm#49276: tens of thousands of entries crashed.
    n, nbytes = 1_000_000, 16
    data = pattern(n * nbytes)
    order = shuffled(n)
    device, host = DeviceArray.from_numpy(data), np.zeros(n * nbytes, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if form == "addresses":
        srcs: Any = addresses(device.ptr, order, nbytes)
        dsts: Any = addresses(host.ctypes.data, np.arange(n), nbytes)
    else:
        srcs, dsts = Blocks(device, order * nbytes), Blocks(host, np.arange(n) * nbytes)
    await copy_batch(0, srcs, dsts, sizes=nbytes)
    assert np.array_equal(host.reshape(n, nbytes), data.reshape(n, nbytes)[order])
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 400 << 10, f"{grown >> 10} MiB for {n} entries"


@one_loop
@pytest.mark.parametrize("nbytes", [40_000, 9 << 20])
async def test_blocks_of_memory_that_is_page_locked_in_part(nbytes: int) -> None:
    # The driver refuses one copy over two registrations.
    data = pattern(4 * nbytes)
    device, host = DeviceArray.from_numpy(data), np.zeros(4 * nbytes, np.uint8)
    offsets = np.arange(4) * nbytes
    with pinned(host[: nbytes // 2]), pinned(host[nbytes // 2 : nbytes]), pinned(host[3 * nbytes + 5 :]):
        await copy_batch(0, Blocks(device, offsets), Blocks(host, offsets), sizes=nbytes)
        assert np.array_equal(host, data)
        back = DeviceArray(4 * nbytes)
        await copy_batch(0, Blocks(host, offsets), Blocks(back, offsets), sizes=nbytes)
        assert np.array_equal(back.to_numpy(), data)


async def test_addresses_in_memory_that_is_page_locked_in_part() -> None:
    n, step = 40, 4096
    host = np.zeros(n * step, np.uint8)
    device = DeviceArray.from_numpy(pattern(n * step))
    order = shuffled(n)
    with pinned(host[3 * step : 9 * step]), pinned(host[20 * step : 30 * step]):
        at_device, at_host = addresses(device.ptr, order, step), addresses(host.ctypes.data, order, step)
        await copy_batch(0, at_device, at_host, sizes=step)
        assert np.array_equal(host, pattern(n * step))
        back = DeviceArray(n * step)
        await copy_batch(0, at_host, addresses(back.ptr, order, step), sizes=step)
        assert np.array_equal(back.to_numpy(), pattern(n * step))


async def test_what_completes_at_once() -> None:
    nothing = np.zeros(0, np.uint64)
    device, host = DeviceArray(10), np.zeros(10, np.uint8)
    async with Copier() as copier:
        for stream in (None, 0, 2):
            await copier.copy_batch(stream, nothing, nothing, sizes=5)
            await copier.copy_batch(stream, nothing, nothing, sizes=nothing)
            await copier.copy_batch(stream, Blocks(device, nothing), Blocks(host, nothing), sizes=7)
            await copier.copy_batch(stream, Blocks(device, np.arange(4)), Blocks(host, np.arange(4)), sizes=0)
            null = np.zeros(3, np.uint64)
            await copier.copy_batch(stream, null, null, sizes=np.zeros(3, np.int64))
        assert copier.stats().submitted == 0


async def test_options() -> None:
    utils = pytest.importorskip("cuda.core.utils")
    early = utils.CopyOptions(src_access_order="any")
    device, host = DeviceArray.from_numpy(pattern(400)), pinned_empty(400)
    blocks, into = Blocks(device, np.arange(4) * 100), Blocks(host, np.arange(4) * 100)
    for options in (early, [early, utils.CopyOptions(), early, None]):
        host.fill(0)
        await copy_batch(2, blocks, into, sizes=100, options=options)
        assert np.array_equal(host, pattern(400))
    with pytest.raises(ValueError, match="3 options for 4"):
        await copy_batch(2, blocks, into, sizes=100, options=[early] * 3)


@pytest.mark.parametrize("form", ["blocks", "addresses"])
async def test_the_order_of_the_stream(emulated_gpu: Any, form: str) -> None:
    source, fresh = DeviceArray.from_numpy(np.zeros(1000, np.uint8)), DeviceArray.from_numpy(pattern(1000))
    host = pinned_empty(1000)
    host.fill(0)
    for handle in (0, 1, 2):
        with context_of(0):
            emulated_gpu.hold(handle)
            check(driver.cuMemcpyDtoDAsync(source.ptr, fresh.ptr, 1000, handle))
            if form == "blocks":
                srcs, dsts = Blocks(source, np.arange(10) * 100), Blocks(host, np.arange(10) * 100)
            else:
                srcs, dsts = (addresses(base, np.arange(10), 100) for base in (source.ptr, host.ctypes.data))
            async with anyio.create_task_group() as group:
                group.start_soon(lambda h=handle, s=srcs, d=dsts: copy_batch(h, s, d, sizes=100))
                await anyio.lowlevel.checkpoint()
                with stream_of(0) as free:
                    await copy_batch(free, [fresh] * 2, [np.empty(1000, np.uint8) for _ in range(2)])
                assert not host.any()
                emulated_gpu.release(handle)
            assert np.array_equal(host, pattern(1000))
            host.fill(0)
            check(driver.cuMemsetD8(source.ptr, 0, 1000))


async def test_the_stream_that_a_base_names(emulated_gpu: Any) -> None:
    with stream_of(0) as stream, stream_of(0) as named:
        source, fresh = DeviceArray(100, stream=named), DeviceArray.from_numpy(pattern(100))
        host = np.zeros(100, np.uint8)
        emulated_gpu.hold(named)
        with context_of(0):
            check(driver.cuMemcpyDtoDAsync(source.ptr, fresh.ptr, 100, named))
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: copy_batch(stream, Blocks(source, np.arange(2) * 50), Blocks(host, np.arange(2) * 50), sizes=50)
            )
            await anyio.lowlevel.checkpoint()
            await copy_batch(2, [fresh] * 2, [np.empty(100, np.uint8) for _ in range(2)])
            assert not host.any()
            emulated_gpu.release(named)
        assert np.array_equal(host, pattern(100))


class DLPack:
    """Tells which stream it was asked to make wait."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        raise BufferError(f"asked for stream {stream}")


async def test_dlpack_bases_are_told_the_stream() -> None:
    for handle, told in ((None, 1), (0, 1), (2, 2)):
        with pytest.raises(ValueError, match=f"asked for stream {told}"):
            await copy_batch(handle, Blocks(DLPack(), np.arange(2)), Blocks(bytearray(8), np.arange(2)), sizes=1)


async def test_many_allocations_in_turns() -> None:
    # More than the lookups remember.
    sources = [DeviceArray.from_numpy(pattern(NBYTES, k)) for k in range(50)]
    targets = [(pinned_empty if k % 3 else np.zeros)(NBYTES, np.uint8) for k in range(50)]
    order = shuffled(100) % 50
    srcs = np.array([sources[k].ptr + 10 for k in order], np.uint64)
    dsts = np.array([targets[k].ctypes.data + 10 for k in order], np.uint64)
    await copy_batch(0, srcs, dsts, sizes=NBYTES - 10)
    for k, target in enumerate(targets):
        assert np.array_equal(target[10:], pattern(NBYTES, k)[10:])


@pytest.fixture
def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the first few thousand numbers are left to a thread, and so is what has to be sorted."""
    monkeypatch.setattr(_copy_batch, "_MOST_AT_ONCE", -1)
    monkeypatch.setattr(_copy_batch, "_HOLD_SECONDS", 0.0)
    monkeypatch.setattr(_copy_batch, "_MOST_SORTED_ON_LOOP", 0)


@one_loop
@pytest.mark.usefixtures("in_a_thread")
async def test_what_takes_long_is_done_in_a_thread(emulated_gpu: Any) -> None:
    n, nbytes = 20_000, 8
    order = shuffled(n)
    source, fresh = DeviceArray(n * nbytes), DeviceArray.from_numpy(pattern(n * nbytes))
    host = np.zeros(n * nbytes, np.uint8)
    offsets = shuffled(n, 4) * nbytes
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        with context_of(0):
            check(driver.cuMemcpyDtoDAsync(source.ptr, fresh.ptr, n * nbytes, stream))
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: copy_batch(stream, Blocks(source, order * nbytes), Blocks(host, offsets), sizes=nbytes)
            )
            await anyio.lowlevel.checkpoint()
            # The order is that of the call, however long the checks take: what comes later is not waited for.
            emulated_gpu.kernel(stream)
            later = emulated_gpu.pending(stream)
            assert len(later) == 3
            emulated_gpu.step(stream, 2)
        assert emulated_gpu.pending(stream) == later[2:]
        emulated_gpu.release(stream)
    expected = np.empty((n, nbytes), np.uint8)
    expected[offsets // nbytes] = pattern(n * nbytes).reshape(n, nbytes)[order]
    assert np.array_equal(host, expected.ravel())


@one_loop
@pytest.mark.usefixtures("in_a_thread")
async def test_errors_that_a_thread_finds(emulated_gpu: Any) -> None:
    n = 20_000
    device, host = DeviceArray(n), np.zeros(n, np.uint8)
    offsets = np.arange(n)
    beyond, twice = offsets.copy(), offsets.copy()
    beyond[15_000] = n
    twice[15_000] = 3
    async with Copier() as copier:
        with pytest.raises(ValueError, match="entry 15000 of the batch, 1 bytes at offset 20000"):
            await copier.copy_batch(0, Blocks(device, beyond), Blocks(host, offsets), sizes=1)
        with pytest.raises(ValueError, match="entries 3 and 15000 of the batch overlap"):
            await copier.copy_batch(0, Blocks(device, offsets), Blocks(host, twice), sizes=1)
        raw = addresses(device.ptr, beyond, 1)
        raw[15_000] = 0
        with pytest.raises(ValueError, match="entry 15000 of the batch has a null address"):
            await copier.copy_batch(0, raw, addresses(host.ctypes.data, offsets, 1), sizes=1)
        assert copier.stats().submitted == 0


@one_loop
@pytest.mark.usefixtures("in_a_thread")
async def test_a_cancelled_batch_waits_for_its_thread(emulated_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n, began, go_on = 20_000, threading.Event(), threading.Event()
    device, host = DeviceArray(n), bytearray(n)
    add_to = _copy_batch.add_to

    def wait_and_add(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            assert go_on.wait(20)
        return add_to(*args, **options)

    monkeypatch.setattr(_copy_batch, "add_to", wait_and_add)
    offsets = np.arange(n)
    task = asyncio.ensure_future(copy_batch(0, Blocks(device, offsets), Blocks(host, offsets), sizes=1))
    await until(began.is_set)
    task.cancel()  # asyncio's own, which does not wait for threads
    await turns(50)
    assert not task.done()
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    gc.collect()  # the frames of the traceback
    host.append(0)  # which is refused as long as somebody holds the memory
    assert _copies._default_copier().stats().in_flight == 0


blocks = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=30)


@given(entries=blocks, grid=st.sampled_from([0, 1, 3, 8]), may_take_long=st.booleans())
def test_overlaps_are_found(entries: list[tuple[int, int]], grid: int, may_take_long: bool) -> None:
    """With a grid all entries are of one size and lie on multiples of it."""
    _driver.ensure()
    if grid:
        entries = [(place * grid, grid) for place, _ in entries]
    covered = np.zeros(1000, np.int64)
    for offset, nbytes in entries:
        covered[offset : offset + nbytes] += 1
    operation = _native.Operation(_native.Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False))
    if entries:
        device, host = _ends()
        offsets, sizes = np.array(entries, np.uint64).T.copy()
        one = np.zeros(1, np.uint32)
        bounds = (host.ctypes.data, 1000), (device.ptr, 1000)
        assert operation.add_addresses(offsets, offsets, sizes[:1] if grid else sizes, one, *bounds)[0] == 0
        assert operation.nbytes == sizes.sum()
    found = operation.overlaps(may_take_long=may_take_long)
    assert found == bool((covered > 1).any()) or (found is None and not may_take_long)


@functools.cache
def _ends() -> tuple[DeviceArray, np.ndarray]:
    return DeviceArray(1000), pinned_empty(1000)


# Errors.


async def refused(emulator: Any, error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    check_overlap = kwargs.pop("check_overlap", False)
    with stream_of(0) as stream:
        emulator.hold(stream)
        async with Copier(check_overlap=check_overlap) as copier:
            for in_stream in (False, True):
                with pytest.raises(error, match=message):
                    await copier.copy_batch(stream, *args, in_stream=in_stream, **kwargs)
            assert copier.stats().submitted == 0
        assert emulator.pending(stream) == []


async def test_entries_outside_their_base(emulated_gpu: Any) -> None:
    device, host = DeviceArray(1000), np.zeros(1000, np.uint8)
    within = np.array([0, 100, 200])
    for bad in (901, 1000, 1001, 2**62):
        offsets = np.array([0, 100, bad])
        message = rf"entry 2 of the batch, 100 bytes at offset {bad}, is not within its base of 1000"
        await refused(emulated_gpu, ValueError, message, Blocks(device, offsets), Blocks(host, within), sizes=100)
        await refused(emulated_gpu, ValueError, message, Blocks(host, offsets), Blocks(device, within), sizes=100)
    huge = np.array([0, 2**64 - 50, 100], np.uint64)
    await refused(emulated_gpu, ValueError, "entry 1", Blocks(device, huge), Blocks(host, within), sizes=100)
    negative = np.array([0, 100, -1])
    await refused(emulated_gpu, ValueError, "offset -1", Blocks(device, negative), Blocks(host, within), sizes=1)
    sizes = np.array([100, 901, 100])
    await refused(emulated_gpu, ValueError, "entry 1 of", Blocks(device, within), Blocks(host, within), sizes=sizes)
    most = np.array([100, 2**64 - 1, 100], np.uint64)
    await refused(emulated_gpu, ValueError, "entry 1 of", Blocks(device, within), Blocks(host, within), sizes=most)


async def test_null_addresses_are_named(emulated_gpu: Any) -> None:
    # rapidsai/rmm#2509
    device, host = DeviceArray(1000), pinned_empty(1000)
    good_src, good_dst = addresses(device.ptr, np.arange(3), 100), addresses(host.ctypes.data, np.arange(3), 100)
    null = good_src.copy()
    null[1] = 0
    await refused(emulated_gpu, ValueError, "entry 1 of the batch has a null address", null, good_dst, sizes=100)
    await refused(emulated_gpu, ValueError, "entry 1 of the batch has a null address", good_dst, null, sizes=100)


async def test_entries_that_cross_the_end_of_their_allocation(emulated_gpu: Any) -> None:
    device, host = DeviceArray(1000), pinned_empty(5000)
    srcs, dsts = addresses(device.ptr, np.array([0, 95]), 10), addresses(host.ctypes.data, np.arange(2), 100)
    await refused(emulated_gpu, ValueError, r"entry 1 .*crosses the end.*its source", srcs, dsts, sizes=100)
    await refused(emulated_gpu, ValueError, r"entry 1 .*crosses the end.*its destination", dsts, srcs, sizes=100)


async def test_host_to_host(emulated_gpu: Any) -> None:
    host = np.zeros(100, np.uint8)
    at = addresses(host.ctypes.data, np.arange(2), 50)
    await refused(emulated_gpu, ValueError, r"entry 0 .*host to host", at, at[::-1].copy(), sizes=50)
    await refused(emulated_gpu, ValueError, "host", Blocks(host, np.array([0, 50])), at, sizes=50)


async def test_two_devices(emulated_gpu: Any) -> None:
    need_two_devices()
    first, second, host = DeviceArray(100), DeviceArray(100, device=1), pinned_empty(200)
    srcs = np.array([first.ptr, second.ptr], np.uint64)
    dsts = addresses(host.ctypes.data, np.arange(2), 100)
    await refused(emulated_gpu, ValueError, r"entry 1 .*another device", srcs, dsts, sizes=100)
    await refused(emulated_gpu, ValueError, r"on device 1.*for device 0", srcs[1:], dsts[1:], sizes=100)


async def test_overlapping_destinations(emulated_gpu: Any) -> None:
    device, host = DeviceArray.from_numpy(pattern(1000)), np.zeros(1000, np.uint8)
    srcs, over = np.arange(3) * 100, np.array([500, 0, 550])
    message = "entries 0 and 2 of the batch overlap"
    await refused(emulated_gpu, ValueError, message, Blocks(device, srcs), Blocks(host, over), sizes=100)
    raw_srcs, raw_over = addresses(device.ptr, srcs, 1), addresses(host.ctypes.data, over, 1)
    await refused(emulated_gpu, ValueError, message, raw_srcs, raw_over, sizes=100, check_overlap=True)
    # Whose bounds are known, are looked at; who asks for raw destinations, is not kept from them.
    await refused(emulated_gpu, ValueError, message, raw_srcs, Blocks(host, over), sizes=100)
    await copy_batch(0, raw_srcs, raw_over, sizes=100)
    await copy_batch(0, Blocks(device, srcs), raw_over, sizes=100)
    adjacent = np.array([500, 0, 600])
    await copy_batch(0, Blocks(device, srcs), Blocks(host, adjacent), sizes=100)
    # An empty entry is nowhere.
    await copy_batch(0, Blocks(device, srcs), Blocks(host, over), sizes=np.array([100, 100, 0]))


async def test_lengths_and_sizes(emulated_gpu: Any) -> None:
    device, host = DeviceArray(1000), np.zeros(1000, np.uint8)
    two, three = np.array([0, 100]), np.array([0, 100, 200])
    for srcs, dsts in ((two, three), (three, two)):
        await refused(emulated_gpu, ValueError, "entry 2", Blocks(device, srcs), Blocks(host, dsts), sizes=10)
    args = Blocks(device, three), Blocks(host, three)
    await refused(emulated_gpu, ValueError, "2 sizes for 3", *args, sizes=two)
    await refused(emulated_gpu, ValueError, r"entry 1 .*negative", *args, sizes=np.array([1, -5, 1]))
    for sizes in (-1, 2**64, 2**70):
        await refused(emulated_gpu, ValueError, "sizes must be", *args, sizes=sizes)
    await refused(emulated_gpu, TypeError, "need sizes=", *args)
    for sizes in ("10", 1.0, True, [10, 10, 10], np.array([10.0] * 3), np.array([10] * 3, np.int32)):
        await refused(emulated_gpu, TypeError, "sizes", *args, sizes=sizes)


async def test_the_other_side_must_be_numbers_too(emulated_gpu: Any) -> None:
    blocks = Blocks(DeviceArray(1000), np.array([0]))
    await refused(emulated_gpu, TypeError, "dsts must be Blocks or", blocks, [np.zeros(10, np.uint8)], sizes=10)
    await refused(emulated_gpu, TypeError, "srcs must be Blocks or", [DeviceArray(10)], blocks, sizes=10)
    await refused(
        emulated_gpu, ValueError, "C-contiguous", Blocks(DeviceArray((10, 10))[:, ::2], np.array([0])), blocks, sizes=1
    )
    await refused(emulated_gpu, ValueError, "read-only", blocks, Blocks(bytes(100), np.array([0])), sizes=1)


@pytest.mark.parametrize(
    "offsets", [3, [0, 1], np.zeros(2), np.zeros((2, 2), np.int64), np.zeros(2, ">i8"), b"12345678"]
)
def test_offsets_that_are_none(offsets: Any) -> None:
    with pytest.raises(TypeError, match="offsets must be"):
        Blocks(bytearray(100), offsets)
