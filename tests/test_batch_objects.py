"""Batches of objects: those that are plain take a short way, and all else comes out the same."""

from __future__ import annotations

import array
import random
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from calls import Stream, calls, turns
from kinds import DEVICE_KINDS, HOST_KINDS, Managed, one_loop, pattern, stream_of

from aiocuda_copy import Copier, _copy_batch, _driver, _native, copy_batch, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator

NBYTES = 600


def taken(srcs: list[Any], dsts: list[Any], device: int = 0) -> int:
    """How many entries take the short way."""
    _driver.ensure()
    operation = _native.Operation(_native.Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False))
    context = _native.primary_context(0)[1]
    return _native.add_objects(operation, srcs, dsts, 0, device, context, [], [])


def buffer(data: np.ndarray) -> Any:
    from cuda.core import Buffer

    owner = DeviceArray.from_numpy(data)
    return Buffer.from_handle(owner.ptr, owner.nbytes, owner=owner)


def on_device(data: np.ndarray) -> DeviceArray:
    return DeviceArray.from_numpy(data)


def pinned_of(data: np.ndarray) -> np.ndarray:
    host = pinned_empty(data.shape, data.dtype)
    host[...] = data
    return host


# What is plain, and what is not.


PLAIN_HOSTS: dict[str, Callable[[int], Any]] = {
    "ndarray": lambda n: np.zeros(n, np.uint8),
    "ndarray of another type": lambda n: np.zeros(n // 4, np.float32),
    "ndarray of dates": lambda n: np.zeros(n // 8, "M8[ns]"),
    "page-locked": lambda n: pinned_of(np.zeros(n, np.uint8)),
    "bytearray": bytearray,
    "memoryview": lambda n: memoryview(bytearray(n)),
    "array.array": lambda n: array.array("i", [0] * (n // 4)),
}


@pytest.mark.parametrize("host", PLAIN_HOSTS)
def test_what_is_plain(host: str) -> None:
    for device in (on_device(pattern(NBYTES)), buffer(pattern(NBYTES))):
        on_host = PLAIN_HOSTS[host](NBYTES)
        assert taken([device] * 3, [on_host] * 3) == 3
        assert taken([on_host] * 3, [device] * 3) == 3
        assert taken([device], [buffer(pattern(NBYTES))]) == 1


def test_rectangles_are_plain() -> None:
    frames = DeviceArray((4, 30, 40, 3), np.int16)
    crops = [frames[1, 3:13, 5:25], frames[:, 3:13, 5:25], frames[::2, :, :], frames[0, :, 1:3, :2], frames[2:3, 1]]
    for crop in crops:
        host = np.zeros(crop.shape, np.int16)
        assert taken([crop], [host]) == 1
        assert taken([host], [crop]) == 1
    four_levels = frames[::2, ::2, ::2, ::2]
    assert taken([four_levels], [np.zeros(four_levels.shape, np.int16)]) == 0


class Interface:
    def __init__(self, **other: Any) -> None:
        self.memory = DeviceArray(NBYTES)
        self.__cuda_array_interface__ = {**self.memory.__cuda_array_interface__, **other}


def test_what_is_not_plain() -> None:
    device, host = on_device(pattern(NBYTES)), np.zeros(NBYTES, np.uint8)
    read_only = host.view()
    read_only.flags.writeable = False
    managed = Managed(NBYTES)
    ends: list[tuple[Any, Any]] = [
        (device, bytes(NBYTES)),
        (device, read_only),
        (device, memoryview(bytes(NBYTES))),
        (device, np.zeros(NBYTES + 1, np.uint8)),
        (device, np.zeros(2 * NBYTES, np.uint8)[::2]),
        (device, np.zeros(NBYTES // 8, object)),
        (device, np.ma.zeros(NBYTES, np.uint8)),
        (device, [0] * NBYTES),
        (device, "a word"),
        (device, None),
        (host, host),
        (DeviceArray(NBYTES, stream=1), host),
        (DeviceArray(0), np.zeros(0, np.uint8)),
        (DeviceArray((NBYTES, 2))[:, 0], np.zeros((NBYTES, 2), np.uint8)[:, 0]),
        (DeviceArray((30, 20)).T, host),
        (managed, host),
        (Interface(mask=device), host),
        (Interface(version=2), host),
        (Interface(typestr="|O8", shape=(NBYTES // 8,)), host),
        (Interface(strides=(-1,)), host),
        (Interface(strides=(0,)), host),
        (Interface(shape=(NBYTES, 1 << 40)), np.zeros(1, np.uint8)),
    ]
    for src, dst in ends:
        assert taken([device, src], [host, dst]) == 1, (src, dst)
    assert taken([device], [host], device=1) == 0
    managed.free()


def test_memory_that_goes_beyond_its_allocation_is_not_plain() -> None:
    beyond = Interface(shape=(1 << 40,))
    operation = _native.Operation(_native.Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False))

    class Huge:
        """As large, and never touched."""

        __cuda_array_interface__ = beyond.__cuda_array_interface__

    context = _native.primary_context(0)[1]
    assert _native.add_objects(operation, [Huge()], [Huge()], 0, 0, context, [], []) == 0


# Both ways in one batch.


@one_loop
@pytest.mark.parametrize("seed", range(4))
async def test_plain_and_other_entries_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    srcs: list[Any] = []
    dsts: list[Any] = []
    expected: list[np.ndarray] = []

    def add(src: Any, dst: Any, data: np.ndarray) -> None:
        srcs.append(src)
        dsts.append(dst)
        expected.append(data)

    def empty() -> None:
        add(DeviceArray(0), np.zeros(0, np.uint8), np.zeros(0, np.uint8))

    def strided() -> None:
        data = pattern(NBYTES, len(srcs)).reshape(20, 30)
        add(on_device(data)[2:7, 3:9], np.zeros((5, 6), np.uint8), data[2:7, 3:9])

    def strided_on_host() -> None:
        data = pattern(NBYTES, len(srcs)).reshape(20, 30)
        add(data[2:7, 3:9], DeviceArray((5, 6)), data[2:7, 3:9])

    def one(source: Any, target: Any) -> Callable[[], None]:
        def make() -> None:
            data = pattern(1 + chance.randrange(NBYTES), len(srcs))
            add(source(data), target(len(data)), data)

        return make

    host, page_locked = (lambda n: np.zeros(n, np.uint8)), (lambda n: pinned_of(np.zeros(n, np.uint8)))
    others = [
        one(lambda data: DeviceArray.from_numpy(data, stream=1), host),
        one(on_device, lambda n: memoryview(bytearray(n))),
        empty, strided, strided_on_host,
    ]  # fmt: skip
    plain = [one(on_device, host), one(buffer, page_locked), one(pinned_of, DeviceArray), one(on_device, DeviceArray)]
    for _ in range(300):
        chance.choice(chance.choice([others, plain, plain]))()
    await copy_batch(0, srcs, dsts)
    for dst, data in zip(dsts, expected, strict=True):
        found = dst.to_numpy() if isinstance(dst, DeviceArray) else np.asarray(dst)
        assert np.array_equal(found, data)


@one_loop
@pytest.mark.parametrize("device_kind", DEVICE_KINDS)
@pytest.mark.parametrize("host_kind", HOST_KINDS)
async def test_every_kind_behind_a_plain_entry(host_kind: str, device_kind: str) -> None:
    first, plain = on_device(pattern(50, 9)), np.zeros(50, np.uint8)
    with HOST_KINDS[host_kind](NBYTES) as (host, view), DEVICE_KINDS[device_kind](NBYTES) as (device, _):
        view[:] = pattern(NBYTES)
        await copy_batch(0, [first, host], [plain, device])
        view[:] = 0
        await copy_batch(0, [first, device], [plain, host])
        assert np.array_equal(view, pattern(NBYTES))
        del host, view
    assert np.array_equal(plain, pattern(50, 9))


async def test_a_bytearray_in_a_batch_cannot_be_resized_meanwhile(emulated_gpu: Emulator) -> None:
    stream = Stream()
    hosts = [bytearray(NBYTES) for _ in range(5)]
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_batch(stream, [buffer(pattern(NBYTES, k)) for k in range(5)], hosts))
        await turns()
        for host in hosts:
            with pytest.raises(BufferError):
                host.append(0)
        emulated_gpu.release(stream)
        await call.result()
        del call
    await turns()
    for k, host in enumerate(hosts):
        host.append(0)
        assert np.array_equal(np.frombuffer(host, np.uint8)[:-1], pattern(NBYTES, k))


@pytest.mark.parametrize("at", [1, 127, 128, 129, 255, 256, 511, 512, 640])
async def test_errors_name_the_entry(emulated_gpu: Emulator, at: int) -> None:
    device, host = DeviceArray((at + 1, 16)), np.zeros((at + 1, 16), np.uint8)
    srcs, dsts = [device[k] for k in range(at + 1)], list(host)
    for error, src, dst, message in (
        (ValueError, srcs[at], bytes(16), "read-only"),
        (ValueError, srcs[at], np.zeros(17, np.uint8), "sizes must match"),
        (ValueError, np.zeros(16, np.uint8), dsts[at], "host"),
        (TypeError, srcs[at], 3, "not int"),
    ):
        with stream_of(0) as stream:
            emulated_gpu.hold(stream)
            with pytest.raises(error, match=rf"entry {at} of the batch: .*{message}"):
                await copy_batch(stream, [*srcs[:at], src], [*dsts[:at], dst])
            emulated_gpu.release(stream)


class Broken:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise ValueError("it has been deleted")


async def test_errors_of_the_objects_themselves_name_the_entry() -> None:
    device, host = DeviceArray(16), np.zeros(16, np.uint8)
    for broken in (Broken(), Interface(data=(None, False)), Interface(typestr="|u"), Interface(shape=("a word",))):
        with pytest.raises((TypeError, ValueError)) as caught:
            await copy_batch(0, [device, broken, device], [host, host.copy(), host.copy()])
        assert "entry 1 of the batch" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


async def test_overlaps_between_plain_and_other_entries() -> None:
    frame, host = DeviceArray((10, 10)), np.zeros(1000, np.uint8)
    plain = DeviceArray(100)
    with pytest.raises(ValueError, match="entries 0 and 2 of the batch overlap"):
        await copy_batch(0, [plain, plain, frame[2:4, 3:8]], [host[:100], host[100:200], host[99:109].reshape(2, 5)])
    await copy_batch(0, [plain, plain, frame[2:4, 3:8]], [host[:100], host[100:200], host[200:210].reshape(2, 5)])


async def test_overlaps_that_are_looked_for_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copy_batch, "_MOST_SORTED_ON_LOOP", 0)
    plain, host = DeviceArray.from_numpy(pattern(100)), np.zeros(1000, np.uint8)
    async with Copier() as copier:
        await copier.copy_batch(0, [plain] * 3, [host[500:600], host[:100], host[250:350]])
        assert np.array_equal(host[250:350], pattern(100))
        with pytest.raises(ValueError, match="entries 0 and 2 of the batch overlap"):
            await copier.copy_batch(0, [plain] * 3, [host[500:600], host[:100], host[450:550]])
        assert copier.stats().submitted == 1


async def test_what_becomes_of_the_lists_meanwhile_is_no_matter() -> None:
    device, host = DeviceArray.from_numpy(pattern(300)), np.zeros(300, np.uint8)
    srcs: list[Any] = [device[100 * k : 100 * k + 100] for k in range(3)]
    dsts = [host[100 * k : 100 * k + 100] for k in range(3)]

    class Sly:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            srcs.clear()
            dsts.append(host)
            return device[100:200].__cuda_array_interface__

    srcs[1] = Sly()
    await copy_batch(0, srcs, dsts)
    assert not srcs
    assert np.array_equal(host, pattern(300))


class Running:
    """An array that runs something while it is asked where it is."""

    def __init__(self, array: DeviceArray, run: Callable[[], None]) -> None:
        self.array, self.run = array, run

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.run()
        found: dict[str, Any] = self.array.__cuda_array_interface__
        return found


async def test_a_copier_that_is_closed_while_objects_are_looked_at(emulated_gpu: Emulator) -> None:
    """It waits for the batch, which is not submitted yet."""
    device, waits = DeviceArray.from_numpy(np.zeros(NBYTES, np.uint8)), []
    copier = Copier()

    def close() -> None:
        closing = copier.aclose()
        try:
            closing.send(None)
        except StopIteration:
            waits.append(False)
        else:
            waits.append(True)
            closing.close()

    await copier.copy_batch(0, [pattern(NBYTES, 1)], [Running(device, close)])
    assert waits
    assert all(waits)
    assert np.array_equal(device.to_numpy(), pattern(NBYTES, 1))


async def test_a_size_that_no_memory_has(emulated_gpu: Emulator) -> None:
    """Its bytes, counted in 64 bits, would be eight."""
    device = DeviceArray(64)

    class Vast:
        __cuda_array_interface__ = {  # noqa: RUF012
            "data": (device.ptr, False), "shape": (2**61 + 1,), "typestr": "<f8", "strides": (8,), "version": 3,
        }  # fmt: skip

    with pytest.raises(ValueError, match="entry 0 of the batch"):
        await copy_batch(0, [np.ones(8, np.uint8)], [Vast()])


class Slow:
    """An array that takes a while to say where it is."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        end = time.perf_counter() + 5e-5
        while time.perf_counter() < end:
            pass
        found: dict[str, Any] = self.array.__cuda_array_interface__
        return found


@pytest.mark.parametrize("n", [200, 1000])
async def test_the_loop_gets_its_turns_while_objects_take_long(n: int) -> None:
    device, host = DeviceArray.from_numpy(pattern(n, 3)), np.zeros(n, np.uint8)
    turns, ended = 0, False

    async def run() -> None:
        nonlocal ended
        await copy_batch(0, [Slow(device[k : k + 1]) for k in range(n)], [host[k : k + 1] for k in range(n)])
        ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        while not ended:
            await anyio.lowlevel.checkpoint()
            turns += 1
    assert np.array_equal(host, pattern(n, 3))
    # They take 50 us each, and a turn is over after two of the steps that are of 800 at most.
    assert turns > n * 50 // 1600
