"""An array in device memory, for tests and demonstrations."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from aiocuda_copy._device_memory import interface_type
from aiocuda_copy._driver import no_driver, usable
from aiocuda_copy._errors import CudaError
from aiocuda_copy.testing._emulator import driver_from_environment


def _check(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(int(code), driver.cuGetErrorName(code)[1].decode(), "making or reading a DeviceArray")
    return values[0] if values else None


@contextmanager
def _context_of(device: int) -> Iterator[None]:
    _check(driver.cuInit(0))
    context = _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device))))
    try:
        _check(driver.cuCtxPushCurrent(context))
        # Memory may be freed at any time, also while somebody captures a stream.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = driver.cuThreadExchangeStreamCaptureMode(relaxed)[1]
        try:
            yield
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)
            driver.cuCtxPopCurrent()
    finally:
        driver.cuDevicePrimaryCtxRelease(device)


class _Memory:
    """The allocation behind an array and its views."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.device = device
        self.nbytes = nbytes
        driver_from_environment()
        try:
            code = driver.cuInit(0)
        except RuntimeError as exc:
            raise no_driver(exc) from exc
        _check(code)
        # Kept as long as the memory, which would go with its context.
        _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device))))
        with _context_of(device):
            self.ptr = int(_check(driver.cuMemAlloc(max(nbytes, 1))))
        self.free = weakref.finalize(self, self._free, self.ptr, device)

    @staticmethod
    def _free(ptr: int, device: int) -> None:
        if not usable():
            return
        with _context_of(device):
            driver.cuMemFree(ptr)
        driver.cuDevicePrimaryCtxRelease(device)


class _Geometry:
    """Lends NumPy an address that it must not read: only shape, strides and address are ever asked for."""

    def __init__(self, ptr: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (ptr, False),
            "shape": shape,
            "typestr": interface_type(dtype)["typestr"],
            "strides": None,
        }


class DeviceArray:
    """A NumPy-like array in device memory, allocated by the driver, emulated or real.

    It has ``__cuda_array_interface__`` (version 3), supports basic indexing and ``T`` as views, is freed when it and
    its views are gone, and is a context manager.

    Parameters
    ----------
    shape
        The shape.
    dtype
        The element type.
    device
        The device's ordinal.
    stream
        What ``__cuda_array_interface__`` says about the stream: a handle, or ``None``.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike = np.uint8,
        *,
        device: int = 0,
        stream: int | None = None,
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        self._stream = stream
        self._memory = _Memory(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, device)
        self._geometry: npt.NDArray[Any] = np.asarray(_Geometry(self._memory.ptr, shape, dtype)).view(dtype)
        _ = self.__cuda_array_interface__

    @classmethod
    def from_numpy(cls, array: npt.ArrayLike, *, device: int = 0, stream: int | None = None) -> DeviceArray:
        """A copy of an array, in device memory."""
        source = np.asarray(array, order="C")
        created = cls(source.shape, source.dtype, device=device, stream=stream)
        if source.nbytes:
            with _context_of(device):
                _check(driver.cuMemcpyHtoD(created.ptr, source.ctypes.data, source.nbytes))
                # From pageable memory that call returns when the bytes have been staged, not when they have arrived
                # (CUDA's "API synchronization behavior"), and other streams do not wait for the legacy stream.
                _check(driver.cuStreamSynchronize(driver.CU_STREAM_LEGACY))
        return created

    def to_numpy(self) -> npt.NDArray[Any]:
        """A copy of the array, in host memory."""
        content = np.empty(self._memory.nbytes, np.uint8)
        if content.nbytes:
            with _context_of(self.device):
                _check(driver.cuMemcpyDtoH(content.ctypes.data, self._memory.ptr, content.nbytes))
        offset = self.ptr - self._memory.ptr if self.size else 0
        view: npt.NDArray[Any] = np.ndarray(self.shape, self.dtype, content, offset, self.strides)
        # A part of the content is not to keep all of it.
        return view if view.flags.c_contiguous and view.nbytes == content.nbytes else view.copy()

    def _view(self, geometry: npt.NDArray[Any]) -> DeviceArray:
        view = object.__new__(DeviceArray)
        view._stream = self._stream
        view._memory = self._memory
        view._geometry = geometry
        _ = view.__cuda_array_interface__
        return view

    def __copy__(self) -> DeviceArray:
        return self._view(self._geometry)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceArray:
        return DeviceArray.from_numpy(self.to_numpy(), device=self.device, stream=self._stream)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DeviceArray cannot be pickled, for its memory is on a device; pickle array.to_numpy()")

    def __getitem__(self, index: Any) -> DeviceArray:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(part is Ellipsis or part is None or isinstance(part, int | slice) for part in parts):
            raise TypeError("only integers, slices, None and Ellipsis can index a DeviceArray")
        # With an Ellipsis NumPy returns a view even where all indices are integers, and never reads the element.
        return self._view(self._geometry[parts if Ellipsis in parts else (*parts, Ellipsis)])

    @property
    def T(self) -> DeviceArray:
        """The transposed array, as a view."""
        return self._view(self._geometry.T)

    @property
    def ptr(self) -> int:
        """Device address of the first element."""
        return int(self._geometry.__array_interface__["data"][0])

    @property
    def stream(self) -> int | None:
        """What ``__cuda_array_interface__`` says about the stream."""
        return self._stream

    @stream.setter
    def stream(self, stream: int | None) -> None:
        self._stream = stream
        self.__dict__.pop("__cuda_array_interface__", None)

    @property
    def device(self) -> int:
        """Ordinal of the device."""
        return self._memory.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dimension."""
        return self._geometry.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, for each dimension."""
        return self._geometry.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._geometry.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._geometry.size

    @property
    def nbytes(self) -> int:
        """Bytes in the elements."""
        return self._geometry.nbytes

    # Made once, and when the array is, as by arrays that know where they lie: what asks for it may be measured.
    @functools.cached_property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        contiguous = self._geometry.flags.c_contiguous
        return {
            "version": 3,
            "data": (self.ptr if self.size else 0, False),
            "shape": self.shape,
            **interface_type(self.dtype),
            "strides": None if contiguous else self.strides,
            "stream": self._stream,
        }

    def __len__(self) -> int:
        return len(self._geometry)

    def __repr__(self) -> str:
        return f"<DeviceArray at {self.ptr:#x}: shape {self.shape}, {self.dtype}, device {self.device}>"

    def free(self) -> None:
        """Free the memory now, also under any views."""
        self._memory.free()

    def __enter__(self) -> DeviceArray:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
