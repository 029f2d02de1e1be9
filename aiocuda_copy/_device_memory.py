"""Device memory for batches that no framework makes room for: allocated by cuda.core, and used again and again."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import _driver

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


class DeviceMemory:
    """Makes arrays whose memory belongs to a stream.

    A buffer is allocated in the stream, comes back when its array is dropped, goes out again to a copy that is ordered
    in the stream, and is freed in the stream. So nothing is written to it before the work that had been enqueued when
    the array was dropped is done; and dropping an array or making the next makes no driver call, which could have to
    wait in a stream that is full.
    """

    def __init__(self, device: int, stream: Any, handle: int) -> None:
        from cuda import core

        self._device = device
        with _core_errors(), _driver.context_of(device):
            self._stream = core.Stream.from_handle(handle)
            self._resource = core.DeviceMemoryResource(device)
        self._free: deque[Any] = deque()
        # An array's finalizer holds this object, so that these buffers are freed when the last array has come back.
        # At exit the process's end frees it.
        weakref.finalize(self, _close, self._free, self._device, self._stream, stream).atexit = False

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> BatchArray:
        """An array of undefined content."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return BatchArray(0, shape, dtype, self._device)
        buffer = self._take(nbytes)
        if buffer is None:
            # Batches of many sizes must not add up to one of each.
            _close(self._free, self._device, self._stream)
            with _core_errors(), _driver.context_of(self._device):
                buffer = self._resource.allocate(nbytes, stream=self._stream)
        array = BatchArray(int(buffer.handle), shape, dtype, self._device)
        weakref.finalize(array, self._take_back, buffer).atexit = False
        return array

    def _take(self, nbytes: int) -> Any:
        for _ in range(len(self._free)):
            buffer = self._free.popleft()
            if buffer.size == nbytes:
                return buffer
            self._free.append(buffer)
        return None

    def _take_back(self, buffer: Any) -> None:
        # In any thread, also in the middle of the methods above.
        self._free.append(buffer)


@contextmanager
def _core_errors() -> Iterator[None]:
    """What cuda.core says of the driver, as the package says it."""
    try:
        yield
    except Exception as exc:
        if type(exc).__name__ != "CUDAError":
            raise
        raise _driver.error_of_core(exc, "the allocation of a batch") from exc


def _close(free: deque[Any], device: int, stream: Any, _owner: Any = None) -> None:
    with _driver.context_of(device):
        while free:
            free.popleft().close(stream)
