"""Wrong arguments: the right error, a message that helps, and nothing enqueued."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import numpy as np
import pytest
from kinds import DEVICE_KINDS, HOST_KINDS, need_two_devices, one_loop, pattern, stream_of

from aiocuda_copy import (
    Blocks,
    ClosedError,
    Copier,
    copy_batch,
    copy_to_device,
    copy_to_host,
    pinned_empty,
    synchronize,
)
from aiocuda_copy.testing import DeviceArray, Emulator


@contextlib.asynccontextmanager
async def nothing_happens(emulator: Any) -> AsyncIterator[tuple[Copier, int]]:
    """A copier and a stream that must come to nothing."""
    with stream_of(0) as stream:
        emulator.hold(stream)
        async with Copier() as copier:
            yield copier, stream
            stats = copier.stats()
            assert (stats.submitted, stats.in_flight) == (0, 0)
        assert emulator.pending(stream) == []
        assert emulator.pending(0) == []


def device() -> DeviceArray:
    return DeviceArray(64)


class Masked:
    def __init__(self, base: DeviceArray) -> None:
        self.base = base
        self.__cuda_array_interface__ = base.__cuda_array_interface__ | {"mask": base}


class ReadOnly:
    def __init__(self, base: DeviceArray) -> None:
        self.base = base
        self.__cuda_array_interface__ = base.__cuda_array_interface__ | {"data": (base.ptr, True)}


class Liar:
    def __init__(self, address: int, nbytes: int = 64, base: object = None) -> None:
        self.base = base
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def beyond(base: DeviceArray) -> Liar:
    return Liar(base.ptr, 1 << 40, base)


def frozen(nbytes: int = 64) -> np.ndarray:
    found = np.zeros(nbytes, np.uint8)
    found.flags.writeable = False
    return found


def host() -> np.ndarray:
    return np.zeros(64, np.uint8)


Wrong = tuple[Callable[[], Any], Callable[[], Any], type[Exception], str]

TO_HOST: dict[str, Wrong] = {
    # Theano/libgpuarray#224: writability was not checked.
    "read-only array": (device, frozen, ValueError, r"read-only; pass .*numpy\.empty_like\(array\)"),
    "read-only memoryview": (
        device,
        lambda: memoryview(bytearray(64)).toreadonly(),
        ValueError,
        r"pass .*bytearray\(nbytes\)",
    ),
    "bytes": (device, lambda: bytes(64), ValueError, r"\(bytes\) is read-only; pass .*bytearray\(nbytes\)"),
    "too small": (device, lambda: np.zeros(63, np.uint8), ValueError, r"64 bytes.*63"),
    "too large": (device, lambda: bytearray(65), ValueError, r"64 bytes.*65"),
    "empty destination": (device, lambda: bytearray(), ValueError, "sizes must match"),
    "empty source": (lambda: DeviceArray(0), host, ValueError, "sizes must match"),
    "host to host": (host, host, ValueError, "numpy.copyto"),
    "pinned to host": (lambda: pinned_empty(64), host, ValueError, "numpy.copyto"),
    "host to new": (host, lambda: None, ValueError, "numpy.copyto"),
    "device to device": (device, device, ValueError, "use copy_to_device"),
    "int as source": (lambda: 64, host, TypeError, r"Buffer\.from_handle"),
    "int as destination": (device, lambda: 64, TypeError, r"Buffer\.from_handle"),
    "str": (device, lambda: "x" * 64, TypeError, "encode"),
    "list": (device, lambda: [0] * 64, TypeError, r"numpy\.asarray"),
    "object": (object, host, TypeError, "__cuda_array_interface__"),
    "None as source": (lambda: None, host, TypeError, "the source must be"),
    "numpy scalar": (device, lambda: np.float64(3), TypeError, r"numpy\.asarray"),
    "Python objects": (device, lambda: np.array([None] * 8), TypeError, "Python objects"),
    "ctypes objects": (device, lambda: (ctypes.py_object * 8)(), TypeError, "Python objects"),
    "masked host array": (device, lambda: np.ma.zeros(64, np.uint8), ValueError, "masked"),
    "masked device array": (lambda: Masked(device()), host, ValueError, "mask"),
    "not the driver's": (lambda: Liar(0xDEAD0000), host, ValueError, "does not know"),
    "null": (lambda: Liar(0), host, ValueError, "null address"),
    "beyond the allocation": (lambda: beyond(device()), lambda: None, ValueError, "allocation ends"),
}
TO_DEVICE: dict[str, Wrong] = {
    "to host": (host, host, ValueError, "numpy.copyto"),
    "device to host": (device, host, ValueError, "use copy_to_host"),
    "device to pinned": (device, lambda: pinned_empty(64), ValueError, "use copy_to_host"),
    "no destination": (host, lambda: None, TypeError, "needs a destination"),
    "read-only device array": (host, lambda: ReadOnly(device()), ValueError, "pass a writable array on the device"),
    "read-only between devices": (device, lambda: ReadOnly(device()), ValueError, "read-only"),
    "sizes": (lambda: array.array("d", [1, 2, 3]), device, ValueError, r"24 bytes.*64"),
    "sizes between devices": (lambda: DeviceArray(63), device, ValueError, r"63 bytes.*64"),
    "masked source": (lambda: np.ma.masked_array(host(), host() == 1), device, ValueError, "masked"),
    "Python objects": (lambda: np.array([None] * 8), device, TypeError, "Python objects"),
    "list": (lambda: [0] * 64, device, TypeError, r"numpy\.asarray"),
}


@one_loop
@pytest.mark.parametrize("name", TO_HOST)
async def test_copy_to_host_refuses(emulated_gpu: Any, name: str) -> None:
    make_src, make_dst, error, message = TO_HOST[name]
    src, dst = make_src(), make_dst()
    async with nothing_happens(emulated_gpu) as (copier, stream):
        for in_stream in (False, True):
            with pytest.raises(error, match=message):
                await copier.copy_to_host(src, dst, stream=stream, in_stream=in_stream)


@one_loop
@pytest.mark.parametrize("name", TO_DEVICE)
async def test_copy_to_device_refuses(emulated_gpu: Any, name: str) -> None:
    make_src, make_dst, error, message = TO_DEVICE[name]
    src, dst = make_src(), make_dst()
    async with nothing_happens(emulated_gpu) as (copier, stream):
        for in_stream in (False, True):
            with pytest.raises(error, match=message):
                await copier.copy_to_device(src, dst, stream=stream, in_stream=in_stream)


@pytest.mark.parametrize("scale", [1, 1000])
async def test_masked_arrays_are_refused_whatever_their_size(scale: int) -> None:
    masked = np.ma.masked_array(np.zeros(64 * scale, np.uint8), np.arange(64 * scale) % 2)
    with pytest.raises(ValueError, match="masked"):
        await copy_to_device(masked, DeviceArray(64 * scale))
    with pytest.raises(ValueError, match="masked"):
        await copy_to_host(DeviceArray(64 * scale), masked)


@pytest.mark.parametrize(
    "wrong", [-1, 2**64, "stream", 1.0, True, object(), np.int64(0)], ids=lambda w: type(w).__name__
)
async def test_streams_that_are_none(wrong: Any) -> None:
    for nbytes in (0, 64, 1 << 20):
        array = DeviceArray(nbytes)
        with pytest.raises((TypeError, ValueError), match="stream"):
            await copy_to_host(array, stream=wrong)
        with pytest.raises((TypeError, ValueError), match="stream"):
            await copy_to_device(bytearray(nbytes), array, stream=wrong)


@pytest.mark.parametrize("stream", [0, 1, 2])
async def test_the_wrong_device_of_a_copier(emulated_gpu: Any, stream: int) -> None:
    need_two_devices()
    on_0, on_1 = DeviceArray(64), DeviceArray(64, device=1)
    large_1 = DeviceArray(100_000, device=1)
    async with Copier(device=0) as copier:
        for copy in (
            copier.copy_to_host(on_1, host(), stream=stream),
            copier.copy_to_host(on_1, stream=stream),
            copier.copy_to_device(host(), on_1, stream=stream),
            copier.copy_to_device(bytearray(100_000), large_1, stream=stream),
            copier.copy_to_device(on_0, on_1, stream=stream),
            copier.copy_to_device(on_1, on_0, stream=stream),
            copier.copy_batch(stream, [on_1], [host()]),
            copier.copy_batch(stream, [on_1], [on_0]),
        ):
            with pytest.raises(ValueError, match=r"on device 1.*for device 0"):
                await copy
        assert copier.stats().submitted == 0
    async with Copier(device=1) as copier:
        await copier.copy_to_device(pattern(64), on_1, stream=stream)
        assert np.array_equal(await copier.copy_to_host(on_1, stream=stream), pattern(64))
        with pytest.raises(ValueError, match=r"on device 0.*for device 1"):
            await copier.copy_to_host(on_0, host(), stream=stream)


@one_loop
@pytest.mark.parametrize("kind", ["Buffer", "pinned Buffer"])
async def test_closed_buffers(kind: str) -> None:
    on_device = kind == "Buffer"
    with (DEVICE_KINDS if on_device else HOST_KINDS)[kind](64) as (buffer, _):
        buffer.close()
        for copy in (
            copy_to_host(buffer, host()) if on_device else copy_to_host(device(), buffer),
            copy_to_device(host(), buffer) if on_device else copy_to_device(buffer, device()),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                await copy


@one_loop
@pytest.mark.parametrize("wrong", [list, tuple])
async def test_blocks_of_a_list(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"parts of one array.* pass a sequence of arrays to copy_batch as it is"):
        Blocks(wrong([device(), device()]), np.array([0, 8]))


@pytest.mark.parametrize("wrong", [[0, 8], (0, 8), range(0, 16, 8), np.array([0, 8], np.int32), np.array([[0], [8]])])
def test_offsets_that_are_not_quite_right(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"numpy\.ravel\(offsets\)\.astype\('uint64'\) makes one"):
        Blocks(bytearray(64), wrong)
    assert Blocks(bytearray(64), np.ravel(wrong).astype("uint64")).offsets.tolist() == [0, 8]


@one_loop
async def test_a_batch_of_an_iterator(emulated_gpu: Any) -> None:
    srcs, dsts = [device()], [host()]
    with pytest.raises(TypeError, match=r"not generator; list\(srcs\) makes one"):
        await copy_batch(0, (one for one in srcs), dsts)
    with pytest.raises(TypeError, match="addresses in a buffer of uint64"):
        await copy_batch(0, [srcs[0].ptr], [dsts[0].ctypes.data], sizes=64)


@one_loop
@pytest.mark.parametrize("nbytes", [64, 1 << 20])
async def test_tensors_without_torch(emulated_gpu: Any, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TypeError, match=r"'torch', which is not installed: pip install 'aiocuda-copy\[torch\]'"):
        await copy_to_host(DeviceArray(nbytes), like="torch")


async def test_a_released_memoryview() -> None:
    view = memoryview(bytearray(64))
    view.release()
    with pytest.raises(ValueError, match="released"):
        await copy_to_host(device(), view)


async def test_a_freed_array(emulated_gpu: Any) -> None:
    array = device()
    array.free()
    with pytest.raises(ValueError, match="does not know"):
        await copy_to_host(array, host())


async def test_a_wrong_argument_is_seen_when_the_coroutine_runs() -> None:
    copy = copy_to_host(host(), host())
    with pytest.raises(ValueError, match="host"):
        await copy


async def test_a_closed_copier() -> None:
    copier = Copier()
    await copier.aclose()
    for call in (
        copier.copy_to_host(device(), host()),
        copier.copy_to_host(device()),
        copier.copy_to_device(host(), device()),
        copier.copy_batch(0, [], []),
        copier.synchronize(0),
    ):
        with pytest.raises(ClosedError, match="closed"):
            await call
    with pytest.raises(ClosedError, match="closed"):
        async with copier:
            pass
    await copier.aclose()


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": None},
        {"data": (1,)},
        {"data": (-5, False)},
        {"data": (2**70, False)},
        {"shape": (-1,)},
        {"shape": (2**62, 2**62)},
        {"shape": (50.0, 2)},
        {"typestr": ""},
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["to host", "new", "to device", "batch"])
async def test_a_malformed_cuda_array_interface(wrong: dict[str, Any] | None, way: str, gpu: Emulator | None) -> None:
    array = DeviceArray((100,))

    class Malformed:
        __cuda_array_interface__ = 3 if wrong is None else {**array.__cuda_array_interface__, **wrong}

    host = bytearray(100)
    ways = {
        "to host": lambda: copy_to_host(Malformed(), host),
        "new": lambda: copy_to_host(Malformed()),
        "to device": lambda: copy_to_device(host, Malformed()),
        "batch": lambda: copy_batch(0, [array, Malformed()], [bytearray(100), host]),
    }
    with pytest.raises(ValueError, match="malformed __cuda_array_interface__"):
        await ways[way]()


@pytest.mark.parametrize("progress", [1, "yes"])
async def test_progress_that_is_no_function(progress: Any, gpu: Emulator | None) -> None:
    array, host = DeviceArray((100,)), bytearray(100)
    for call in (copy_to_host(array, host, progress=progress), copy_to_device(host, array, progress=progress)):
        with pytest.raises(TypeError, match="progress must be a function"):
            await call


async def test_progress_that_raises_what_closes_coroutines(emulated_gpu: Emulator) -> None:
    """The copy is let go of first, as with any other error."""
    array, host = DeviceArray.from_numpy(np.ones(8 << 20, np.uint8)), pinned_empty(8 << 20)
    host[:] = 0
    emulated_gpu.throttle(gigabytes_per_second=0.1)

    def progress(done: int, total: int) -> None:
        raise GeneratorExit

    with pytest.raises(RuntimeError, match="progress raised GeneratorExit"):
        await copy_to_host(array, host, progress=progress)
    arrived = host.copy()
    emulated_gpu.throttle()
    emulated_gpu.settle()
    assert np.array_equal(host, arrived)


async def test_ranges_of_one_array_that_overlap(gpu: Emulator | None) -> None:
    array = DeviceArray.from_numpy(np.arange(200, dtype=np.uint8))
    for src, dst in ((array[:100], array[50:150]), (array[50:150], array[:100])):
        with pytest.raises(ValueError, match="overlap"):
            await copy_to_device(src, dst)
    await copy_to_device(array[:100], array[100:])
    await copy_to_device(array, array)
    assert np.array_equal(array.to_numpy(), np.tile(np.arange(100, dtype=np.uint8), 2))


EMPTY = {
    "to host": lambda empty, array: copy_to_host(empty, bytearray()),
    "new": lambda empty, array: copy_to_host(empty),
    "to device": lambda empty, array: copy_to_device(b"", empty),
    "no entries": lambda empty, array: copy_batch(0, [], []),
    "empty entries": lambda empty, array: copy_batch(0, [empty], [bytearray()]),
    "empty blocks": lambda empty, array: copy_batch(0, *[Blocks(array, np.zeros(1, np.uint64))] * 2, sizes=0),
}


@pytest.mark.parametrize("way", EMPTY)
async def test_empty_copies_can_be_cancelled(gpu: Emulator | None, way: str) -> None:
    """However many there are one after another, time limits end them."""
    empty, array = DeviceArray(0), DeviceArray(8)
    with anyio.move_on_after(0.01) as scope:
        while True:
            await EMPTY[way](empty, array)
    assert scope.cancelled_caught
    with anyio.CancelScope() as scope:
        scope.cancel()
        await EMPTY[way](empty, array)
    assert scope.cancelled_caught


def test_classes_do_not_pile_up(gpu: Emulator | None) -> None:
    """What is known of types is not kept for all that a program has ever made."""
    array = DeviceArray(4)

    async def copies() -> weakref.ref[Any]:
        first = None
        for _ in range(1100):
            kind = type("Mine", (), {"__cuda_array_interface__": array.__cuda_array_interface__})
            first = first or weakref.ref(kind)
            await copy_to_host(kind(), bytearray(4))
        assert first is not None
        return first

    first = asyncio.run(copies())
    gc.collect()
    assert first() is None


@pytest.mark.parametrize("nothing", ["s", None, 1.5])
async def test_what_cannot_be_synchronised(emulated_gpu: Any, nothing: Any) -> None:
    with pytest.raises(TypeError, match=r"synchronize\(\) takes a stream or an event, and stream must be .*, not "):
        await synchronize(nothing)
