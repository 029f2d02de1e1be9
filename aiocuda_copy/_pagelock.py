"""Page-locking of arrays that exist already: ``pinned(array)``.

The driver refuses to register a page range twice, so registrations are shared: a range that is asked for again, or that
overlaps, uses what is there and registers only the gaps. What somebody else has registered is left alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import numpy as np

from . import _driver, _native
from ._errors import let_go_of_buffers
from ._exports import Export, export
from ._regions import Kind, classify
from ._threads import once

__all__ = ["pinned"]

_PORTABLE, _READ_ONLY = 1, 8
_ALREADY_REGISTERED, _NOT_REGISTERED = 712, 713

Array = TypeVar("Array")
Result = TypeVar("Result")


class _Registration:
    """A range that is page-locked on behalf of ``users`` leases."""

    __slots__ = ("device", "end", "start", "users")

    def __init__(self, start: int, end: int, device: int) -> None:
        self.start, self.end, self.device, self.users = start, end, device, 1


_registrations: list[_Registration] = []
# Held during driver calls, so that who comes second waits until the memory is locked. Reentrant, because a finalizer
# that leaves a pinned() may run inside.
_lock = threading.RLock()


_last_device = 0


def context_device(device: int = -1) -> int:
    """In whose primary context memory is to be page-locked; -1 means this thread's current, or else the last one.

    Taking device 0 unasked would make a context there, with some hundred MiB, in a process that uses another one.
    """
    global _last_device
    _driver.ensure()
    if device < 0:
        device = _native.current_device()
    if device >= 0:
        _last_device = device
    return _last_device


def _acquire(start: int, end: int, readonly: bool, device: int) -> list[_Registration]:
    with _lock:
        held = [known for known in _registrations if known.start < end and start < known.end]
        for known in held:
            known.users += 1
        try:
            at = start
            for known in sorted(held, key=lambda known: known.start):
                _fill(at, known.start, readonly, device, held)
                at = max(at, known.end)
            _fill(at, end, readonly, device, held)
        except BaseException:
            _release(held)
            raise
        return held


def _fill(start: int, end: int, readonly: bool, device: int, held: list[_Registration]) -> None:
    if start >= end:
        return
    code = _native.host_register(start, end - start, _PORTABLE, device)
    if code and code != _ALREADY_REGISTERED and readonly:
        # A read-only mapping, such as one of a file, can only be registered as one.
        code = _native.host_register(start, end - start, _PORTABLE | _READ_ONLY, device)
    if code == _ALREADY_REGISTERED:
        return
    _driver.check(code, "cuMemHostRegister")
    added = _Registration(start, end, device)
    _registrations.append(added)
    held.append(added)


def _release(held: list[_Registration]) -> None:
    _driver.refuse_fork()
    failed = 0
    with _lock:
        while held:
            known = held.pop()
            known.users -= 1
            if known.users == 0:
                _registrations.remove(known)
                code = _native.host_unregister(known.start, known.device)
                # Whoever unregistered it behind our back has done what was to be done.
                failed = failed or (0 if code == _NOT_REGISTERED else code)
    _driver.check(failed, "cuMemHostUnregister")


class _Lease(NamedTuple):
    """What one entering has page-locked, and the export that keeps the memory where it is."""

    held: list[_Registration]
    export: Export


class pinned(Generic[Array]):
    """Page-locks an existing array while inside, as a context manager, synchronous or asynchronous.

    It nests, in one task or in several, and may be entered and left in any thread. Locking takes some 30 to 80 ms per
    GiB; ``async with`` does not hold the event loop meanwhile. Copies of the array must have ended before it is left.

    Parameters
    ----------
    array
        Host memory of any kind: a NumPy array, a CPU tensor, an object with the buffer protocol.

    Raises
    ------
    TypeError, ValueError
        When it is not host memory.
    CudaError
        When the driver does not page-lock it.

    Examples
    --------
    >>> async with pinned(array):
    ...     await copy_to_device(array, tensor)
    """

    def __init__(self, array: Array) -> None:
        self._array = array
        try:
            found = export(array, role="source")
        except TypeError as exc:
            if isinstance(array, np.ndarray):
                raise  # it says what is wrong with it
            kind = type(array).__qualname__
            raise TypeError(
                f"pinned() takes a NumPy array, a CPU tensor or an object with the buffer protocol, not {kind}"
            ) from exc
        if found.side == "device":
            raise ValueError("pinned() takes host memory, and this is device memory")
        self._leases: deque[_Lease] = deque()

    def _enter(self, device: int) -> _Lease:
        found = export(self._array, role="source")
        if found.nbytes == 0:
            return _Lease([], found)
        region = classify(found, _native.pointer_attributes(found.address))
        if region.kind is Kind.DEVICE:
            raise ValueError("pinned() takes host memory, and this is device memory")
        if region.kind is Kind.MANAGED:
            return _Lease([], found)
        return _Lease(_acquire(found.address, found.address + found.extent, found.readonly, device), found)

    def __enter__(self) -> Array:
        try:
            self._leases.append(self._enter(context_device()))
        except BaseException as exc:
            let_go_of_buffers(exc)
            raise
        return self._array

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _release(self._leases.pop().held)

    async def __aenter__(self) -> Array:
        # The worker thread has no current context to ask.
        device = context_device()
        try:
            self._leases.append(await _surely(lambda: self._enter(device), undo=lambda lease: _release(lease.held)))
        except BaseException as exc:
            let_go_of_buffers(exc)
            raise
        return self._array

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lease = self._leases.pop()
        if not any(known.users == 1 for known in lease.held):
            _release(lease.held)
            return
        try:
            await _surely(lambda: _release(lease.held))
        finally:
            # Where a cancellation came before the thread did; it is empty otherwise.
            _release(lease.held)


async def _surely(work: Callable[[], Result], undo: Callable[[Result], None] | None = None) -> Result:
    """Runs ``work`` in a thread. When the wait is cancelled, what has been done, or is being done, is undone."""
    work = once(work)
    results: deque[Result] = deque()
    # Whoever takes the flag first has the other do the undoing.
    flag = deque([True])

    def run() -> None:
        if not flag:
            return
        results.append(work())
        try:
            flag.pop()
        except IndexError:
            if undo is not None:
                undo(results.pop())

    try:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(run, limiter=anyio.CapacityLimiter(1))
    except BaseException:
        try:
            flag.pop()
        except IndexError:
            if undo is not None and results:
                undo(results.pop())
        raise
    return results.pop()
