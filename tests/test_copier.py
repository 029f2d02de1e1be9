"""Copier: its options, its counters, its quotas, and its end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from calls import nothing_held
from kinds import context_of, need_two_devices, one_loop, pattern, stream_of

from aiocuda_copy import ClosedError, Copier, CudaError, copy_to_host, pinned_empty
from aiocuda_copy.testing import DeviceArray


@asynccontextmanager
async def held_stream(emulator: Any) -> AsyncIterator[int]:
    with stream_of(0) as stream:
        emulator.hold(stream)
        emulator.kernel(stream)
        yield stream


# Options.

NUMBERS = ("device", "slots", "slot_nbytes", "workers", "kernel_blocks", "pinned_limit_nbytes")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": -1}, ValueError, "device"),
        ({"device": "0"}, TypeError, "device"),
        ({"device": True}, TypeError, "device"),
        ({"device": 0.0}, TypeError, "device"),
        ({"slots": 0}, ValueError, "slots"),
        ({"slots": 1.5}, TypeError, "slots"),
        ({"kernel_blocks": 0}, ValueError, "kernel_blocks must be at least 1"),
        ({"kernel_blocks": 1025}, ValueError, "kernel_blocks must be at most 1024"),
        ({"kernel_blocks": "all"}, TypeError, "kernel_blocks"),
        ({"slot_nbytes": 0}, ValueError, "slot_nbytes"),
        ({"slot_nbytes": 4095}, ValueError, "slot_nbytes"),
        ({"slot_nbytes": 5000}, ValueError, "multiple of 4096"),
        ({"workers": 0}, ValueError, "workers"),
        ({"workers": "all"}, TypeError, "workers"),
        ({"pinned_limit_nbytes": -1}, ValueError, "pinned_limit_nbytes"),
        ({"pinned_limit_nbytes": 1e9}, TypeError, "pinned_limit_nbytes"),
        ({"completion": "callback"}, ValueError, "completion"),
        ({"completion": None}, ValueError, "completion"),
        ({"colour": 1}, TypeError, "colour"),
        *(({name: 2**70}, ValueError, f"{name} must be at most") for name in NUMBERS),
    ],
    ids=repr,
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Copier(**options)
    with pytest.raises(TypeError):
        Copier(0, 4)  # type: ignore[misc]


async def test_a_device_that_does_not_exist() -> None:
    async with Copier(device=100) as copier:
        with pytest.raises(ValueError, match=r"on device 0.*for device 100"):
            await copier.copy_to_host(DeviceArray(10))


async def test_numpy_integers_are_integers() -> None:
    async with Copier(device=np.int64(0), slots=np.int32(2), slot_nbytes=np.uint32(8192)) as copier:
        assert np.array_equal(await copier.copy_to_host(DeviceArray.from_numpy(pattern(10))), pattern(10))


@pytest.mark.parametrize("completion", ["host_function", "flag"])
@pytest.mark.parametrize("inline", [True, False])
async def test_all_modes_copy(emulated_gpu: Any, completion: Any, inline: bool) -> None:
    async with Copier(completion=completion, inline=inline) as copier:
        for nbytes in (100, 100_000):
            device, host = DeviceArray.from_numpy(pattern(nbytes)), np.zeros(nbytes, np.uint8)
            await copier.copy_to_host(device, host)
            assert np.array_equal(host, pattern(nbytes))
            host.fill(0)
            async with held_stream(emulated_gpu) as stream, anyio.create_task_group() as group:
                group.start_soon(lambda s=stream, d=device, h=host: copier.copy_to_host(d, h, stream=s))
                await anyio.lowlevel.checkpoint()
                emulated_gpu.release(stream)
            assert np.array_equal(host, pattern(nbytes))
        stats = copier.stats()
        assert (stats.submitted, stats.completed, stats.in_flight) == (4, 4, 0)
        assert stats.inline_completions + stats.parked_completions == 4
        if not inline:
            assert stats.inline_completions == 0


async def test_a_stream_that_takes_long_is_hinted_by_a_host_function_only_if_asked(emulated_gpu: Any) -> None:
    device, host = DeviceArray(100_000), np.zeros(100_000, np.uint8)
    for completion in ("flag", "host_function"):
        async with Copier(completion=completion) as copier, held_stream(emulated_gpu) as stream:
            emulated_gpu.reset()
            emulated_gpu.hold(stream)
            emulated_gpu.kernel(stream)
            async with anyio.create_task_group() as group:
                group.start_soon(lambda s=stream, c=copier: c.copy_to_host(device, host, stream=s))
                if completion == "host_function":
                    with anyio.fail_after(10):
                        while not emulated_gpu.calls("cuLaunchHostFunc"):
                            await anyio.lowlevel.checkpoint()
                else:
                    for _ in range(20):
                        queries = emulated_gpu.calls("cuEventQuery")
                        with anyio.fail_after(10):
                            while emulated_gpu.calls("cuEventQuery") == queries:
                                await anyio.lowlevel.checkpoint()
                emulated_gpu.release(stream)
            if completion == "flag":
                assert emulated_gpu.calls("cuLaunchHostFunc") == 0


# Counters.


async def test_counters_by_path() -> None:
    nbytes = 100_000
    device, other = DeviceArray(nbytes), DeviceArray(nbytes)
    pageable, page_locked = np.zeros(nbytes, np.uint8), pinned_empty(nbytes)
    async with Copier() as copier:
        before = copier.stats()
        assert (before.submitted, before.nbytes_staged, before.slots_in_use, before.worker_busy_seconds) == (0, 0, 0, 0)
        await copier.copy_to_host(device, pageable)
        await copier.copy_to_device(pageable, device)
        assert copier.stats().nbytes_staged == 2 * nbytes
        await copier.copy_to_host(device, page_locked)
        await copier.copy_to_device(page_locked, device)
        await copier.copy_to_host(device)
        assert copier.stats().nbytes_direct == 3 * nbytes
        await copier.copy_to_device(other, device)
        assert copier.stats().nbytes_between_devices == nbytes
        await copier.copy_to_host(device[:100], page_locked[:100])
        await copier.copy_to_device(bytes(50), device[:50])
        assert copier.stats().nbytes_small == 150
        await copier.copy_to_host(device, page_locked, in_stream=True)
        assert copier.stats().nbytes_in_stream == nbytes
        await copier.copy_batch(0, [device, other], [pageable, page_locked])
        await copier.synchronize(0)
        stats = copier.stats()
        assert (stats.nbytes_staged, stats.nbytes_direct, stats.nbytes_small) == (3 * nbytes, 4 * nbytes, 150)
        assert (stats.submitted, stats.completed, stats.failed, stats.cancelled, stats.in_flight) == (11, 11, 0, 0, 0)
        assert stats.inline_completions + stats.parked_completions == 11
        assert stats.worker_busy_seconds > 0
        assert stats.slots_held_nbytes > 0
        assert stats.slots_in_use == 0
        assert Copier().stats().submitted == 0, "each copier has counters of its own"
        with pytest.raises(AttributeError):
            stats.submitted = 3  # type: ignore[misc]


async def test_wrong_arguments_and_empty_copies_are_not_counted() -> None:
    async with Copier() as copier:
        with pytest.raises(ValueError, match="sizes"):
            await copier.copy_to_host(DeviceArray(10), bytearray(11))
        await copier.copy_to_host(DeviceArray(0), bytearray())
        assert copier.stats().submitted == 0


async def test_failures_and_cancellations_are_counted(emulated_gpu: Any) -> None:
    device, host = DeviceArray(100_000), np.zeros(100_000, np.uint8)
    async with Copier() as copier:
        emulated_gpu.fail_call("cuMemcpyDtoHAsync", 1, 1)
        with pytest.raises(CudaError):
            await copier.copy_to_host(device, host)
        assert copier.stats().failed == 1
        async with held_stream(emulated_gpu) as stream:
            with anyio.move_on_after(0) as scope:
                await copier.copy_to_host(device, host, stream=stream)
            assert scope.cancelled_caught
            emulated_gpu.release(stream)
    stats = copier.stats()
    assert (stats.failed, stats.completed, stats.in_flight) == (1, 0, 0)
    assert stats.cancelled == stats.submitted - 1


# Quotas.


def copies_in(emulator: Any) -> int:
    return int(emulator.calls("cuMemcpyDtoHAsync") + emulator.calls("cuMemcpyHtoDAsync"))


@one_loop
@pytest.mark.parametrize("to_host", [True, False], ids=["to host", "to device"])
@pytest.mark.parametrize("slots", [1, 2, 3])
async def test_slots_are_never_exceeded(emulated_gpu: Any, slots: int, to_host: bool) -> None:
    nbytes = 60_000
    data = [pattern(nbytes, k) for k in range(5)]
    devices = [DeviceArray.from_numpy(one) if to_host else DeviceArray(nbytes) for one in data]
    hosts = [np.zeros(nbytes, np.uint8) if to_host else one for one in data]
    async with Copier(slots=slots, slot_nbytes=4096) as copier:
        seen = []
        async with anyio.create_task_group() as group:
            # The library's own streams are held: no piece lands before it is let go.
            emulated_gpu.hold()
            for device, host in zip(devices, hosts, strict=True):
                if to_host:
                    group.start_soon(copier.copy_to_host, device, host)
                else:
                    group.start_soon(copier.copy_to_device, host, device)
            with anyio.fail_after(10):
                while not copies_in(emulated_gpu):
                    await anyio.lowlevel.checkpoint()
            for _ in range(50):
                seen.append(copier.stats().slots_in_use)
                emulated_gpu.settle()
                await anyio.lowlevel.checkpoint()
            assert copier.stats().in_flight == 5
            emulated_gpu.release()
            with anyio.fail_after(10):
                while copier.stats().in_flight:
                    seen.append(copier.stats().slots_in_use)
                    await anyio.lowlevel.checkpoint()
        assert 0 < max(seen) <= slots
        assert copier.stats().slots_in_use == 0
    for device, host, one in zip(devices, hosts, data, strict=True):
        assert np.array_equal(host if to_host else device.to_numpy(), one)


@one_loop
async def test_copiers_do_not_take_each_others_slots(emulated_gpu: Any) -> None:
    nbytes = 100_000
    device = DeviceArray.from_numpy(pattern(nbytes))
    async with Copier(slots=1, slot_nbytes=4096) as narrow, Copier(slots=4, slot_nbytes=4096) as wide:
        hosts = [np.zeros(nbytes, np.uint8) for _ in range(6)]
        async with anyio.create_task_group() as group:
            for copier, host in zip([narrow, wide] * 3, hosts, strict=True):
                group.start_soon(copier.copy_to_host, device, host)
        assert all(np.array_equal(host, pattern(nbytes)) for host in hosts)
        assert narrow.stats().nbytes_staged == wide.stats().nbytes_staged == 3 * nbytes


@one_loop
@pytest.mark.parametrize("workers", [1, 2])
async def test_workers(workers: int) -> None:
    nbytes = 9 << 20
    device, host = DeviceArray.from_numpy(pattern(nbytes)), np.zeros(nbytes, np.uint8)
    async with Copier(workers=workers) as copier:
        await copier.copy_to_host(device, host)
        assert np.array_equal(host, pattern(nbytes))
        assert copier.stats().worker_busy_seconds > 0


@one_loop
@pytest.mark.parametrize("closed", [True, False])
async def test_results_that_outlive_their_copier(emulated_gpu: Any, closed: bool) -> None:
    registered = None
    device = DeviceArray(3 << 20)
    for _ in range(4):
        copier = Copier(pinned_limit_nbytes=16 << 20)
        result = await copier.copy_to_host(device)
        if closed:
            await copier.aclose()
        del copier
        gc.collect()
        result[:] = 1
        held = emulated_gpu.live()["registrations"]
        registered = registered or held
        assert held == registered
        del result


async def test_zero_on_reuse() -> None:
    async with Copier(zero_on_reuse=True, pinned_limit_nbytes=8 << 20) as copier:
        for nbytes in (5000, 3 << 20):
            array = await copier.copy_to_host(DeviceArray.from_numpy(np.full(nbytes, 7, np.uint8)))
            address = array.ctypes.data
            del array
            await nothing_held()
            gc.collect()
            again = copier._pool.empty(nbytes)  # type: ignore[union-attr]
            assert again.ctypes.data == address
            assert not again.any()
            del again


# The end.


@pytest.mark.parametrize("nbytes", [100, 100_000])
async def test_aclose_waits_for_what_is_in_flight(emulated_gpu: Any, nbytes: int) -> None:
    device, host = DeviceArray.from_numpy(pattern(nbytes)), np.zeros(nbytes, np.uint8)
    copier = Copier()
    closed = False

    async def close() -> None:
        nonlocal closed
        await copier.aclose()
        closed = True

    async with held_stream(emulated_gpu) as stream, anyio.create_task_group() as group:
        group.start_soon(lambda: copier.copy_to_host(device, host, stream=stream))
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        group.start_soon(close)
        for _ in range(5):
            # Through the engine behind it, so that it would be done if it did not wait.
            await copy_to_host(DeviceArray(100_000), np.empty(100_000, np.uint8), stream=2)
        assert not closed
        with pytest.raises(ClosedError):
            await copier.copy_to_host(device, host)
        emulated_gpu.release(stream)
    assert closed
    assert np.array_equal(host, pattern(nbytes))
    stats = copier.stats()
    assert (stats.submitted, stats.completed, stats.in_flight) == (1, 1, 0), "the copy, and not the wait for it"


async def test_aclose_waits_for_a_call_whose_pool_grows(emulated_gpu: Any) -> None:
    device = DeviceArray.from_numpy(pattern(3 << 20))
    copier = Copier(pinned_limit_nbytes=8 << 20)
    found: list[Any] = []
    closed = anyio.Event()

    async def copy() -> None:
        found.append(await copier.copy_to_host(device))

    async def close() -> None:
        await copier.aclose()
        closed.set()

    emulated_gpu.hold_pinning()
    async with anyio.create_task_group() as group:
        group.start_soon(copy)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        group.start_soon(close)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        assert not closed.is_set()
        emulated_gpu.release_pinning()
        await closed.wait()
        assert np.array_equal(found[0], pattern(3 << 20))


@pytest.mark.parametrize("new", [True, False])
def test_aclose_does_not_wait_for_a_loop_that_is_closed(emulated_gpu: Any, new: bool) -> None:
    """Whose calls go no further, also where somebody still has their tasks."""
    copier, device = Copier(), DeviceArray.from_numpy(pattern(1 << 20))
    tasks = []

    async def begin(stream: int) -> None:
        call = copier.copy_to_host(device, stream=stream)
        if not new:
            call.close()
            call = copier.copy_batch(stream, [device], [pinned_empty(1 << 20)], in_stream=True)
        tasks.append(asyncio.ensure_future(call))
        await asyncio.sleep(0.01)  # by then it waits, for memory or for the stream; either will do

    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin(stream))
        loop.close()
        emulated_gpu.release(stream)
        asyncio.run(asyncio.wait_for(copier.aclose(), 30))
    assert copier.stats().in_flight == 0
    tasks[0]._log_destroy_pending = False


async def test_aclose_waits_on_every_device(emulated_gpu: Any) -> None:
    need_two_devices()
    device, host = DeviceArray.from_numpy(pattern(100), device=1), np.zeros(100, np.uint8)
    copier = Copier(device=1)
    with stream_of(1) as stream:
        async with anyio.create_task_group() as group:
            with context_of(1):
                emulated_gpu.hold(stream)
                emulated_gpu.kernel(stream)
            group.start_soon(lambda: copier.copy_to_host(device, host, stream=stream))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            # A cancelled aclose returns, and what was in flight still is.
            async with anyio.create_task_group() as impatient:
                impatient.start_soon(copier.aclose)
                for _ in range(5):
                    await anyio.lowlevel.checkpoint()
                    await copy_to_host(DeviceArray(100_000, device=1), np.empty(100_000, np.uint8), stream=2)
                impatient.cancel_scope.cancel()
            assert copier.stats().in_flight
            emulated_gpu.release(stream)
            await copier.aclose()
    assert np.array_equal(host, pattern(100))


async def test_async_with_closes_and_frees() -> None:
    async with Copier(slot_nbytes=1 << 20, pinned_limit_nbytes=8 << 20) as copier:
        found = await copier.copy_to_host(DeviceArray(3 << 20))
        await copier.copy_to_host(DeviceArray(3 << 20), np.empty(3 << 20, np.uint8))
        assert copier.stats().pinned_held_nbytes > 0
        held = copier.stats().slots_held_nbytes
        del found
        gc.collect()
    assert copier.stats().pinned_held_nbytes == 0
    assert copier.stats().slots_held_nbytes < held
    with pytest.raises(ClosedError):
        await copier.copy_to_host(DeviceArray(10))


async def test_an_unused_copier_makes_no_driver_call(emulated_gpu: Any) -> None:
    before = emulated_gpu.calls()
    async with Copier(slots=3) as copier:
        copier.stats()
    assert emulated_gpu.calls() == before
