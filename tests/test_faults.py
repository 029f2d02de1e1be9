"""Each await has one outcome, whatever the device and the driver do: never a hang, never a success that was none."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from calls import (
    BULK,
    FEW_WAYS,
    SMALL,
    WAYS,
    Stream,
    Way,
    calls,
    check,
    content,
    forget_the_kernel,
    nothing_held,
    on_device,
    one_loop,
    pinned_array,
    streams_with,
    turns,
    until,
)
from cuda.bindings import driver
from kinds import context_of

from aiocuda_copy import (
    Copier,
    CudaError,
    collect,
    copy_batch,
    copy_to_device,
    copy_to_host,
    pinned_empty,
    synchronize,
)
from aiocuda_copy._copies import _default_copier
from aiocuda_copy._native import leaked_owners
from aiocuda_copy.testing import DeviceArray, Emulator

ILLEGAL_ADDRESS = 700


async def fails(coroutine: Any, code: int = ILLEGAL_ADDRESS) -> None:
    try:
        await coroutine
    except CudaError as exc:
        assert exc.code == code  # noqa: PT017 - what pytest.raises raises is no Exception, which anyio does not expect
    else:
        raise AssertionError("no CudaError")


REAL_FAULT = """
import asyncio
import numpy as np
from aiocuda_copy import CudaError, _driver, copy_to_host
from aiocuda_copy.cli import _raw
from aiocuda_copy.testing import DeviceArray

async def main():
    _driver.ensure()
    stream, device = _raw.Stream(), DeviceArray(1 << 26)
    kernels = _raw.Kernels()
    stream.launch(kernels.spin, 200_000_000)
    stream.launch(kernels.read, 1 << 20, 1 << 20, blocks=64, threads=64)  # of memory that there is not
    copies = [copy_to_host(device[:n], np.empty(n, np.uint8), stream=stream) for n in (4, 1 << 26)]
    for outcome in await asyncio.wait_for(asyncio.gather(*copies, return_exceptions=True), 30):
        assert isinstance(outcome, CudaError), outcome
        assert outcome.sticky
        print(outcome.name)

asyncio.run(main())
"""


@pytest.mark.real_gpu
def test_a_fault_of_a_real_device() -> None:
    environment = {**os.environ, "AIOCUDA_COPY_DRIVER": "real"}
    command = [sys.executable, "-c", REAL_FAULT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=environment)
    assert done.stdout == "CUDA_ERROR_ILLEGAL_ADDRESS\n" * 2, done.stdout + done.stderr


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_a_fault_behind_which_a_copy_waits(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    failed = _default_copier().stats().failed
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    emulated_gpu.fail_operation("kernel")
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        waiting = start(synchronize(stream))
        await turns()
        emulated_gpu.release(stream)
        begin = time.monotonic()
        await call.end()
        assert time.monotonic() - begin < 1.0
        assert isinstance(call.error, CudaError)
        assert (call.error.code, call.error.name) == (ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS")
        assert call.error.sticky
        await fails(waiting.result())
        # From now on every call says so.
        await fails(way.copy(src, dst, stream))
        await fails(synchronize(stream))
    emulated_gpu.reset()
    assert (content(dst) == 2).all()
    assert _default_copier().stats().failed >= failed + 2
    await way.copy(src, dst, stream)
    assert (content(dst) == 1).all()


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_a_fault_with_a_piece_in_flight(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    kept = len(leaked_owners)
    emulated_gpu.hold()
    emulated_gpu.release(stream)
    async with calls() as start:
        call = start(way.copy(src, dst, stream))
        await until(lambda: bool(streams_with(emulated_gpu, "copy")))
        waiting = start(synchronize(stream))
        await turns()
        emulated_gpu.fault()
        await fails(call.result())
        await fails(waiting.result())
        del call
    emulated_gpu.reset()
    # What the device was working on belongs to nobody else for good, on every road that it was sent; of those that the
    # await did not wait for one hears later.
    await until(lambda: len(leaked_owners) > kept)
    assert len(leaked_owners) - kept <= 3
    src, dst = way.memory(3, 4)
    await way.copy(src, dst, stream)
    assert (content(dst) == 3).all()


async def test_what_waited_is_let_go_after_a_fault(emulated_gpu: Emulator) -> None:
    stream = Stream()
    before, kept = emulated_gpu.live()["device_allocations"], len(leaked_owners)
    src = on_device(BULK, 1)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(src, bytearray(BULK), stream=stream))
        await turns()
        emulated_gpu.fault()
        await fails(call.result())
        del call
    assert len(leaked_owners) == kept
    emulated_gpu.reset()
    del src
    gc.collect()
    assert emulated_gpu.live()["device_allocations"] == before


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_fault_under_a_copy_in_the_stream(emulated_gpu: Emulator, cancelled: bool) -> None:
    stream = Stream()
    src, dst = on_device(BULK, 1), pinned_array(BULK, 2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=stream, in_stream=True))
        await turns()
        if cancelled:
            call.cancel()
            await turns()
            assert not call.ended
        emulated_gpu.fault()
        await call.end()
        assert call.cancelled if cancelled else isinstance(call.error, CudaError)
    assert any(dst is owner for owners in leaked_owners for owner in owners)


async def test_a_fault_while_aclose_waits(emulated_gpu: Emulator) -> None:
    stream = Stream()
    copier = Copier()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copier.copy_to_host(on_device(SMALL, 1), bytearray(SMALL), stream=stream))
        await turns()
        closing = start(copier.aclose())
        await turns()
        assert not closing.ended
        emulated_gpu.fault()
        await fails(call.result())
        await closing.end()
        assert not closing.cancelled
    emulated_gpu.reset()
    assert copier.stats().in_flight == 0


async def test_a_fault_of_another_device(emulated_gpu: Emulator) -> None:
    stream = Stream()
    elsewhere = DeviceArray(SMALL, device=1)
    await copy_to_host(elsewhere, bytearray(SMALL), stream=None)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    src, dst = on_device(SMALL, 1), bytearray(SMALL)
    async with calls() as start:
        call = start(copy_to_host(src, dst, stream=stream))
        await turns()
        emulated_gpu.fault(1)
        await fails(copy_to_host(elsewhere, bytearray(SMALL), stream=None))
        emulated_gpu.release(stream)
        await call.result()
    assert dst == bytes([1]) * SMALL
    emulated_gpu.reset()


@pytest.mark.parametrize("completion", ["host_function", "flag"])
@pytest.mark.parametrize("trouble", ["dropped", "stalled"])
async def test_completion_does_not_hang_on_host_functions(
    emulated_gpu: Emulator, completion: Any, trouble: str
) -> None:
    stream = Stream()
    emulated_gpu.hold(stream)
    if trouble == "dropped":
        emulated_gpu.drop_host_functions(1000)
    else:
        emulated_gpu.stall_host_functions()
    async with Copier(completion=completion) as copier, calls() as start:
        for way in WAYS:
            src, dst = way.memory(1, 2)
            emulated_gpu.kernel(stream)
            if way.name.startswith("batch"):
                call = start(copier.copy_batch(stream, [src], [dst]))
            elif way.to_host:
                call = start(copier.copy_to_host(src, dst, stream=stream))
            else:
                call = start(copier.copy_to_device(src, dst, stream=stream))
            # Long enough for the engine to ask the driver for a call.
            await until(lambda: completion == "flag" or emulated_gpu.calls("cuLaunchHostFunc") > 0)
            await turns()
            emulated_gpu.step(stream, 2)
            await call.result()
            assert (content(dst) == 1).all()
        if completion == "flag":
            assert emulated_gpu.calls("cuLaunchHostFunc") == 0


async def test_a_stalled_host_function_delays_no_copy_on_an_idle_stream(emulated_gpu: Emulator) -> None:
    emulated_gpu.stall_host_functions()
    stream = Stream()
    for way in WAYS:
        src, dst = way.memory(1, 2)
        await way.copy(src, dst, stream)
        assert (content(dst) == 1).all()


ENTRY_POINTS = (
    "cuPointerGetAttributes",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamGetFlags",
    "cuStreamGetCtx",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
    "cuStreamWriteValue32",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuMemHostRegister",
    "cuLaunchHostFunc",
    "cuCtxPushCurrent",
)


@one_loop
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize(("busy", "code"), [(False, 2), (True, 400)])
async def test_any_call_may_fail(emulated_gpu: Emulator, entry_point: str, busy: bool, code: int) -> None:
    stream = Stream()
    for way in FEW_WAYS:
        for nth in (1,) if busy else (1, 2):
            src, dst = way.memory(1, 2)
            if busy:
                emulated_gpu.hold(stream)
                emulated_gpu.kernel(stream)
            emulated_gpu.fail_call(entry_point, nth, code)
            async with calls() as start:
                call = start(way.copy(src, dst, stream))
                await turns()
                emulated_gpu.release(stream)
                await call.end()
                assert not call.cancelled
                if call.error is not None:
                    assert isinstance(call.error, CudaError), (way, call.error)
                    assert call.error.code == code
                del call
            emulated_gpu.reset()
            succeeded = (content(dst) == 1).all()
            src, dst = way.memory(3, 4)
            await way.copy(src, dst, stream)
            assert (content(dst) == 3).all(), (way, nth, succeeded)
            assert _default_copier().stats().in_flight == 0
            # The next call that fails is not to be one that frees this memory.
            await nothing_held()


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_a_success_is_never_claimed_for_a_copy_that_was_refused(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    for entry_point in ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemcpyAsync", "cuMemcpyBatchAsync"):
        src, dst = way.memory(1, 2)
        emulated_gpu.fail_call(entry_point, 1, 1)
        async with calls() as start:
            call = await start(way.copy(src, dst, stream)).end()
        emulated_gpu.reset()
        if call.error is None:
            assert (content(dst) == 1).all()
        else:
            assert isinstance(call.error, CudaError)
            assert call.error.code == 1


@pytest.mark.parametrize("way", [way for way in WAYS if way.nbytes == SMALL], ids=repr)
async def test_a_refused_small_copy_leaks_nothing(emulated_gpu: Emulator, way: Way) -> None:
    stream = Stream()
    src, dst = way.memory(1, 2)
    await way.copy(src, dst, stream)
    kept = len(leaked_owners)
    name = "cuMemcpyDtoHAsync" if way.to_host else "cuMemcpyHtoDAsync"
    for _ in range(3):
        emulated_gpu.fail_call(name, 1, 2)
        await fails(way.copy(src, dst, stream), 2)
    assert len(leaked_owners) == kept


async def test_memory_that_cannot_be_pinned(emulated_gpu: Emulator) -> None:
    # Slots of a size that nobody has used: the first of them cannot be made, then only one can.
    async with Copier(slot_nbytes=36864, slots=4) as copier:
        src, dst = on_device(BULK, 1), bytearray(BULK)
        emulated_gpu.fail_call("cuMemHostRegister", 1, 2)
        await fails(copier.copy_to_host(src, dst), 2)
        emulated_gpu.fail_call("cuMemHostRegister", 2, 2)
        await copier.copy_to_host(src, dst)
        assert dst == bytes([1]) * BULK
        target = on_device(BULK, 0)
        await copier.copy_to_device(dst, target)
        assert (content(target) == 1).all()


async def test_a_copy_to_the_device_that_fails_halfway_leaves_the_next_one_alone(emulated_gpu: Emulator) -> None:
    stream = Stream()
    src, dst = bytes([1]) * (4 * BULK), on_device(4 * BULK, 0)
    emulated_gpu.fail_call("cuMemcpyHtoDAsync", 3, 2)
    await fails(copy_to_device(src, dst, stream=stream), 2)
    await copy_to_device(src, dst, stream=stream)
    assert (content(dst) == 1).all()
    check(driver.cuStreamSynchronize(stream.handle))


async def test_a_stream_of_another_device_is_synchronised_after_a_fault(emulated_gpu: Emulator) -> None:
    """Also when the engine of the one that failed has noticed, of which copies for the stream might have been."""
    with context_of(1):
        stream = int(check(driver.cuStreamCreate(1)))
    source, target = DeviceArray(SMALL, device=1), bytearray(SMALL)
    await copy_to_host(source, target, stream=stream)
    emulated_gpu.fail_operation("copy")
    with pytest.raises(CudaError):
        await copy_to_device(bytes(BULK), DeviceArray(BULK))
    with context_of(1):
        await synchronize(stream)
        await copy_to_host(source, target, stream=stream)
    check(driver.cuStreamDestroy(stream))


async def first_of(iterator: Any) -> Any:
    async with iterator:
        return await anext(iterator)


@one_loop
@pytest.mark.parametrize("nbytes", [64, 1 << 20])
@pytest.mark.parametrize(
    ("name", "copy"),
    [
        ("copy_to_host", lambda device, host: copy_to_host(device, host)),
        ("copy_to_host", lambda device, host: copy_to_host(device)),
        ("copy_to_host", lambda device, host: copy_to_host(device, host, in_stream=True)),
        ("copy_to_host", lambda device, host: first_of(collect([device]))),
        ("copy_to_device", lambda device, host: copy_to_device(host, device)),
        ("copy_to_device", lambda device, host: copy_to_device(device, DeviceArray(device.nbytes))),
        ("copy_batch", lambda device, host: copy_batch(0, [device], [host])),
        ("copy_batch", lambda device, host: copy_batch(0, [device] * 2, [host, bytearray(len(host))])),
    ],
)
async def test_an_error_names_what_was_called(emulated_gpu: Emulator, name: str, copy: Any, nbytes: int) -> None:
    # Which might be quicker, and then nothing has failed.
    await forget_the_kernel(emulated_gpu)
    device, host = DeviceArray(nbytes), pinned_empty(nbytes)
    emulated_gpu.fail_operation("copy")
    with pytest.raises(CudaError, match=rf"^{name} failed with CUDA_ERROR_ILLEGAL_ADDRESS \(700\)") as caught:
        await copy(device, host)
    assert caught.value.operation == name
