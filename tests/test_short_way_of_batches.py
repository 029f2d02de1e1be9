"""Which batches of numbers take the short way, and that those that take it are whole: order, owners, errors."""

from __future__ import annotations

import array
import gc
import weakref
from typing import Any

import anyio
import numpy as np
import pytest
from calls import Stream, nothing_held, turns, until
from cuda.bindings import driver
from kinds import Managed, check, context_of, need_two_devices, one_loop, pattern, stream_of

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


class Claims:
    """What another library says of memory that it may have lost."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.interface = {"version": 3, "data": (ptr, False), "shape": (nbytes,), "typestr": "|u1"}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface


@one_loop
@pytest.mark.parametrize(
    ("claims", "message"),
    [
        (
            lambda device, pinned: Claims(1 << 40, N * NBYTES),
            "claims device memory at .* which the driver does not know",
        ),
        (lambda device, pinned: Claims(pinned.ctypes.data, N * NBYTES), "claims device memory .* page-locked"),
        (lambda device, pinned: Claims(device.ptr, 1 << 40), "claims 1099511627776 bytes"),
    ],
    ids=["freed", "page-locked", "too long"],
)
async def test_what_a_base_claims_is_looked_up(ways: Ways, claims: Any, message: str) -> None:
    device, pinned = device_array(), pinned_empty(N * NBYTES)
    base = claims(device, pinned)
    for srcs, dsts in (
        (Blocks(base, OFFSETS), Blocks(device, OFFSETS)),
        (Blocks(pinned, OFFSETS), Blocks(base, OFFSETS)),
    ):
        with pytest.raises(ValueError, match=message):
            await copy_batch(0, srcs, dsts, sizes=NBYTES)
    assert ways.long == 2


async def test_a_base_stays_when_its_blocks_get_another_one(emulated_gpu: Emulator, ways: Ways) -> None:
    device, host = device_array(), np.zeros(N * NBYTES, np.uint8)
    dead, blocks = weakref.ref(device), Blocks(device, OFFSETS)
    del device
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: copy_batch(stream, blocks, Blocks(host, OFFSETS), sizes=NBYTES))
            await until(lambda: len(emulated_gpu.pending(stream)) == 2)
            blocks.base = None
            gc.collect()
            assert dead() is not None
            emulated_gpu.release(stream)
    assert np.array_equal(host.reshape(N, NBYTES), ROWS)


async def test_the_legacy_streams_of_both_devices_and_contexts_are_waited_for(emulated_gpu: Emulator) -> None:
    need_two_devices()
    source, far, near = device_array(), DeviceArray(N * NBYTES, device=1), DeviceArray(N * NBYTES)
    with context_of(0):
        context = check(driver.cuCtxCreate(None, 0, 0))
        other = int(check(driver.cuMemAlloc(N * NBYTES)))
        check(driver.cuCtxPopCurrent())
    for current, srcs, dsts in (
        (None, Blocks(source, OFFSETS), at(far.ptr)),
        (context, Blocks(Claims(other, N * NBYTES), OFFSETS), Blocks(near, OFFSETS)),
    ):
        done = []

        async def copy(srcs: Any = srcs, dsts: Any = dsts, done: list[bool] = done) -> None:
            await copy_batch(0, srcs, dsts, sizes=NBYTES)
            done.append(True)

        with context_of(0):
            if current is not None:
                check(driver.cuCtxPushCurrent(current))
            emulated_gpu.hold(0)
            emulated_gpu.kernel(0)
            async with anyio.create_task_group() as group:
                group.start_soon(copy)
                await until(lambda: len(emulated_gpu.pending(0)) == 2)
                await turns(20)
                assert not done
                emulated_gpu.release(0)
            if current is not None:
                check(driver.cuCtxPopCurrent())
    check(driver.cuMemFree(other))
    check(driver.cuCtxDestroy(context))


@one_loop
@pytest.mark.parametrize("srcs", [None, np.array(1, np.uint64), array.array("Q", [4096])], ids=["none", "0-d", "array"])
async def test_the_side_that_is_no_numbers_is_named(ways: Ways, srcs: Any) -> None:
    with pytest.raises(TypeError, match="srcs must be Blocks or a uint64 buffer of addresses"):
        await copy_batch(0, srcs, Blocks(np.zeros(64, np.uint8), np.zeros(1, np.int64)), sizes=8)


@one_loop
async def test_few_numbers_in_any_order_need_no_thread(monkeypatch: pytest.MonkeyPatch, ways: Ways) -> None:
    monkeypatch.setattr(_copy_batch, "run_to_end", lambda *_: pytest.fail("a thread"))
    hosts = [pinned_empty(NBYTES) for _ in range(4)]
    sources = np.array([host.ctypes.data for host in hosts], np.uint64)
    target = DeviceArray(4096)
    await copy_batch(0, sources, Blocks(target, np.array([300, 0, 900, 600])), sizes=np.array([10, 20, 30, 40]))
    assert ways.long == 0


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
        far = DeviceArray(N * NBYTES, device=1)
        with pytest.raises(ValueError, match="the arrays are on device 0, but this copier is for device 1"):
            await copier.copy_batch(0, Blocks(device_array(), OFFSETS), at(far.ptr), sizes=NBYTES)
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
