"""Host and device memory of every kind, and how a test looks at it from outside the library."""

from __future__ import annotations

import array
import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from aiocuda_copy import pinned, pinned_empty
from aiocuda_copy.testing import DeviceArray

# Data does not move differently on another loop: what takes long, or is a matter of bytes alone, runs on one.
one_loop = pytest.mark.parametrize("anyio_backend", [("asyncio", {"debug": True})], ids=["asyncio"])


def check(result: tuple[Any, ...]) -> Any:
    code, *values = result
    assert code == driver.CUresult.CUDA_SUCCESS, code
    return values[0] if values else None


def device_count() -> int:
    check(driver.cuInit(0))
    return int(check(driver.cuDeviceGetCount()))


def need_two_devices() -> None:
    if device_count() < 2:
        pytest.skip("needs two devices")


@contextmanager
def context_of(device: int) -> Iterator[Any]:
    """The device's primary context, current. It is never released: what is allocated in it would go with it."""
    check(driver.cuInit(0))
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxPushCurrent(context))
    try:
        yield context
    finally:
        check(driver.cuCtxPopCurrent())


def bytes_at(address: int, nbytes: int, device: int = 0) -> np.ndarray:
    """What device memory holds."""
    found = np.empty(nbytes, np.uint8)
    if nbytes:
        with context_of(device):
            check(driver.cuMemcpyDtoH(found.ctypes.data, address, nbytes))
    return found


def put(address: int, data: np.ndarray, device: int = 0) -> None:
    """Writes to device memory."""
    if data.nbytes:
        with context_of(device):
            check(driver.cuMemcpyHtoD(address, np.ascontiguousarray(data).ctypes.data, data.nbytes))
            # It returns when the bytes have been staged, and other streams do not wait for the legacy stream.
            check(driver.cuStreamSynchronize(driver.CU_STREAM_LEGACY))


def pattern(nbytes: int, seed: int = 1) -> np.ndarray:
    """Bytes of which no run is like another one, so that a piece in the wrong place shows."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def host_view(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8) if nbytes else np.empty(0, np.uint8)


@contextmanager
def stream_of(device: int = 0, *, blocking: bool = False) -> Iterator[int]:
    """A stream's handle."""
    with context_of(device):
        stream = check(driver.cuStreamCreate(0 if blocking else 1))
        try:
            yield int(stream)
        finally:
            check(driver.cuStreamDestroy(stream))


# Host memory: each gives the object to copy, and the same bytes as a NumPy array.

Host = tuple[Any, np.ndarray]


@contextmanager
def _numpy(nbytes: int) -> Iterator[Host]:
    found = np.zeros(nbytes, np.uint8)
    yield found, found


@contextmanager
def _bytearray(nbytes: int) -> Iterator[Host]:
    found = bytearray(nbytes)
    yield found, np.frombuffer(found, np.uint8)


@contextmanager
def _memoryview(nbytes: int) -> Iterator[Host]:
    found = bytearray(nbytes + 5)
    yield memoryview(found)[5:], np.frombuffer(found, np.uint8)[5:]


@contextmanager
def _array(nbytes: int) -> Iterator[Host]:
    found = array.array("B", bytes(nbytes))
    yield found, np.frombuffer(found, np.uint8)


@contextmanager
def _ctypes(nbytes: int) -> Iterator[Host]:
    found = (ctypes.c_uint8 * nbytes)()
    yield found, np.frombuffer(found, np.uint8)


@contextmanager
def _mmap(nbytes: int) -> Iterator[Host]:
    # Of nothing there is no mapping.
    found = mmap.mmap(-1, max(nbytes, 1))
    yield (found if nbytes else memoryview(found)[:0]), np.frombuffer(found, np.uint8)[:nbytes]


@contextmanager
def _pinned_empty(nbytes: int) -> Iterator[Host]:
    found = pinned_empty(nbytes)
    found.fill(0)
    yield found, found


@contextmanager
def _pinned(nbytes: int) -> Iterator[Host]:
    with pinned(np.zeros(nbytes, np.uint8)) as found:
        yield found, found


@contextmanager
def _pinned_buffer(nbytes: int) -> Iterator[Host]:
    from cuda.core import LegacyPinnedMemoryResource

    with context_of(0):
        buffer = LegacyPinnedMemoryResource().allocate(max(nbytes, 1))
    assert buffer.size == nbytes or nbytes == 0
    try:
        yield (buffer if nbytes else np.empty(0, np.uint8)), host_view(int(buffer.handle), nbytes)
    finally:
        with context_of(0):
            buffer.close()


class Managed:
    """Managed memory, as Numba's and CuPy's arrays in it look: with the CUDA array interface, and with no other."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.nbytes, self.device = nbytes, device
        with context_of(device):
            self.address = int(check(driver.cuMemAllocManaged(max(nbytes, 1), 1)))
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def free(self) -> None:
        with context_of(self.device):
            check(driver.cuMemFree(self.address))


@contextmanager
def _managed_host(nbytes: int) -> Iterator[Host]:
    memory = Managed(nbytes)
    try:
        view = host_view(memory.address, nbytes)
        yield view, view
    finally:
        memory.free()


HOST_KINDS: dict[str, Callable[[int], Any]] = {
    "numpy": _numpy,
    "bytearray": _bytearray,
    "memoryview": _memoryview,
    "array.array": _array,
    "ctypes": _ctypes,
    "mmap": _mmap,
    "pinned_empty": _pinned_empty,
    "pinned": _pinned,
    "pinned Buffer": _pinned_buffer,
    "managed": _managed_host,
}


# Device memory: each gives the object to copy, and the address of its bytes.

OnDevice = tuple[Any, int]


@contextmanager
def _device_array(nbytes: int) -> Iterator[OnDevice]:
    found = DeviceArray(nbytes)
    yield found, found.ptr


@contextmanager
def _device_array_with_stream(nbytes: int) -> Iterator[OnDevice]:
    with stream_of(0) as stream:
        found = DeviceArray(nbytes, stream=stream)
        yield found, found.ptr


@contextmanager
def _device_buffer(nbytes: int) -> Iterator[OnDevice]:
    from cuda.core import Device, DeviceMemoryResource

    with context_of(0):
        device = Device(0)
        device.set_current()
        stream = device.create_stream()
        buffer = DeviceMemoryResource(device).allocate(nbytes, stream=stream)
        stream.sync()
        try:
            yield buffer, int(buffer.handle)
        finally:
            buffer.close(stream)
            stream.sync()
            stream.close()


@contextmanager
def _managed_device(nbytes: int) -> Iterator[OnDevice]:
    memory = Managed(nbytes)
    try:
        yield memory, memory.address
    finally:
        memory.free()


@contextmanager
def _managed_buffer(nbytes: int) -> Iterator[OnDevice]:
    from cuda.core import Buffer

    memory = Managed(nbytes)
    try:
        yield Buffer.from_handle(memory.address, nbytes, owner=memory), memory.address
    finally:
        memory.free()


DEVICE_KINDS: dict[str, Callable[[int], Any]] = {
    "DeviceArray": _device_array,
    "DeviceArray with a stream": _device_array_with_stream,
    "Buffer": _device_buffer,
    "managed": _managed_device,
    "managed Buffer": _managed_buffer,
}
