"""Calls in tasks of their own, and streams and memory as a test of the contract needs them."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from cuda.bindings import driver
from kinds import context_of

from aiocuda_copy import CudaError, _dispatcher, copy_batch, copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator, current_emulator

SMALL = 4096
# More than a piece, in every direction.
BULK = (6 << 20) + 4100

# Data does not move differently on another loop.
one_loop = pytest.mark.parametrize("anyio_backend", [("asyncio", {"debug": True})], ids=["asyncio"])

PATIENCE = 20.0


def check(result: tuple[Any, ...]) -> Any:
    code, *values = result
    assert code == driver.CUresult.CUDA_SUCCESS, code
    return values[0] if values else None


def use_device(device: int = 0) -> None:
    check(driver.cuInit(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device))))))


class Stream:
    """A stream of the caller's, which synchronises with the legacy stream only where it is asked to."""

    def __init__(self, *, blocking: bool = False) -> None:
        use_device()
        self.handle = int(check(driver.cuStreamCreate(0 if blocking else 1)))
        weakref.finalize(self, driver.cuStreamDestroy, self.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def fill(self, array: DeviceArray, value: int) -> None:
        check(driver.cuMemsetD8Async(array.ptr, value, array.nbytes, self.handle))

    def copy(self, src: DeviceArray, dst: DeviceArray) -> None:
        check(driver.cuMemcpyDtoDAsync(dst.ptr, src.ptr, src.nbytes, self.handle))


def on_device(nbytes: int, value: int) -> DeviceArray:
    array = DeviceArray(nbytes)
    with context_of(0):
        check(driver.cuMemsetD8(array.ptr, value, nbytes))
        # It may return before the bytes are there, and other streams do not wait for the legacy stream.
        check(driver.cuStreamSynchronize(driver.CU_STREAM_LEGACY))
    return array


def pinned_array(nbytes: int, value: int) -> np.ndarray[Any, Any]:
    array = pinned_empty(nbytes)
    array.fill(value)
    return array


def content(memory: Any) -> np.ndarray[Any, Any]:
    return memory.to_numpy() if isinstance(memory, DeviceArray) else np.frombuffer(memory, np.uint8)


def streams_with(gpu: Emulator, kind: str) -> list[int]:
    """Those that have something of a kind in them, also streams that the library made for itself."""
    return [stream for stream in gpu.busy_streams() if kind in gpu.pending(stream)]


def copies_enqueued(gpu: Emulator) -> int:
    """How many copies have been asked of the driver."""
    names = ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy3DAsync")
    return sum(gpu.calls(name) for name in names)


class Way:
    """One way through the library: a kind of memory, a size, and the function that copies."""

    def __init__(self, name: str, nbytes: int, source: str, destination: str, *, as_object: bool = False) -> None:
        self.name, self.nbytes, self.as_object = name, nbytes, as_object
        self._source, self._destination = source, destination

    def memory(self, source: int, destination: int) -> tuple[Any, Any]:
        """Both sides, filled with these values."""
        return self._make(self._source, source), self._make(self._destination, destination)

    def _make(self, kind: str, value: int) -> Any:
        if kind == "device":
            return on_device(self.nbytes, value)
        return pinned_array(self.nbytes, value) if kind == "pinned" else bytearray([value]) * self.nbytes

    @property
    def to_host(self) -> bool:
        return self._destination != "device"

    async def copy(self, src: Any, dst: Any, stream: Stream, **options: Any) -> Any:
        # A handle takes the short way of small copies, an object the long one.
        named = stream if self.as_object else stream.handle
        if self.name.startswith("batch"):
            half = self.nbytes // 2
            return await copy_batch(named, [src[:half], src[half:]], [dst[:half], dst[half:]], **options)
        function = copy_to_host if self.to_host else copy_to_device
        return await function(src, dst, stream=named, **options)

    def __repr__(self) -> str:
        return self.name


class _BatchWay(Way):
    def _make(self, kind: str, value: int) -> Any:
        made = super()._make(kind, value)
        return np.frombuffer(made, np.uint8) if kind == "pageable" else made


WAYS = [
    Way("small to host", SMALL, "device", "pageable"),
    Way("small to host, stream as object", SMALL, "device", "pageable", as_object=True),
    Way("small to device", SMALL, "pageable", "device"),
    Way("small to device, stream as object", SMALL, "pageable", "device", as_object=True),
    Way("direct to host", BULK, "device", "pinned"),
    Way("direct to device", BULK, "pinned", "device"),
    Way("staged to host", BULK, "device", "pageable", as_object=True),
    Way("staged to device", BULK, "pageable", "device", as_object=True),
    Way("between devices", BULK, "device", "device"),
    _BatchWay("batch to host", BULK, "device", "pageable"),
    _BatchWay("batch to device", BULK, "pinned", "device"),
]
# One for each part of the library that the others share.
FEW_WAYS = [way for way in WAYS if way.name in ("small to host", "direct to host", "staged to device", "batch to host")]
WAYS_TO_HOST = [way for way in WAYS if way.to_host]
WAYS_TO_DEVICE = [way for way in WAYS if not way.to_host]


class Call:
    """A coroutine in a task of its own: it can be cancelled, and asked what came of it."""

    def __init__(self, coroutine: Awaitable[Any]) -> None:
        self._coroutine = coroutine
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self.value: Any = None
        self.error: Exception | None = None
        self.returned = False

    async def run(self) -> None:
        try:
            with self._scope:
                self.value = await self._coroutine
                self.returned = True
        except Exception as exc:
            self.error = exc
        finally:
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        self._scope.cancel()

    async def end(self) -> Call:
        """Waits until it has ended, in whatever way."""
        with anyio.fail_after(PATIENCE):
            await self._ended.wait()
        return self

    async def result(self) -> Any:
        await self.end()
        if self.error is not None:
            raise self.error
        assert self.returned, "the call was cancelled"
        return self.value

    @property
    def cancelled(self) -> bool:
        return self.ended and not self.returned and self.error is None


Start = Callable[[Awaitable[Any]], Call]


@asynccontextmanager
async def calls() -> AsyncIterator[Start]:
    """Starts calls, and ends what has not ended when the test does."""
    async with anyio.create_task_group() as group:

        def start(coroutine: Awaitable[Any]) -> Call:
            call = Call(coroutine)
            group.start_soon(call.run)
            return call

        try:
            yield start
        except BaseException:
            # What is in flight would be waited for, and the fixture would release it only after that.
            emulator = current_emulator()
            if emulator is not None:
                emulator.reset()
            raise
        finally:
            group.cancel_scope.cancel()


async def turns(n: int = 10) -> None:
    """Lets the tasks there are take so many steps."""
    for _ in range(n):
        await anyio.lowlevel.checkpoint()


async def nothing_held() -> None:
    """Waits until the loop has let go of every owner: of a small copy's two roads the slower one may take longer."""
    await until(lambda: _dispatcher.current().queue.outstanding == 0)


async def forget_the_kernel(gpu: Emulator) -> None:
    """After a fault the engine starts anew, without a kernel; also where one that was refused had been given up."""
    # Small, because what a lost device might still touch is kept for good, but no copy that finishes inside the call.
    source, target = np.zeros(128 << 10, np.uint8), DeviceArray(128 << 10, np.uint8)
    gpu.fail_operation("copy")
    with pytest.raises(CudaError):
        await copy_to_device(source, target)
    gpu.reset()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that the engine's thread does."""
    with anyio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await anyio.sleep(0.0005)
