"""Batches whose host side lies in one row: the kernel fills or empties bundles on the device, and one copy takes each
over the link."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest
from calls import forget_the_kernel, use_device
from cuda.bindings import driver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiocuda_copy import Blocks, Copier, CudaError, _native, copy_batch, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator

Bytes = NDArray[np.uint8]
KIB = 1024
TO_HOST, TO_DEVICE = "to host", "to device"
both_ways = pytest.mark.parametrize("way", [TO_HOST, TO_DEVICE])
COPY_OF = {TO_HOST: "cuMemcpyDtoHAsync", TO_DEVICE: "cuMemcpyHtoDAsync"}


def pinned(nbytes: int) -> Bytes:
    array: Bytes = pinned_empty(nbytes, np.uint8)
    array[:] = 0
    return array


def launches() -> int:
    return _native.engine_scatter(0)[1]


class Row:
    """Entries that lie side by side on the host, in one row, and scattered on the device."""

    def __init__(self, way: str, sizes: list[int], *, host: Callable[[int], Bytes] = pinned, seed: int = 0) -> None:
        chance = np.random.default_rng(seed)
        self.way, self.sizes = way, np.array(sizes, np.uint64)
        self.ends = np.cumsum(self.sizes).astype(np.int64)
        self.begins = self.ends - self.sizes.astype(np.int64)
        # On the device each has room for some more, so that none is beside its neighbour.
        step = max(sizes) + 64
        self.places = chance.permutation(len(sizes)) * step + chance.integers(0, 48, len(sizes))
        self.content = chance.integers(0, 256, len(sizes) * step, np.uint8)
        self.host = host(int(self.ends[-1]))
        if way == TO_HOST:
            self.device = DeviceArray.from_numpy(self.content)
        else:
            self.host[:] = self.content[: len(self.host)]
            self.device = DeviceArray.from_numpy(np.zeros(len(sizes) * step, np.uint8))

    async def copy(self, copier: Any = None) -> None:
        on_device, on_host = Blocks(self.device, self.places), Blocks(self.host, self.begins)
        sides = (on_device, on_host) if self.way == TO_HOST else (on_host, on_device)
        one = len(set(self.sizes.tolist())) == 1
        batch = copy_batch if copier is None else copier.copy_batch
        await batch(0, *sides, sizes=int(self.sizes[0]) if one else self.sizes)

    def check(self) -> None:
        found = self.device.to_numpy() if self.way == TO_DEVICE else self.content
        expected = np.zeros_like(found)
        for begin, end, place in zip(self.begins, self.ends, self.places, strict=True):
            here, there = slice(begin, end), slice(place, place + end - begin)
            assert np.array_equal(self.host[here], found[there])
            expected[there] = found[there]
        # Nothing beside the entries has been written.
        if self.way == TO_DEVICE:
            assert np.array_equal(found, expected)


MIB_OF_4_KIB = [4 * KIB] * 256


async def ready() -> None:
    """Copies until bundles are there, for which the first batch that is for them asks."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        row = Row(TO_HOST, MIB_OF_4_KIB * 2)
        before = launches()
        await row.copy()
        row.check()
        # The first bundle is of 1 MiB; without bundles there is one piece.
        if launches() == before + 2:
            return
        await anyio.sleep(0.002)  # they are made on a thread, of which nothing tells
    raise AssertionError("there are no bundles")


async def counted(gpu: Emulator | None, row: Row) -> tuple[int, int | None]:
    """Copies and compares; how often the kernel was launched, and how many copies crossed the link."""
    kernels, copies = launches(), gpu.calls(COPY_OF[row.way]) if gpu else None
    await row.copy()
    found = launches() - kernels, None if gpu is None or copies is None else gpu.calls(COPY_OF[row.way]) - copies
    row.check()
    return found


@both_ways
@pytest.mark.parametrize(
    ("sizes", "bundles"),
    [
        pytest.param(MIB_OF_4_KIB, 1, id="one"),
        pytest.param(MIB_OF_4_KIB * 5, 2, id="1 MiB and 4"),
        pytest.param(MIB_OF_4_KIB * 9 + [4 * KIB] * 16, 4, id="a short one last"),
        pytest.param([16 * KIB] * 700, 4, id="16 KiB"),
        pytest.param([60_000] * 100, 3, id="unaligned"),
        pytest.param([4 * KIB, 5000, 1, 333, 40_000] * 100, 2, id="of any size"),
    ],
)
async def test_each_bundle_crosses_the_link_in_one_copy(
    way: str, sizes: list[int], bundles: int, gpu: Emulator | None
) -> None:
    await ready()
    kernels, copies = await counted(gpu, Row(way, sizes))
    assert kernels == bundles
    assert copies in (bundles, None)


@both_ways
async def test_less_than_a_bundle_is_the_kernels_alone(way: str, gpu: Emulator | None) -> None:
    await ready()
    kernels, copies = await counted(gpu, Row(way, MIB_OF_4_KIB[1:]))
    assert kernels == 1
    assert copies in (0, None)


@both_ways
async def test_what_does_not_lie_in_one_row_is_the_kernels_alone(way: str, gpu: Emulator | None) -> None:
    await ready()
    row = Row(way, MIB_OF_4_KIB * 3)
    row.begins[5], row.begins[6] = row.begins[6], row.begins[5]
    row.ends[5], row.ends[6] = row.ends[6], row.ends[5]
    kernels, copies = await counted(gpu, row)
    assert kernels == 1
    assert copies in (0, None)


@both_ways
async def test_a_row_that_breaks_off_and_goes_on(way: str, gpu: Emulator | None) -> None:
    """Each bundle ends where the row does."""
    await ready()
    row, gap = Row(way, MIB_OF_4_KIB * 8), 4 * KIB
    wider = pinned(len(row.host) + gap)
    wider[:-gap] = row.host
    row.host = wider
    row.begins[1000:] += gap
    row.ends[1000:] += gap
    kernels, copies = await counted(gpu, row)
    # 1 MiB, what is left before the gap, and up to 4 MiB at a time behind it.
    assert kernels == 4
    assert copies in (4, None)


@both_ways
async def test_short_rows_are_the_kernels_alone(way: str, gpu: Emulator | None) -> None:
    """A bundle for each would take longer; the first one is as long as a bundle."""
    await ready()
    row, gap = Row(way, [16 * KIB] * 1600), 16 * KIB
    breaks = np.arange(1600) // 64
    breaks[:128] = 0
    wider = pinned(len(row.host) + gap * (int(breaks[-1]) + 1))
    begins = row.begins + gap * breaks
    for old, new in zip(row.begins, begins, strict=True):
        wider[new : new + 16 * KIB] = row.host[old : old + 16 * KIB]
    row.host, row.begins, row.ends = wider, begins, begins + 16 * KIB
    kernels, copies = await counted(gpu, row)
    # 1 MiB of 2, and the others in pieces of up to 24 MiB.
    assert kernels == 3
    assert copies in (1, None)


rows = st.lists(st.integers(1, 90_000), min_size=30, max_size=120)


@given(way=st.sampled_from([TO_HOST, TO_DEVICE]), sizes=rows, alike=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_row(way: str, sizes: list[int], alike: bool, seed: int, gpu: Emulator | None) -> None:
    row = Row(way, [sizes[0]] * len(sizes) if alike else sizes, seed=seed)
    await row.copy()
    row.check()


@both_ways
async def test_rectangles(way: str, gpu: Emulator | None) -> None:
    """Their rows lie side by side on the host."""
    await ready()
    chance = np.random.default_rng(1)
    places = [(f, y, x) for f in range(8) for y in range(0, 400, 80) for x in range(0, 840, 210)]
    frames = chance.integers(0, 256, (8, 400, 1001), np.uint8)
    device = DeviceArray.from_numpy(frames)
    host = pinned(len(places) * 80 * 210).reshape(-1, 80, 210)
    host[:] = chance.integers(0, 256, host.shape, np.uint8)
    cuts = [device[f, y : y + 80, x : x + 210] for f, y, x in places]
    kernels, copies = launches(), gpu.calls(COPY_OF[way]) if gpu else 0
    await copy_batch(0, *((cuts, list(host)) if way == TO_HOST else (list(host), cuts)))
    assert launches() == kernels + 2
    assert gpu is None or gpu.calls(COPY_OF[way]) == copies + 2
    if way == TO_DEVICE:
        for (f, y, x), one in zip(places, host, strict=True):
            frames[f, y : y + 80, x : x + 210] = one
        assert np.array_equal(device.to_numpy(), frames)
    else:
        assert all(
            np.array_equal(frames[f, y : y + 80, x : x + 210], one) for (f, y, x), one in zip(places, host, strict=True)
        )


@both_ways
async def test_a_row_over_two_registrations(way: str, gpu: Emulator | None) -> None:
    """The driver refuses one copy over both of them."""
    await ready()
    row = Row(way, MIB_OF_4_KIB * 2)
    half = len(row.host) // 2
    memory = np.zeros(len(row.host) + 4096, np.uint8)
    begin = -memory.ctypes.data % 4096
    mapped = memory[begin : begin + len(row.host)]
    mapped[:] = row.host
    halves = (mapped.ctypes.data, mapped.ctypes.data + half)
    use_device()
    for half_at in halves:
        assert driver.cuMemHostRegister(half_at, half, 1)[0] == 0
    try:
        row.host = mapped
        on_device = np.uint64(row.device.ptr) + row.places.astype(np.uint64)
        on_host = np.uint64(mapped.ctypes.data) + row.begins.astype(np.uint64)
        await copy_batch(0, *((on_device, on_host) if way == TO_HOST else (on_host, on_device)), sizes=4 * KIB)
        row.check()
    finally:
        for half_at in halves:
            driver.cuMemHostUnregister(half_at)


@both_ways
@pytest.mark.parametrize("bundled", [True, False])
async def test_blocks_of_the_kernel(way: str, bundled: bool, gpu: Emulator | None) -> None:
    """Few by default, and as many as a copier says."""
    await ready()
    row = Row(way, [16 * KIB] * 832)
    if not bundled:
        row.begins, row.ends = row.begins[::-1].copy(), row.ends[::-1].copy()
    for blocks in (None, 48, 1):
        async with Copier(kernel_blocks=blocks) as copier:
            await row.copy(copier)
            row.check()
        fewest = 16 if bundled else 4 if way == TO_HOST else 12
        assert _native.engine_scatter(0)[2] == (fewest if blocks is None else min(blocks, 32 if bundled else 48))


async def test_all_blocks_inside_a_device(gpu: Emulator | None) -> None:
    await ready()
    src, dst = (DeviceArray.from_numpy(np.full(4096 * 64, k, np.uint8)) for k in (1, 2))
    at = np.arange(4096) * 64
    async with Copier(kernel_blocks=2) as copier:
        await copier.copy_batch(0, Blocks(src, at), Blocks(dst, at), sizes=64)
    assert np.all(dst.to_numpy() == 1)
    assert _native.engine_scatter(0)[2] > 2


async def test_both_ways_at_once(gpu: Emulator | None) -> None:
    await ready()
    some = [Row(way, MIB_OF_4_KIB * 12, seed=k) for k, way in enumerate([TO_HOST, TO_DEVICE] * 3)]
    async with anyio.create_task_group() as group:
        for row in some:
            group.start_soon(row.copy)
    for row in some:
        row.check()


@pytest.mark.emulated_only
@both_ways
@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_refused_launch_falls_back(way: str, nth: int, emulated_gpu: Emulator) -> None:
    await forget_the_kernel(emulated_gpu)
    await ready()
    emulated_gpu.fail_call("cuLaunchKernel", nth=nth, code=701)
    row = Row(way, MIB_OF_4_KIB * 12)
    await row.copy()
    row.check()
    assert _native.engine_scatter(0)[0] == "absent"
    await forget_the_kernel(emulated_gpu)  # which was given up


@pytest.mark.emulated_only
@both_ways
@pytest.mark.parametrize("nth", [1, 2])
async def test_a_refused_copy_fails_the_batch(way: str, nth: int, emulated_gpu: Emulator) -> None:
    await ready()
    row = Row(way, MIB_OF_4_KIB * 12)
    emulated_gpu.fail_call(COPY_OF[way], nth=nth, code=1)
    async with Copier() as copier:
        with pytest.raises(CudaError) as caught:
            await row.copy(copier)
        assert (caught.value.code, copier.stats().in_flight) == (1, 0)
        await row.copy(copier)
    row.check()


WITHOUT_MEMORY = """
import asyncio, time
import numpy as np
from aiocuda_copy import Blocks, _native, copy_batch, pinned_empty
from aiocuda_copy.testing import DeviceArray, use_emulated_driver

gpu, n = use_emulated_driver(), 1024
content = np.random.default_rng(1).integers(0, 256, n * 4096, np.uint8)
device, host = DeviceArray.from_numpy(content), pinned_empty(n * 4096)
order = np.random.default_rng(2).permutation(n)
gpu.fail_call("cuMemAllocAsync")

async def main():
    more, end = 5, time.monotonic() + 20
    while more:
        host[:] = 0
        await copy_batch(0, Blocks(device, order * 4096), Blocks(host, np.arange(n) * 4096), sizes=4096)
        assert np.array_equal(host.reshape(n, 4096), content.reshape(n, 4096)[order])
        assert time.monotonic() < end
        # Since the memory has been refused.
        more -= gpu.calls("cuMemAllocAsync") > 0
        await asyncio.sleep(0.02)  # a thread of its own asks for it, and would ask again meanwhile
    assert gpu.calls("cuMemAllocAsync") == 1
    assert gpu.calls("cuMemcpyDtoHAsync") == 0
    assert _native.engine_scatter(0)[0] == "ready"

asyncio.run(main())
"""


@pytest.mark.emulated_only
def test_without_device_memory_for_bundles() -> None:
    """In a process of its own: bundles are for good."""
    subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], check=True, timeout=60)


@pytest.mark.emulated_only
@both_ways
async def test_after_a_fault_there_are_bundles_again(way: str, emulated_gpu: Emulator) -> None:
    await ready()
    row = Row(way, MIB_OF_4_KIB * 12)
    emulated_gpu.fail_operation("kernel", nth=2)
    with pytest.raises(CudaError) as caught:
        await row.copy()
    assert caught.value.sticky
    emulated_gpu.reset()
    allocations = emulated_gpu.calls("cuMemAllocAsync")
    await ready()
    # That of a pool outlives its context.
    assert emulated_gpu.calls("cuMemAllocAsync") == allocations


@pytest.mark.emulated_only
async def test_columns_are_page_locked_once(emulated_gpu: Emulator) -> None:
    """Batches find the memory that those before them have used."""
    await forget_the_kernel(emulated_gpu)
    await ready()
    row = Row(TO_HOST, MIB_OF_4_KIB * 4)
    row.begins, row.ends = row.begins[::-1], row.ends[::-1]
    # Tables are made, too, until there are enough to use them in rotation.
    for _ in range(20):
        await row.copy()
    registrations = emulated_gpu.calls("cuMemHostRegister")
    for _ in range(20):
        await row.copy()
    row.check()
    assert emulated_gpu.calls("cuMemHostRegister") == registrations
