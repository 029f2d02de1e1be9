"""Which batches of numbers take the short way, and that those that take it are whole: order, owners, errors."""

from __future__ import annotations

import weakref
from typing import Any

import anyio
import numpy as np
import pytest
from calls import Stream, nothing_held, until
from kinds import Managed, need_two_devices, one_loop, pattern, stream_of

from aiocuda_copy import Blocks, Copier, _copy_batch, copy_batch, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator

pytestmark = pytest.mark.emulated_only

N, NBYTES = 40, 64
INDEX = np.random.default_rng(5).permutation(N)
OFFSETS = INDEX * NBYTES


class Ways:
    """Counts who took the long way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.long = 0
        plan_blocks = _copy_batch.plan_blocks

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.long += 1
            return plan_blocks(*args, **kwargs)

        monkeypatch.setattr(_copy_batch, "plan_blocks", counted)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


def device_array() -> DeviceArray:
    return DeviceArray.from_numpy(pattern(N * NBYTES))


def at(base: int) -> np.ndarray:
    return np.uint64(base) + OFFSETS.astype(np.uint64)


ROWS = pattern(N * NBYTES).reshape(N, NBYTES)
SCATTERED = np.empty_like(ROWS)
SCATTERED[INDEX] = ROWS


@one_loop
@pytest.mark.parametrize("sizes", [NBYTES, np.full(N, NBYTES, np.uint64), np.full(N, NBYTES)], ids=["one", "u8", "i8"])
@pytest.mark.parametrize("make", [bytearray, pinned_empty, lambda n: memoryview(bytearray(n))])
async def test_plain_batches_take_it(ways: Ways, make: Any, sizes: Any) -> None:
    device, host, back = device_array(), make(N * NBYTES), DeviceArray(N * NBYTES)
    in_order = np.arange(N) * NBYTES
    await copy_batch(0, Blocks(device, in_order), Blocks(host, OFFSETS), sizes=sizes)
    assert np.array_equal(np.asarray(host).reshape(N, NBYTES), SCATTERED)
    await copy_batch(None, Blocks(host, OFFSETS), Blocks(back, in_order.astype(np.uint64)), sizes=sizes)
    assert np.array_equal(back.to_numpy().reshape(N, NBYTES), ROWS)
    await copy_batch(0, Blocks(back, in_order), Blocks(device, OFFSETS), sizes=sizes)
    assert np.array_equal(device.to_numpy().reshape(N, NBYTES), SCATTERED)
    assert ways.long == 0


@one_loop
async def test_addresses_take_it(ways: Ways) -> None:
    device, host = device_array(), np.zeros(N * NBYTES, np.uint8)
    in_order = np.arange(N, dtype=np.uint64) * np.uint64(NBYTES)
    await copy_batch(0, device.ptr + in_order, at(host.ctypes.data), sizes=NBYTES)
    await copy_batch(0, device.ptr + in_order, Blocks(host, OFFSETS), sizes=NBYTES)
    assert np.array_equal(host.reshape(N, NBYTES), SCATTERED)
    assert ways.long == 0


def negative(sizes: np.ndarray) -> np.ndarray:
    sizes[3] = -1
    return sizes


@one_loop
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda a: a.update(sizes=negative(np.full(N, NBYTES))), ValueError),
        (lambda a: a.update(sizes=np.full(N, NBYTES, np.float64)), TypeError),
        (lambda a: a.update(sizes=np.full(N - 1, NBYTES, np.uint64)), ValueError),
        (lambda a: a.update(sizes=True), TypeError),
        (lambda a: a.update(sizes=-1), ValueError),
        (lambda a: a.update(sizes=2**64), ValueError),
        (lambda a: a.update(sizes=0), None),
        (lambda a: a.update(in_stream=True), ValueError),
        (lambda a: a.update(stream=-1), ValueError),
        (lambda a: a.update(dsts=Blocks(a["dsts"].base, OFFSETS // 2)), ValueError),  # which overlap
        (lambda a: a.update(dsts=Blocks(a["dsts"].base, OFFSETS - NBYTES)), ValueError),
        (lambda a: a.update(dsts=Blocks(a["dsts"].base, OFFSETS[1:])), ValueError),
        (lambda a: a.update(dsts=Blocks(b"x" * N * NBYTES, OFFSETS)), ValueError),
        (lambda a: a.update(dsts=Blocks(np.zeros((N, 2 * NBYTES), np.uint8)[:, ::2], OFFSETS)), ValueError),
        (lambda a: a.update(dsts=at(a["dsts"].base.ctypes.data).astype(np.int64)), TypeError),
        (lambda a: a.update(srcs=Blocks(np.zeros(N * NBYTES), OFFSETS)), ValueError),  # from host to host
        (lambda a: a.update(srcs=Blocks(Managed(N * NBYTES), OFFSETS)), None),
    ],
)  # fmt: skip
async def test_what_is_not_plain_takes_the_long_way(ways: Ways, change: Any, error: Any) -> None:
    arguments: dict[str, Any] = {
        "stream": 0,
        "srcs": Blocks(device_array(), OFFSETS),
        "dsts": Blocks(np.zeros(N * NBYTES, np.uint8), OFFSETS),
        "sizes": NBYTES,
    }
    change(arguments)
    if error is None:
        await copy_batch(**arguments)
    else:
        with pytest.raises(error):
            await copy_batch(**arguments)
    assert ways.long == (arguments["stream"] != -1)


async def test_the_order_of_the_stream(emulated_gpu: Emulator, ways: Ways) -> None:
    device, host = device_array(), np.zeros(N * NBYTES, np.uint8)
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: copy_batch(stream, Blocks(device, OFFSETS), Blocks(host, OFFSETS), sizes=NBYTES))
            await until(lambda: len(emulated_gpu.pending(stream)) == 2)
            assert not host.any()
            emulated_gpu.release(stream)
    assert np.array_equal(host.reshape(N, NBYTES), ROWS)
    assert ways.long == 0


async def test_the_stream_that_a_base_names_is_for_the_long_way(ways: Ways) -> None:
    class Named:
        def __init__(self, base: DeviceArray, stream: int) -> None:
            self.base = base
            self.__cuda_array_interface__ = base.__cuda_array_interface__ | {"stream": stream}

    host = np.zeros(N * NBYTES, np.uint8)
    with stream_of(0) as stream:
        await copy_batch(0, Blocks(Named(device_array(), stream), OFFSETS), Blocks(host, OFFSETS), sizes=NBYTES)
    assert np.array_equal(host.reshape(N, NBYTES), ROWS)
    assert ways.long == 1


async def test_arrays_of_two_devices_are_for_the_long_way(ways: Ways) -> None:
    need_two_devices()
    source, target = device_array(), DeviceArray(N * NBYTES, device=1)
    await copy_batch(0, Blocks(source, OFFSETS), Blocks(target, OFFSETS), sizes=NBYTES)
    assert np.array_equal(target.to_numpy().reshape(N, NBYTES), ROWS)
    assert ways.long == 1


async def test_a_copier_of_another_device_refuses(ways: Ways) -> None:
    need_two_devices()
    host = np.zeros(N * NBYTES, np.uint8)
    async with Copier(device=1) as copier:
        with pytest.raises(ValueError, match="the arrays are on device 0, but this copier is for device 1"):
            await copier.copy_batch(0, Blocks(device_array(), OFFSETS), Blocks(host, OFFSETS), sizes=NBYTES)
        assert copier.stats().submitted == 0


async def test_overlaps_of_addresses_only_where_they_are_asked_for(ways: Ways) -> None:
    device, host = device_array(), np.zeros(N * NBYTES, np.uint8)
    same = np.full(N, host.ctypes.data, np.uint64)
    await copy_batch(0, at(device.ptr), same, sizes=NBYTES)
    assert ways.long == 0
    async with Copier(check_overlap=True) as copier:
        with pytest.raises(ValueError, match="entries 0 and 1 of the batch overlap"):
            await copier.copy_batch(0, at(device.ptr), same, sizes=NBYTES)


async def test_a_stream_under_capture_is_refused(emulated_gpu: Emulator, ways: Ways) -> None:
    from cuda.bindings import driver

    host = np.zeros(N * NBYTES, np.uint8)
    with stream_of(0) as stream:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        assert int(driver.cuStreamBeginCapture(stream, mode)[0]) == 0
        with pytest.raises(RuntimeError, match="under capture"):
            await copy_batch(stream, Blocks(device_array(), OFFSETS), Blocks(host, OFFSETS), sizes=NBYTES)
        assert int(driver.cuStreamEndCapture(stream)[0]) == 0


async def test_owners_are_held_until_the_end_and_no_longer(emulated_gpu: Emulator, ways: Ways) -> None:
    device, host, numbers = device_array(), bytearray(N * NBYTES), bytearray(OFFSETS.tobytes())
    stream = Stream()
    handle, dead = stream.handle, [weakref.ref(device), weakref.ref(stream)]
    emulated_gpu.hold(handle)
    emulated_gpu.kernel(handle)
    arguments = [stream, Blocks(device, OFFSETS), Blocks(host, memoryview(numbers).cast("q"))]
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: copy_batch(*(arguments.pop(0) for _ in range(3)), sizes=NBYTES))
        await until(lambda: len(emulated_gpu.pending(handle)) == 2)
        del device, stream
        assert None not in [one() for one in dead]
        with pytest.raises(BufferError):
            host.append(0)
        emulated_gpu.release(handle)
    await nothing_held()
    assert [one() for one in dead] == [None, None]
    assert np.array_equal(np.frombuffer(host, np.uint8).reshape(N, NBYTES), ROWS)
    host.append(0)
    assert ways.long == 0


async def test_a_cancelled_one_lets_go(emulated_gpu: Emulator, ways: Ways) -> None:
    device, host = device_array(), bytearray(N * NBYTES)
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: copy_batch(stream, Blocks(device, OFFSETS), Blocks(host, OFFSETS), sizes=NBYTES))
            await until(lambda: len(emulated_gpu.pending(stream)) == 2)
            group.cancel_scope.cancel()
        host.append(0)
        emulated_gpu.release(stream)
    assert not any(host)


@one_loop
async def test_what_takes_long_to_look_at_is_left_to_a_thread_at_once(
    monkeypatch: pytest.MonkeyPatch, ways: Ways
) -> None:
    held: list[float] = []
    add_to = _copy_batch.add_to

    def watched(*args: Any, **options: Any) -> Any:
        held.append(options.get("seconds", 3600))
        return add_to(*args, **options)

    monkeypatch.setattr(_copy_batch, "add_to", watched)
    n = 60_000
    device, host = DeviceArray(16 * n), np.zeros(16 * n, np.uint8)
    # Neither in order nor, by one byte, on a grid.
    into = np.random.default_rng(2).permutation(n) * 16
    into[0] += 1
    await copy_batch(0, Blocks(device, np.arange(n) * 16), Blocks(host, into), sizes=8)
    assert ways.long == 1
    assert held == [0.0, 3600]
