"""Device memory for batches that no framework makes room for: allocated by cuda.core, and used again and again."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from . import _driver, _native
from ._order import primary_context
from ._streams import LEGACY_DEFAULT, PER_THREAD_DEFAULT
from ._threads import run_to_end

if TYPE_CHECKING:
    from ._copier import Copier

__all__ = ["BatchArray", "DeviceMemory", "interface_type"]


def interface_type(dtype: np.dtype[Any]) -> dict[str, Any]:
    """What ``__cuda_array_interface__`` says of a type."""
    try:
        np.dtype(dtype.str)
    except TypeError:  # not all that NumPy writes can be read: ml_dtypes.float8_e5m2 is "<f1"
        return {"typestr": f"|V{dtype.itemsize}"}
    try:
        descr = {"descr": dtype.descr} if dtype.names else {}
    except ValueError:  # of fields that overlap or are not in order
        descr = {}
    return {"typestr": dtype.str, **descr}


class _Lease:
    """Something that weak references can follow."""


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
        # What the memory comes back with: shallow copies share it.
        self._lease = _Lease()
        self._type = interface_type(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # No stream to wait for: the copy is done when the array is handed out.
        return {
            "version": 3,
            "shape": self.shape,
            **self._type,
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,
        }

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a BatchArray without dimensions")
        return self.shape[0]

    def __bool__(self) -> bool:
        if not self.shape:
            raise TypeError("the value of a BatchArray is in device memory: await copy_to_host(array) to know it")
        return self.shape[0] > 0

    def __copy__(self) -> BatchArray:
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        return view

    # For copy.deepcopy as well, whose result would be written to as nobody else's.
    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a BatchArray, whose memory is on a device and lent by prefetch(), can be neither pickled nor copied "
            "deeply: copy it with copy_to_host(array), or with what your framework makes of it, such as "
            "torch.as_tensor(array).clone(); a second view is copy.copy(array), and a dataclass becomes a dict by "
            "vars(batch) in the place of dataclasses.asdict(batch)"
        )

    def __repr__(self) -> str:
        return f"<BatchArray at {self.ptr:#x}: shape {self.shape}, {self.dtype}, device {self.device}>"


# Of a driver that does not work here. A buffer that is dropped would try to free its memory.
_never_freed: list[Any] = []
# What frees buffers whose stream took no mark, because it was under capture: the next to free something tries again.
_postponed: list[Callable[[], None]] = []
# cuda.core does not bear being imported by two threads at a time.
_importing = threading.Lock()


class _Room(NamedTuple):
    """Memory for an array, and the operation that the copy to it shall be."""

    buffer: Any
    operation: _native.Operation | None


class DeviceMemory:
    """Makes arrays whose memory belongs to a stream.

    A buffer comes back when its array is dropped, goes out again, and is freed in the end. When it comes back it is
    marked what is in the stream then: so nothing is written to it, and it is not freed, before that is done, but what
    is enqueued later, to compute with other batches, holds up no copy. Where the stream takes no mark, the next copy
    comes after all that is in the stream when it begins.

    Memory is allocated and freed in streams of the library's own: in the caller's stream that would have to wait where
    the stream is full, would break a capture, and would mean another stream in another thread.
    """

    def __init__(self, copier: Copier, device: int, stream: Any, handle: int) -> None:
        with _importing:
            from cuda import core

        self._device = device
        # The legacy stream comes after every thread's own one.
        handle, context = LEGACY_DEFAULT if handle == PER_THREAD_DEFAULT else handle, primary_context(device)
        self._mark = partial(copier._operation_after, handle, context)
        with _core_errors(), _driver.context_of(device):
            place = core.Device(device)
            place.set_current()  # of the context that is there for the time being
            self._allocating, self._freeing = place.create_stream(), place.create_stream()
            self._resource = core.DeviceMemoryResource(device)
        # What the first copy to a buffer comes after as well.
        self.allocating = int(self._allocating.handle), context
        self._free: deque[_Room] = deque()
        # An array's finalizer holds this object, so that these buffers are freed when the last array has come back.
        # At exit the process's end frees it.
        self._close = partial(_close, self._free, device, self._freeing, self._mark, stream)
        weakref.finalize(self, self._close).atexit = False

    async def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[BatchArray, _native.Operation | None]:
        """An array of undefined content, and the operation that the copy to it shall be, where it must be a certain
        one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return BatchArray(0, shape, dtype, self._device), None
        room = self._take(nbytes)
        if room is None:
            # Growing the driver's pool takes milliseconds.
            room = _Room(await run_to_end(partial(self._allocate, nbytes)), None)
        array = BatchArray(int(room.buffer.handle), shape, dtype, self._device)
        weakref.finalize(array._lease, self._take_back, room.buffer).atexit = False
        return array, room.operation

    def _allocate(self, nbytes: int) -> Any:
        # Batches of many sizes must not add up to one of each.
        self._close()
        with _core_errors(), _driver.context_of(self._device):
            return self._resource.allocate(nbytes, stream=self._allocating)

    def _take(self, nbytes: int) -> _Room | None:
        for _ in range(len(self._free)):
            room = self._free.popleft()
            if room.buffer.size == nbytes:
                return room
            self._free.append(room)
        return None

    def _take_back(self, buffer: Any) -> None:
        # In any thread, also in the middle of the methods above.
        if _driver.usable():
            self._free.append(_Room(buffer, self._mark()))
        else:
            _never_freed.append(buffer)


@contextmanager
def _core_errors() -> Iterator[None]:
    """What cuda.core says of the driver, as the package says it."""
    try:
        yield
    except Exception as exc:
        if type(exc).__name__ != "CUDAError":
            raise
        raise _driver.error_of_core(exc, "the allocation of a batch") from exc


def _close(
    free: deque[_Room], device: int, freeing: Any, mark: Callable[[], _native.Operation | None], stream: Any
) -> None:
    """Frees what has come back, each buffer after the work that was in its stream then. Holds the stream meanwhile."""
    if not _driver.usable():
        _never_freed.extend(free)
        return
    with _driver.context_of(device):
        left = []
        while free:
            buffer, operation = free.popleft()
            operation = mark() if operation is None else operation
            if operation is not None and operation.hand_marks_to(int(freeing.handle)) == 0:
                buffer.close(freeing)
            else:
                left.append(_Room(buffer, None))
    for again in [_postponed.pop() for _ in range(len(_postponed))]:
        again()
    if left:
        _postponed.append(partial(_close, deque(left), device, freeing, mark, stream))
