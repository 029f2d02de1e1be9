"""Device memory for batches that no framework makes room for: allocated by cuda.core, and used again and again."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from . import _driver, _native
from ._order import primary_context
from ._streams import PER_THREAD_DEFAULT

if TYPE_CHECKING:
    from ._copier import Copier

__all__ = ["BatchArray", "DeviceMemory"]


class BatchArray:
    """An array of a batch in device memory, for anything that takes ``__cuda_array_interface__``.

    Its memory is used for another batch when it, and all that was made of it, is gone.

    Attributes
    ----------
    ptr : int
        Device address of the first element.
    shape : tuple of int
    dtype : numpy.dtype
    nbytes : int
    device : int
        Ordinal of the device.
    """

    def __init__(self, ptr: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> None:
        self.ptr = ptr
        self.shape = shape
        self.dtype = dtype
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # No stream to wait for: the copy is done when the array is handed out.
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,
        }

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<BatchArray at {self.ptr:#x}: shape {self.shape}, {self.dtype}, device {self.device}>"


# Of a driver that does not work here. A buffer that is dropped would try to free its memory.
_never_freed: list[Any] = []


class _Room(NamedTuple):
    """Memory for an array, and the operation that the copy to it shall be."""

    buffer: Any
    operation: _native.Operation | None


class DeviceMemory:
    """Makes arrays whose memory belongs to a stream.

    A buffer is allocated in the stream, comes back when its array is dropped, goes out again, and is freed in the
    stream. When it comes back it is marked what is in the stream then: so nothing is written to it before that is done,
    but what is enqueued later, to compute with other batches, holds up no copy. Where the stream takes no mark, or one
    that depends on the thread, the next copy comes after all that is in the stream when it begins.
    """

    def __init__(self, copier: Copier, device: int, stream: Any, handle: int) -> None:
        from cuda import core

        self._copier, self._device, self._handle = copier, device, handle
        self._context = primary_context(device)
        with _core_errors(), _driver.context_of(device):
            self._stream = core.Stream.from_handle(handle)
            self._resource = core.DeviceMemoryResource(device)
        self._free: deque[_Room] = deque()
        # An array's finalizer holds this object, so that these buffers are freed when the last array has come back.
        # At exit the process's end frees it.
        weakref.finalize(self, _close, self._free, self._device, self._stream, stream).atexit = False

    async def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[BatchArray, _native.Operation | None]:
        """An array of undefined content, and the operation that the copy to it shall be, where it must be a certain
        one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return BatchArray(0, shape, dtype, self._device), None
        room = self._take(nbytes)
        if room is None:
            # Growing the driver's pool takes milliseconds.
            room = _Room(await anyio.to_thread.run_sync(self._allocate, nbytes, limiter=anyio.CapacityLimiter(1)), None)
        array = BatchArray(int(room.buffer.handle), shape, dtype, self._device)
        weakref.finalize(array, self._take_back, room.buffer).atexit = False
        return array, room.operation

    def _allocate(self, nbytes: int) -> Any:
        # Batches of many sizes must not add up to one of each.
        _close(self._free, self._device, self._stream)
        with _core_errors(), _driver.context_of(self._device):
            return self._resource.allocate(nbytes, stream=self._stream)

    def _take(self, nbytes: int) -> _Room | None:
        for _ in range(len(self._free)):
            room = self._free.popleft()
            if room.buffer.size == nbytes:
                return room
            self._free.append(room)
        return None

    def _take_back(self, buffer: Any) -> None:
        # In any thread, also in the middle of the methods above.
        if not _driver.usable():
            _never_freed.append(buffer)
            return
        operation = None
        if self._handle != PER_THREAD_DEFAULT:
            operation = self._copier._operation_after(self._handle, self._context)
        self._free.append(_Room(buffer, operation))


@contextmanager
def _core_errors() -> Iterator[None]:
    """What cuda.core says of the driver, as the package says it."""
    try:
        yield
    except Exception as exc:
        if type(exc).__name__ != "CUDAError":
            raise
        raise _driver.error_of_core(exc, "the allocation of a batch") from exc


def _close(free: deque[_Room], device: int, stream: Any, _owner: Any = None) -> None:
    if not _driver.usable():
        _never_freed.extend(free)
        return
    with _driver.context_of(device):
        while free:
            free.popleft().buffer.close(stream)
