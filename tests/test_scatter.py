"""Batches of small copies, which a kernel moves; on the emulated driver its host twin does."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import forget_the_kernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiocuda_copy import Blocks, CudaError, _driver, _native, copy_batch, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator

NATIVE = Path(__file__).parent.parent / "_native"
ROUTES = ("to_host_direct", "to_host_staged", "to_device_direct", "to_device_staged", "device_to_device")
KIB = 1024

Bytes = NDArray[np.uint8]


def test_the_ptx_belongs_to_the_source() -> None:
    """Otherwise: ``make ptx``."""
    ptx = (NATIVE / "scatter.ptx").read_text()
    assert re.search(r"^// sha256 (\w+)$", ptx, re.MULTILINE)
    assert f"// sha256 {hashlib.sha256((NATIVE / 'scatter.cu').read_bytes()).hexdigest()}\n" in ptx
    assert re.search(r"^\.target sm_75$", ptx, re.MULTILINE)
    assert "/home" not in ptx
    assert "/tmp" not in ptx


# It is a program of its own, whose fibers a preloaded sanitizer does not know.
@pytest.mark.no_sanitizer
def test_the_kernel_lane_by_lane(tmp_path: Path) -> None:
    """The kernel's own source, run on the processor: every access is aligned, within its row, and made once."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    program = tmp_path / "lanes"
    source = Path(__file__).parent / "kernel" / "lanes.cpp"
    subprocess.run([compiler, "-std=c++17", "-O1", "-Wno-unknown-pragmas", source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"\d{4} rows\n", done.stdout)


def pageable(n: int) -> Bytes:
    return np.zeros(n, np.uint8)


def pinned(n: int) -> Bytes:
    array: Bytes = pinned_empty(n, np.uint8)
    return array


class Ends:
    """The two sides of a batch on one route, and the content of each as NumPy sees it."""

    def __init__(self, route: str, nbytes: int) -> None:
        chance = np.random.default_rng(nbytes)
        self.content = chance.integers(0, 256, nbytes, np.uint8)
        host = pinned if route.endswith("direct") else pageable
        # Made where needed only: giving device memory back waits for kernels.
        self.src: Any
        self.dst: Any
        if route.startswith("to_device"):
            self.src = host(nbytes)
            self.src[:] = self.content
        else:
            self.src = DeviceArray.from_numpy(self.content)
        if route.startswith("to_host"):
            self.dst = host(nbytes)
            self.dst[:] = 0
        else:
            self.dst = DeviceArray.from_numpy(np.zeros(nbytes, np.uint8))

    def result(self) -> Bytes:
        return self.dst if isinstance(self.dst, np.ndarray) else self.dst.to_numpy()


def expected(content: Bytes, src: Any, dst: Any, sizes: Any) -> Bytes:
    out = np.zeros_like(content)
    for s, d, n in zip(src, dst, sizes, strict=True):
        out[d : d + n] = content[s : s + n]
    return out


def launches() -> int:
    return _native.engine_scatter(0)[1]


def wait_while(state: str) -> str:
    end = time.monotonic() + 10
    while _native.engine_scatter(0)[0] == state and time.monotonic() < end:
        time.sleep(0.001)
    return _native.engine_scatter(0)[0]


async def small_batch(n: int = 64, nbytes: int = 4096, route: str = "to_host_direct") -> Ends:
    ends = Ends(route, n * nbytes)
    offsets = np.arange(n, dtype=np.int64) * nbytes
    order = np.random.default_rng(n).permutation(offsets)
    await copy_batch(0, Blocks(ends.src, order), Blocks(ends.dst, offsets), sizes=nbytes)
    assert np.array_equal(ends.result(), expected(ends.content, order, offsets, [nbytes] * n))
    return ends


async def loaded() -> None:
    """Copies until the kernel is there, which it is soon after the first batch that is for it."""
    await small_batch()
    assert wait_while("loading") == "ready"


@pytest.mark.parametrize("route", ROUTES)
async def test_sizes_and_alignments(route: str, gpu: Emulator | None) -> None:
    """All pairs of alignments modulo 16, and sizes about every edge of the kernel's ways."""
    await loaded()
    before = launches()
    sizes, srcs, dsts = [], [], []
    at = 0
    for i, nbytes in enumerate([*range(1, 100), 127, 128, 129, 255, 500, 1000, 8191, 8192, 8193, 16385, 40_000] * 3):
        sizes.append(nbytes)
        srcs.append(at + i % 16)
        dsts.append(at + (i // 16 + i * 7) % 16)
        at += (nbytes + 16 + 63) // 64 * 64
    ends = Ends(route, at + 64)
    await copy_batch(
        0,
        Blocks(ends.src, np.array(srcs, np.int64)),
        Blocks(ends.dst, np.array(dsts, np.int64)),
        sizes=np.array(sizes, np.uint64),
    )
    assert np.array_equal(ends.result(), expected(ends.content, srcs, dsts, sizes))
    assert launches() > before


entries = st.lists(
    st.tuples(st.integers(1, 300 * KIB), st.integers(0, 127), st.integers(0, 127)), min_size=1, max_size=40
)


@given(route=st.sampled_from(ROUTES), entries=entries, seed=st.integers(0, 99))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_any_batch(route: str, entries: list[tuple[int, int, int]], seed: int, gpu: Emulator | None) -> None:
    sizes = [nbytes for nbytes, _, _ in entries]
    starts = np.concatenate([[0], np.cumsum([nbytes + 128 for nbytes in sizes])])
    srcs = [int(start) + skew for start, (_, skew, _) in zip(starts, entries, strict=False)]
    dsts = [int(start) + skew for start, (_, _, skew) in zip(starts, entries, strict=False)]
    order = np.random.default_rng(seed).permutation(len(sizes))
    ends = Ends(route, int(starts[-1]))
    await copy_batch(
        0,
        Blocks(ends.src, np.array(srcs, np.int64)[order]),
        Blocks(ends.dst, np.array(dsts, np.int64)[order]),
        sizes=np.array(sizes, np.uint64)[order],
    )
    assert np.array_equal(ends.result(), expected(ends.content, srcs, dsts, sizes))


@given(
    route=st.sampled_from(ROUTES),
    nbytes=st.integers(1, 40 * KIB),
    skews=st.lists(st.tuples(st.integers(0, 127), st.integers(0, 127)), min_size=2, max_size=200),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
async def test_any_batch_of_one_size(
    route: str, nbytes: int, skews: list[tuple[int, int]], gpu: Emulator | None
) -> None:
    """Which the kernel itself cuts into rows."""
    await loaded()
    before = launches()
    n, each = len(skews), nbytes + 128
    srcs = [k * each + skew for k, (skew, _) in enumerate(skews)]
    dsts = [k * each + skew for k, (_, skew) in enumerate(skews)]
    ends = Ends(route, n * each)
    await copy_batch(0, Blocks(ends.src, np.array(srcs)), Blocks(ends.dst, np.array(dsts)), sizes=nbytes)
    assert np.array_equal(ends.result(), expected(ends.content, srcs, dsts, [nbytes] * n))
    assert launches() > before


@pytest.mark.parametrize("route", ["to_host_direct", "to_host_staged", "to_device_direct", "device_to_device"])
@pytest.mark.parametrize("width", [3, 63, 64, 672])
async def test_rectangles(route: str, width: int, gpu: Emulator | None) -> None:
    """Their rows are rows of the table, where they are not too short, and where no slot lies between."""
    await loaded()
    before = launches()
    shape = (3, 40, 1000)
    ends = Ends(route, 3 * 40 * 1000)
    reshape = (lambda a: a.reshape(shape)) if isinstance(ends.src, np.ndarray) else _frames
    src, content = reshape(ends.src), ends.content.reshape(shape)
    places = [(k % 3, k % 7, 5 * k) for k in range(30)]
    srcs = [src[f, y : y + 30, x : x + width] for f, y, x in places] + [src[:, 3:30, 7 : 7 + width]]
    crops = [content[f, y : y + 30, x : x + width] for f, y, x in places] + [content[:, 3:30, 7 : 7 + width]]
    if route == "device_to_device" or route.startswith("to_device"):
        dsts: list[Any] = [DeviceArray(crop.shape) for crop in crops]
    else:
        dsts = [(pinned if "direct" in route else pageable)(crop.size).reshape(crop.shape) for crop in crops]
    await copy_batch(0, srcs, dsts)
    for dst, crop in zip(dsts, crops, strict=True):
        assert np.array_equal(dst if isinstance(dst, np.ndarray) else dst.to_numpy(), crop)
    assert (launches() > before) == (width >= 64 and not route.endswith("staged"))


async def crops(n: int, height: int, width: int) -> None:
    """Copies rectangles of one shape out of frames, and compares them."""
    content = np.random.default_rng(n).integers(0, 256, (8, 64, 1000), np.uint8)
    frames, host = DeviceArray.from_numpy(content), pinned(n * height * width).reshape(n, height, width)
    host[:] = 0
    places = [(k % 8, k % (64 - height), (7 * k) % (1000 - width)) for k in range(n)]
    await copy_batch(0, [frames[f, y : y + height, x : x + width] for f, y, x in places], list(host))
    expected = [content[f, y : y + height, x : x + width] for f, y, x in places]
    assert all(np.array_equal(*pair) for pair in zip(host, expected, strict=True))


async def test_rectangles_of_one_shape_are_entries_of_the_table(gpu: Emulator | None) -> None:
    """As rows they would need two tables."""
    await loaded()
    before = launches()
    await crops(520, 30, 64)
    assert launches() == before + 1


def _frames(array: DeviceArray) -> DeviceArray:
    return array._view(array._geometry.reshape(3, 40, 1000))


@pytest.mark.parametrize("route", ROUTES)
async def test_two_hundred_thousand_tiny_entries(route: str, gpu: Emulator | None) -> None:
    await loaded()
    before = launches()
    n, nbytes = 200_000, 12
    ends = Ends(route, n * nbytes)
    offsets = np.arange(n, dtype=np.int64) * nbytes
    order = np.random.default_rng(0).permutation(n)
    await copy_batch(0, Blocks(ends.src, offsets[order]), Blocks(ends.dst, offsets), sizes=nbytes)
    assert np.array_equal(ends.result().reshape(n, nbytes), ends.content.reshape(n, nbytes)[order])
    # More than one table full, and far fewer than batches of the copy engine.
    assert 2 <= launches() - before <= 100


async def test_sequences_of_arrays(gpu: Emulator | None) -> None:
    """Each has an allocation of its own."""
    await loaded()
    before = launches()
    arrays = [np.random.default_rng(i).integers(0, 256, 1 + 1000 * i, np.uint8) for i in range(30)]
    devices = [DeviceArray.from_numpy(array) for array in arrays]
    copies = [DeviceArray(array.shape, np.uint8) for array in arrays]
    hosts = [(pageable if i % 2 else pinned)(len(array)) for i, array in enumerate(arrays)]
    await copy_batch(0, devices, copies)
    await copy_batch(0, copies, hosts)
    assert all(np.array_equal(array, host) for array, host in zip(arrays, hosts, strict=True))
    assert launches() > before


@pytest.mark.parametrize(("n", "nbytes"), [(1, 65536), (8, 4 << 20)])
async def test_large_or_single_entries_are_the_copy_engines(n: int, nbytes: int, gpu: Emulator | None) -> None:
    await loaded()
    before = launches()
    for route in ROUTES:
        await small_batch(n, nbytes, route)
    assert launches() == before


@pytest.mark.parametrize("route", ROUTES)
async def test_over_the_link_entries_of_64_kib_are_the_copy_engines(route: str, gpu: Emulator | None) -> None:
    await loaded()
    before = launches()
    await small_batch(8, 64 * KIB, route)
    assert (launches() > before) is (route == "device_to_device")
    before = launches()
    await small_batch(8, 64 * KIB - 16, route)
    assert launches() > before


async def test_options_are_the_copy_engines(gpu: Emulator | None) -> None:
    from cuda.core.utils import CopyOptions

    await loaded()
    before = launches()
    src, dst = DeviceArray.from_numpy(np.arange(64, dtype=np.uint8)), pinned(64)
    halves = [src[:32], src[32:]], [dst[:32], dst[32:]]
    await copy_batch(0, *halves, options=CopyOptions(src_access_order="any"))
    assert launches() == before
    await copy_batch(0, *halves)
    assert launches() == before + 1
    assert np.array_equal(dst, np.arange(64))


@pytest.mark.emulated_only
@pytest.mark.parametrize("entry_point", ["cuModuleLoadData", "cuModuleGetFunction"])
@pytest.mark.parametrize("route", ROUTES)
async def test_without_the_module(entry_point: str, route: str, emulated_gpu: Emulator) -> None:
    await forget_the_kernel(emulated_gpu)
    emulated_gpu.fail_call(entry_point, code=222)
    await small_batch(route=route)
    assert wait_while("loading") == "absent"
    before = launches()
    await small_batch(route=route)
    assert emulated_gpu.calls(entry_point) == 1
    assert launches() == before


@pytest.mark.emulated_only
@pytest.mark.parametrize("route", ROUTES)
async def test_a_refused_launch_falls_back(route: str, emulated_gpu: Emulator) -> None:
    await forget_the_kernel(emulated_gpu)
    await loaded()
    # Pieces that need no slot are larger than this batch.
    nth = 2 if "staged" in route else 1
    before = emulated_gpu.calls("cuLaunchKernel")
    emulated_gpu.fail_call("cuLaunchKernel", nth=nth, code=701)
    await small_batch(3000, 4099, route)
    assert _native.engine_scatter(0)[0] == "absent"
    assert emulated_gpu.calls("cuLaunchKernel") == before + nth


@pytest.mark.emulated_only
async def test_rectangles_where_a_launch_is_refused(emulated_gpu: Emulator) -> None:
    await forget_the_kernel(emulated_gpu)
    await loaded()
    emulated_gpu.fail_call("cuLaunchKernel", code=701)
    await crops(20, 30, 100)
    assert _native.engine_scatter(0)[0] == "absent"


@pytest.mark.emulated_only
async def test_loading_waits_for_kernels_alone(emulated_gpu: Emulator) -> None:
    """Copies go on, by the batch call, while the module waits for a kernel that runs."""
    await forget_the_kernel(emulated_gpu)
    from cuda.bindings import driver

    driver.cuCtxPushCurrent(_native.primary_context(0)[1])
    _, stream = driver.cuStreamCreate(1)
    driver.cuCtxPopCurrent()
    emulated_gpu.kernel(stream, 300.0)
    before = launches()
    ends = await small_batch()  # freeing its memory would wait for the kernel
    assert _native.engine_scatter(0)[0] == "loading"
    assert launches() == before
    assert wait_while("loading") == "ready"
    waits = [wait.entry_point for wait in emulated_gpu.waits() if wait.reason == "running kernel"]
    assert waits == ["cuModuleLoadData"]
    driver.cuStreamDestroy(stream)
    del ends


@pytest.mark.emulated_only
async def test_a_fault_of_the_kernel(emulated_gpu: Emulator) -> None:
    await forget_the_kernel(emulated_gpu)
    await loaded()
    emulated_gpu.fail_operation("kernel")
    with pytest.raises(CudaError) as caught:
        await small_batch()
    assert caught.value.sticky
    emulated_gpu.reset()
    await loaded()
    await small_batch()


@pytest.mark.emulated_only
async def test_memory_that_the_kernel_cannot_reach(emulated_gpu: Emulator) -> None:
    """Freed since it was classified: the driver says so of a copy, and the context survives."""
    await loaded()
    source = DeviceArray.from_numpy(np.ones(8192, np.uint8))
    target = pinned(8192)
    addresses = np.array([source.ptr, source.ptr + 4096], np.uint64)
    targets = np.array([target.ctypes.data, target.ctypes.data + 4096], np.uint64)
    operation = _native.Operation(_native.Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False))
    sizes, attributes = np.array([4096], np.uint64), np.zeros(1, np.uint32)
    assert operation.add_addresses(targets, addresses, sizes, attributes, None, None)[0] == 0
    source.free()
    queue = _native.Queue()
    before = launches()
    operation.submit(0, queue, [])
    end = time.monotonic() + 10
    while not operation.finished and time.monotonic() < end:
        queue.drain(1)
    assert operation.state is _native.State.FAILED
    assert operation.code == 1
    assert launches() == before
    assert _driver.version() > 0
    await small_batch()
