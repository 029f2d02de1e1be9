"""copy_batch with sequences: what cuda.core.utils.copy_batch promises, and what it does not do yet."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from cuda.bindings import driver
from kinds import DEVICE_KINDS, HOST_KINDS, Managed, check, context_of, need_two_devices, one_loop, pattern, stream_of

from aiocuda_copy import Copier, CudaError, _driver, _native, copy_batch, copy_to_host, pinned_empty
from aiocuda_copy._batch import parse_options
from aiocuda_copy.testing import DeviceArray

utils = pytest.importorskip("cuda.core.utils")
if not hasattr(utils, "CopyOptions"):
    pytest.skip("this cuda.core has no CopyOptions", allow_module_level=True)
CopyOptions = utils.CopyOptions


# What reaches the driver.


class _Attributes(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int) for name in ("order", "src_type", "src_id", "dst_type", "dst_id")
    ] + [("flags", ctypes.c_uint)]  # fmt: skip


class Call(NamedTuple):
    """One cuMemcpyBatchAsync: its sizes, and the runs of attributes as (first entry, attributes)."""

    sizes: list[int]
    runs: list[tuple[int, tuple[int, ...]]]


_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t,
    ctypes.POINTER(_Attributes), ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.c_void_p,
)  # fmt: skip


@pytest.fixture
def batch_calls() -> Iterator[list[Call]]:
    """The driver's batch call, with a look at what passes through it."""
    _driver.ensure()
    if _driver.version() < 13000:
        pytest.skip("the driver has the earlier signature")
    address = int(check(driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 13000, 0)[:2]))
    original = _PROTOTYPE(address)
    calls: list[Call] = []

    @_PROTOTYPE
    def observe(dsts: Any, srcs: Any, sizes: Any, n: int, attributes: Any, firsts: Any, runs: int, stream: Any) -> int:
        of = [tuple(getattr(attributes[k], name) for name, _ in _Attributes._fields_) for k in range(runs)]
        calls.append(Call(sizes[:n], list(zip(firsts[:runs], of, strict=True))))
        return int(original(dsts, srcs, sizes, n, attributes, firsts, runs, stream))

    _native.bind("cuMemcpyBatchAsync_13000", ctypes.cast(observe, ctypes.c_void_p).value)
    try:
        yield calls
    finally:
        _native.bind("cuMemcpyBatchAsync_13000", address)


DEFAULT = (1, 0, 0, 0, 0, 0)
# Smaller ones without options are copied by a kernel.
LARGE = 600_000


def devices(n: int, nbytes: int = 1000) -> list[DeviceArray]:
    return [DeviceArray.from_numpy(pattern(nbytes, k)) for k in range(n)]


def pinned_arrays(n: int, nbytes: int = 1000) -> list[np.ndarray]:
    found = [pinned_empty(nbytes) for _ in range(n)]
    for array in found:
        array.fill(0)
    return found


# Data.


@pytest.mark.parametrize("handle", [None, 0, 1, 2])
async def test_special_streams(handle: int | None) -> None:
    # vllm-project/vllm#46379: the driver refuses batches on the legacy default stream.
    sources, hosts = devices(5), [np.zeros(1000, np.uint8) for _ in range(5)]
    assert await copy_batch(handle, sources, hosts) is None
    for k, host in enumerate(hosts):
        assert np.array_equal(host, pattern(1000, k))


async def test_the_legacy_stream_gives_the_order(emulated_gpu: Any) -> None:
    sources, hosts, fresh = devices(5), pinned_arrays(5), DeviceArray.from_numpy(pattern(1000, 99))
    emulated_gpu.hold(0)
    with context_of(0):
        for source in sources:
            check(driver.cuMemcpyDtoDAsync(source.ptr, fresh.ptr, 1000, 0))
    async with anyio.create_task_group() as group:
        group.start_soon(copy_batch, 0, sources, hosts)
        await anyio.lowlevel.checkpoint()
        with stream_of(0) as stream:
            await copy_batch(stream, [fresh] * 2, pinned_arrays(2))
        assert not any(host.any() for host in hosts)
        emulated_gpu.release(0)
    assert all(np.array_equal(host, pattern(1000, 99)) for host in hosts)


@one_loop
@pytest.mark.parametrize("host_kind", HOST_KINDS)
async def test_mixed_directions_and_kinds(host_kind: str) -> None:
    with (
        HOST_KINDS[host_kind](5000) as (out, out_view),
        HOST_KINDS[host_kind](3000) as (into, into_view),
        DEVICE_KINDS["Buffer"](3000) as (buffer, address),
        DEVICE_KINDS["managed Buffer"](700) as (managed, _),
    ):
        into_view[:] = pattern(3000, 2)
        source, copy = DeviceArray.from_numpy(pattern(5000, 1)), DeviceArray(5000)
        small, back = np.zeros(700, np.uint8), pattern(700, 3)
        await copy_batch(
            0,
            [source, into, source, back, DeviceArray.from_numpy(pattern(700, 4))],
            [out, buffer, copy, managed, small],
        )
        assert np.array_equal(out_view, pattern(5000, 1))
        assert np.array_equal(await copy_to_host(buffer), pattern(3000, 2))
        assert np.array_equal(copy.to_numpy(), pattern(5000, 1))
        assert np.array_equal(await copy_to_host(managed), pattern(700, 3))
        assert np.array_equal(small, pattern(700, 4))
        assert address
        del out, into, out_view, into_view


@one_loop
@pytest.mark.parametrize("pinned", [False, True])
async def test_sizes_from_nothing_to_several_slots(pinned: bool) -> None:
    sizes = [0, 1, 31, 4096, 32_768, 32_769, 100_000, 0, (4 << 20) + 1, (9 << 20) + 5, 7]
    sources = [DeviceArray.from_numpy(pattern(n, n)) for n in sizes]
    hosts = [(pinned_empty if pinned else np.empty)(n, np.uint8) for n in sizes]
    await copy_batch(None, sources, hosts)
    for n, host in zip(sizes, hosts, strict=True):
        assert np.array_equal(host, pattern(n, n))
        host[:] = pattern(n, n + 1)
    await copy_batch(None, hosts, sources)
    for n, source in zip(sizes, sources, strict=True):
        assert np.array_equal(source.to_numpy(), pattern(n, n + 1))


async def test_strided_entries() -> None:
    data = pattern(40 * 50).reshape(40, 50)
    device, host = DeviceArray.from_numpy(data), data.copy()
    box, rows, target = np.empty((10, 20), np.uint8), np.empty((20, 50), np.uint8), DeviceArray((40, 25))
    await copy_batch(0, [device[5:15, 7:27], device[::2], host[:, ::2]], [box, rows, target])
    assert np.array_equal(box, data[5:15, 7:27])
    assert np.array_equal(rows, data[::2])
    assert np.array_equal(target.to_numpy(), data[:, ::2])


@one_loop
async def test_thousands_of_entries() -> None:
    # vllm-project/vllm#49276; more of them in test_batch_numbers.
    data = pattern(3000 * 40).reshape(3000, 40)
    device = DeviceArray.from_numpy(data)
    pageable, pinned = np.zeros((3000, 40), np.uint8), pinned_empty((3000, 40))
    await copy_batch(0, [device[k] for k in range(3000)], list(pageable))
    await copy_batch(0, [device[k] for k in range(3000)], list(pinned))
    assert np.array_equal(pageable, data)
    assert np.array_equal(pinned, data)


async def test_the_loop_gets_its_turns_while_a_long_batch_is_planned() -> None:
    device, host = DeviceArray(3000), np.zeros(3000, np.uint8)
    turns, ended = 0, False

    async def run() -> None:
        nonlocal ended
        await copy_batch(0, [device[k : k + 1] for k in range(3000)], [host[k : k + 1] for k in range(3000)])
        ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        while not ended:
            await anyio.lowlevel.checkpoint()
            turns += 1
    assert turns > 3000 // 512


@pytest.mark.parametrize("at", [0, 3, 100])
async def test_streams_that_arrays_name_are_waited_for(emulated_gpu: Any, at: int) -> None:
    with stream_of(0) as stream, stream_of(0) as named:
        sources = devices(at, 16)
        source, fresh = DeviceArray(16, stream=named), DeviceArray.from_numpy(pattern(16, 5))
        sources += [source, *devices(3, 16)]
        hosts = [np.zeros(16, np.uint8) for _ in sources]
        emulated_gpu.hold(named)
        with context_of(0):
            check(driver.cuMemcpyDtoDAsync(source.ptr, fresh.ptr, 16, named))
        # The stream itself is busy as well, or there would be no order to keep between the marks.
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(copy_batch, stream, sources, hosts)
            for _ in range(at // 64 + 3):
                await anyio.lowlevel.checkpoint()
            emulated_gpu.release(stream)
            with stream_of(0) as other:
                await copy_batch(other, devices(2, 16), pinned_arrays(2, 16))
            assert not any(host.any() for host in hosts)
            emulated_gpu.release(named)
        assert np.array_equal(hosts[at], pattern(16, 5))


async def test_equal_to_single_copies() -> None:
    sources = devices(7, 333)
    hosts = [np.zeros(333, np.uint8) for _ in sources]
    await copy_batch(0, tuple(sources), tuple(hosts))
    for source, host in zip(sources, hosts, strict=True):
        assert np.array_equal(host, await copy_to_host(source))


# What completes at once.


@pytest.mark.parametrize("options", [None, [], CopyOptions(src_access_order="any")])
async def test_an_empty_batch(emulated_gpu: Any, options: Any) -> None:
    # rapidsai/rmm#2509
    async with Copier() as copier:
        for stream in (None, 0, 2):
            await copier.copy_batch(stream, [], [], options=options)
            await copier.copy_batch(stream, (), (), options=options, in_stream=True)
        assert copier.stats().submitted == 0


async def test_zero_sized_entries_are_dropped(batch_calls: list[Call]) -> None:
    # rapidsai/rmm#2509: the driver refuses a batch with a zero size in it.
    sources, hosts = devices(3, LARGE), pinned_arrays(3, LARGE)
    nothing, no_host = DeviceArray(0), np.empty(0, np.uint8)
    with stream_of(0) as stream:
        await copy_batch(
            stream, [nothing, sources[0], nothing, sources[1], sources[2], nothing],
            [no_host, hosts[0], bytearray(), hosts[1], hosts[2], memoryview(bytearray())],
        )  # fmt: skip
    assert all(np.array_equal(host, pattern(LARGE, k)) for k, host in enumerate(hosts))
    assert [call.sizes for call in batch_calls] == [[LARGE] * 3]


async def test_a_batch_of_zero_sized_entries() -> None:
    from cuda.core import Buffer

    memory = Managed(1)
    unknown = Buffer.from_handle(memory.address, 0, owner=memory)
    host, array = np.empty(0, np.uint8), DeviceArray(0)
    async with Copier() as copier:
        with stream_of(0) as stream:
            for one in (stream, 0, None):
                await copier.copy_batch(
                    one, [array, host, array, unknown, unknown, host], [host, array, array, host, array, unknown]
                )
        assert copier.stats().submitted == 0
    memory.free()


# Options.

ORDERS = [("stream", 1), ("during_api_call", 2), ("any", 3)]


@pytest.mark.parametrize(("order", "native"), ORDERS)
async def test_one_option_for_all(batch_calls: list[Call], order: str, native: int) -> None:
    sources, hosts = devices(3, LARGE), pinned_arrays(3, LARGE)
    with stream_of(0) as stream:
        await copy_batch(stream, sources, hosts, options=CopyOptions(src_access_order=order))
    assert [call.runs for call in batch_calls] == [[(0, (native, 0, 0, 0, 0, 0))]]
    assert all(np.array_equal(host, pattern(LARGE, k)) for k, host in enumerate(hosts))


async def test_no_options_mean_stream_order(batch_calls: list[Call]) -> None:
    # vllm-project/vllm#39306: ANY lets a device source be read too early.
    with stream_of(0) as stream:
        for options in (None, CopyOptions(), [CopyOptions()] * 3, [None, CopyOptions(), None]):
            await copy_batch(stream, devices(3, LARGE), pinned_arrays(3, LARGE), options=options)
    assert [call.runs for call in batch_calls] == [[(0, DEFAULT)]] * 4


async def test_options_by_entry_are_attribute_runs(batch_calls: list[Call]) -> None:
    early, plain = CopyOptions(src_access_order="any"), CopyOptions()
    options = [plain, plain, early, early, early, plain]
    with stream_of(0) as stream:
        await copy_batch(stream, devices(6), pinned_arrays(6), options=options)
    assert [call.runs for call in batch_calls] == [[(0, DEFAULT), (2, (3, 0, 0, 0, 0, 0)), (5, DEFAULT)]]


async def test_options_stay_with_their_entries_when_empty_ones_are_dropped(batch_calls: list[Call]) -> None:
    early, plain = CopyOptions(src_access_order="any"), CopyOptions()
    sources, hosts = devices(3), pinned_arrays(3)
    sources.insert(0, DeviceArray(0))
    hosts.insert(0, np.empty(0, np.uint8))
    with stream_of(0) as stream:
        await copy_batch(stream, sources, hosts, options=[early, plain, plain, early])
    assert [call.runs for call in batch_calls] == [[(0, DEFAULT), (2, (3, 0, 0, 0, 0, 0))]]


async def test_location_hints(batch_calls: list[Call]) -> None:
    from cuda.core import Device, Host

    options = [
        CopyOptions(src_location_hint=Device(0), dst_location_hint=Host()),
        CopyOptions(dst_location_hint=Host(numa_id=0)),
        CopyOptions(dst_location_hint=Host.numa_current()),
    ]
    sources, hosts = devices(3), pinned_arrays(3)
    with stream_of(0) as stream:
        await copy_batch(stream, sources, hosts, options=options)
    [call] = batch_calls
    assert [attributes for _, attributes in call.runs] == [(1, 1, 0, 2, 0, 0), (1, 0, 0, 3, 0, 0), (1, 0, 0, 4, 0, 0)]


async def test_options_reach_the_driver_for_one_entry_and_for_every_size(batch_calls: list[Call]) -> None:
    options = CopyOptions(src_access_order="any")
    for nbytes in (100, 100_000, 9 << 20):
        batch_calls.clear()
        [source], [host] = devices(1, nbytes), pinned_arrays(1, nbytes)
        with stream_of(0) as stream:
            await copy_batch(stream, [source], [host], options=options)
        assert sum(sum(call.sizes) for call in batch_calls) == nbytes
        assert all(call.runs == [(0, (3, 0, 0, 0, 0, 0))] for call in batch_calls)
        assert np.array_equal(host, pattern(nbytes, 0))


@pytest.mark.parametrize("in_stream", [False, True])
async def test_options_of_strided_entries_are_not_dropped(batch_calls: list[Call], in_stream: bool) -> None:
    data = pattern(40 * 50).reshape(40, 50)
    device, box, flat = DeviceArray.from_numpy(data), pinned_empty((10, 20)), pinned_empty(50)
    with stream_of(0) as stream:
        await copy_batch(
            stream, [device[5:15, 7:27], device[3]], [box, flat], options=CopyOptions(src_access_order="any"),
            in_stream=in_stream,
        )  # fmt: skip
    assert np.array_equal(box, data[5:15, 7:27])
    assert np.array_equal(flat, data[3])
    assert [call.sizes for call in batch_calls] == [[20] * 10 + [50]]
    assert batch_calls[0].runs == [(0, (3, 0, 0, 0, 0, 0))]


async def test_options_in_the_stream(emulated_gpu: Any, batch_calls: list[Call]) -> None:
    sources, hosts = devices(3), pinned_arrays(3)
    options = [CopyOptions(), CopyOptions(src_access_order="any"), CopyOptions()]
    with stream_of(0) as stream:
        await copy_batch(stream, sources, hosts, options=options, in_stream=True)
        assert [call.runs for call in batch_calls] == [[(0, DEFAULT), (1, (3, 0, 0, 0, 0, 0)), (2, DEFAULT)]]
    emulated_gpu.hold(0)
    with pytest.raises(NotImplementedError, match="legacy default stream"):
        await copy_batch(0, sources, hosts, options=options, in_stream=True)
    assert emulated_gpu.pending(0) == []
    emulated_gpu.release(0)
    # In a stream of the library's own the driver takes them.
    await copy_batch(0, sources, hosts, options=options)
    assert len(batch_calls) == 2
    assert all(np.array_equal(host, pattern(1000, k)) for k, host in enumerate(hosts))


async def test_overlap_with_compute_has_no_effect_here() -> None:
    overlap = CopyOptions(overlap_mode="prefer_overlap_with_compute")
    if _native.is_integrated(0):
        pytest.skip("an integrated GPU")
    sources, hosts = devices(2), pinned_arrays(2)
    with stream_of(0) as stream:
        for options in (overlap, [CopyOptions(), overlap]):
            with pytest.warns(UserWarning, match="prefer_overlap_with_compute") as caught:
                await copy_batch(stream, sources, hosts, options=options)
            assert len(caught) == 1
    assert all(np.array_equal(host, pattern(1000, k)) for k, host in enumerate(hosts))


WITHOUT_THE_ENTRY_POINT = """
import asyncio, sys
import numpy as np
from aiocuda_copy import testing
emulator = testing.use_emulated_driver(driver_version={version})
from aiocuda_copy import Copier, copy_batch, pinned_empty
from aiocuda_copy.testing import DeviceArray
from cuda.core.utils import CopyOptions

async def main():
    sources = [DeviceArray.from_numpy(np.full(50, k % 256, "u1")) for k in range(300)]
    hosts = [pinned_empty(50) for _ in sources]
    early = CopyOptions(src_access_order="any")
    if {version} < 12080:
        emulator.hold(2)
    async with Copier() as copier:
        for options in (early, [CopyOptions()] * 299 + [early]):
            for in_stream in (False, True):
                try:
                    await copier.copy_batch(2, sources, hosts, options=options, in_stream=in_stream)
                except NotImplementedError as exc:
                    print("refused", "cuMemcpyBatchAsync" in str(exc))
        if {version} < 12080:
            assert copier.stats().submitted == 0 and emulator.pending(2) == []
    emulator.release(2)
    for options in (None, CopyOptions(), [CopyOptions()] * 300):
        for in_stream in (False, True):
            for host in hosts:
                host.fill(255)
            await copy_batch(2, sources, hosts, options=options, in_stream=in_stream)
            print("right", all((host == k % 256).all() for k, host in enumerate(hosts)))
    print("calls", emulator.calls("cuMemcpyBatchAsync"))

asyncio.run(main())
"""


@pytest.mark.parametrize("version", [12060, 12080])
def test_where_the_entry_point_is_missing_or_older(version: int) -> None:
    # NVIDIA/cuda-python#2636: an access order was dropped.
    script = WITHOUT_THE_ENTRY_POINT.format(version=version)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    if version < 12080:
        assert lines == ["refused True"] * 4 + ["right True"] * 6 + ["calls 0"], run.stderr
    else:
        assert lines[-7:-1] == ["right True"] * 6, run.stderr
        assert "refused True" not in lines
        assert int(lines[-1].split()[1]) > 0


# Errors.


async def refused(emulator: Any, error: type[Exception], message: str, *args: Any, **kwargs: Any) -> None:
    with stream_of(0) as stream:
        emulator.hold(stream)
        async with Copier() as copier:
            with pytest.raises(error, match=message):
                await copier.copy_batch(stream, *args, **kwargs)
            assert copier.stats().submitted == 0
        assert emulator.pending(stream) == []


@one_loop
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("single", ["array", "ndarray", "Buffer", "bytearray", "memoryview", "str", "generator"])
async def test_a_single_buffer_instead_of_a_sequence(emulated_gpu: Any, single: str, side: int) -> None:
    with DEVICE_KINDS["Buffer"](1000) as (buffer, _):
        one = {
            "array": DeviceArray(1000), "ndarray": np.zeros(1000, np.uint8), "Buffer": buffer, "str": "x" * 1000,
            "bytearray": bytearray(1000), "memoryview": memoryview(bytearray(1000)), "generator": iter([1]),
        }[single]  # fmt: skip
        sides = [one, [np.zeros(1000, np.uint8)]]
        await refused(
            emulated_gpu, TypeError, r"must be a sequence.*copy_to_host or copy_to_device", *sides[:: 1 - 2 * side]
        )


async def test_unequal_lengths_name_the_index(emulated_gpu: Any) -> None:
    await refused(emulated_gpu, ValueError, r"3 sources and 2 destinations: entry 2", devices(3), pinned_arrays(2))
    await refused(emulated_gpu, ValueError, r"2 sources and 3 destinations: entry 2", devices(2), pinned_arrays(3))
    await refused(emulated_gpu, ValueError, r"entry 0", [], pinned_arrays(1))
    await refused(
        emulated_gpu, ValueError, "2 options for 3", devices(3), pinned_arrays(3), options=[CopyOptions()] * 2
    )


@pytest.mark.parametrize("at", [0, 2, 63])
async def test_a_wrong_entry_is_named(emulated_gpu: Any, at: int) -> None:
    wrong: list[tuple[type[Exception], str, Any, Any]] = [
        (ValueError, "sizes must match", DeviceArray(10), bytearray(11)),
        (ValueError, "host", bytearray(10), bytearray(10)),
        (ValueError, "read-only", DeviceArray(10), bytes(10)),
        (ValueError, "permuted", DeviceArray((4, 5)).T, bytearray(20)),
        (TypeError, "must be", 17, bytearray(10)),
        (TypeError, "must be", DeviceArray(10), None),
    ]
    for error, message, src, dst in wrong:
        sources, hosts = devices(at, 8), [np.zeros(8, np.uint8) for _ in range(at)]
        await refused(emulated_gpu, error, rf"entry {at} of the batch: .*{message}", [*sources, src], [*hosts, dst])


async def test_entries_of_two_devices(emulated_gpu: Any) -> None:
    need_two_devices()
    sources = [DeviceArray(10), DeviceArray(10, device=1)]
    await refused(emulated_gpu, ValueError, r"entry 1 of the batch: .*device is 1", sources, pinned_arrays(2, 10))


async def test_overlapping_destinations_are_named(emulated_gpu: Any) -> None:
    host, device = np.zeros(1000, np.uint8), DeviceArray(1000)
    parts = [DeviceArray(100) for _ in range(4)]
    for base in (host, device):
        overlapping = [base[500:600], base[0:100], base[100:200], base[150:250]]
        await refused(emulated_gpu, ValueError, "entries 2 and 3 of the batch overlap", parts, overlapping)
        adjacent = [base[500:600], base[0:100], base[100:200], base[200:300]]
        await copy_batch(0, parts, adjacent)
    same = DeviceArray(100)
    await refused(emulated_gpu, ValueError, "entries 0 and 3 of the batch overlap", parts, [same, *parts[:2], same])
    # The same source more than once is no matter.
    await copy_batch(0, [parts[0]] * 3, pinned_arrays(3, 100))


async def test_sizes_go_with_other_forms(emulated_gpu: Any) -> None:
    await refused(emulated_gpu, TypeError, "sizes=", devices(2), pinned_arrays(2), sizes=1000)


@one_loop
@pytest.mark.parametrize(
    "options",
    ["any", 3, object(), [object()], {"src_access_order": "any"}],
    ids=["a word", "a number", "an object", "a list of one", "a dict"],
)
async def test_options_that_are_none(emulated_gpu: Any, options: Any) -> None:
    await refused(emulated_gpu, TypeError, "CopyOptions", devices(1), pinned_arrays(1), options=options)


async def test_captures_are_refused_and_stay_valid() -> None:
    # rapidsai/rmm#2518, NVIDIA/warp#653
    from cuda.core import Device

    sources, hosts = devices(2), pinned_arrays(2)
    with context_of(0):
        device = Device(0)
        device.set_current()
        stream = device.create_stream()
        check(driver.cuStreamBeginCapture(int(stream.handle), driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        for in_stream in (False, True):
            with pytest.raises(RuntimeError, match="under capture"):
                await copy_batch(stream, sources, hosts, in_stream=in_stream)
            with pytest.raises(RuntimeError, match="under capture"):
                await copy_batch(stream, [], [], in_stream=in_stream)
        graph = check(driver.cuStreamEndCapture(int(stream.handle)))
        assert check(driver.cuGraphGetNodes(graph)[:3:2]) == 0
        check(driver.cuGraphDestroy(graph))
        builder = device.create_graph_builder().begin_building()
        with pytest.raises(RuntimeError, match="under capture"):
            await copy_batch(builder, sources, hosts)
        builder.end_building()
        builder.close()
        stream.close()


async def test_a_driver_error_while_the_batch_is_planned(emulated_gpu: Any) -> None:
    """By the long way, which asks again after the short one has asked for both sides of the first entry."""
    sources, hosts = devices(3), pinned_arrays(3)
    for nth in (1, 2, 3):
        emulated_gpu.fail_call("cuPointerGetAttributes", nth, 999)
    with pytest.raises(CudaError) as caught:
        await copy_batch(2, sources, hosts)
    assert (caught.value.code, caught.value.operation) == (999, "cuPointerGetAttributes")


async def test_a_batch_that_the_driver_refuses(emulated_gpu: Any) -> None:
    # sgl-project/sglang#31252: an index that the driver does not give is not invented.
    emulated_gpu.fail_call("cuMemcpyBatchAsync", 1, 1)
    async with Copier() as copier:
        with pytest.raises(CudaError) as caught:
            await copier.copy_batch(2, devices(3, LARGE), pinned_arrays(3, LARGE))
        assert caught.value.code == 1
        assert str(2**64 - 1) not in str(caught.value)
        stats = copier.stats()
        assert (stats.failed, stats.in_flight) == (1, 0)


def test_options_that_are_given_again_are_read_once() -> None:
    class Counted:
        src_access_order, overlap_mode, src_location_hint = "any", "default", None
        reads = 0

        @property
        def dst_location_hint(self) -> None:
            self.reads += 1

    one, other = Counted(), Counted()
    distinct, indices = parse_options([one, None, other, one] * 100, 400)
    assert len(distinct) == 2
    assert indices == [0, 1, 0, 0] * 100
    assert (one.reads, other.reads) == (1, 1)
