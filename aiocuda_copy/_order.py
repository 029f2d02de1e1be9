"""What a copy comes after: marks in streams, and the contexts that stream handles mean. The driver refuses nothing here
that :mod:`_streams` has accepted, save a stream under capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import _driver, _native
from ._regions import Region
from ._streams import resolve_handle

__all__ = [
    "Order",
    "check_admission",
    "current_context",
    "device_of_stream",
    "handle_of",
    "primary_context",
    "refuse_capture",
    "special",
    "streams_of",
]

_CAPTURING = (
    "the stream is under capture, and what is awaited now cannot be part of a graph that runs later; copy before the "
    "capture begins or after it has ended, or give HOST_COPY_FN to the graph as a callback"
)


class Order:
    """What a copy comes after: all that is in the caller's stream, and in the streams that the arrays name."""

    __slots__ = ("_marked", "_own", "context", "handle", "others")

    def __init__(self, handle: int, context: int, others: set[tuple[int, int]]) -> None:
        self.handle = handle
        # Of the buffers: what the driver's special handles mean.
        self.context = context
        self.others: set[tuple[int, int]] = set()
        self._own = _distinct(handle, context)
        self._marked = False
        self.add(others)

    def add(self, others: set[tuple[int, int]]) -> None:
        """Names further streams, by handle and context, that are to be waited for; before they are marked."""
        self.others |= {_distinct(*other) for other in others} - {self._own}

    def mark_others(self, operation: _native.Operation) -> None:
        while self.others:
            other, context = self.others.pop()
            code = operation.mark(other, context, own=False, also=other <= 2 and other == self._own[0])
            check_admission(code, f"{MARKING} that the array names")

    def mark(self, operation: _native.Operation) -> None:
        """Makes the operation wait for what is in the streams now; once is enough."""
        if self._marked:
            return
        self.mark_others(operation)
        check_admission(operation.mark(self.handle, self.context, own=True), MARKING)
        self._marked = True


def _distinct(handle: int, context: int) -> tuple[int, int]:
    """The same for the same stream: 0 and 1 are one, and only special handles need a context."""
    return (max(handle, 1), context) if handle <= 2 else (handle, 0)


# Which of them it was is not known here.
MARKING = "marking the end of a stream (cuStreamIsCapturing, cuStreamQuery, cuEventRecord)"


def check_admission(code: int, operation: str) -> None:
    if code == _native.CAPTURING:
        raise RuntimeError(_CAPTURING)
    _driver.check(code, operation)


def _context_of(handle: int, fallback: int) -> int:
    code, context = _native.stream_context(handle, fallback)
    _driver.check(code, "cuStreamGetCtx")
    return context


def primary_context(device: int) -> int:
    code, context = _native.primary_context(device)
    _driver.check(code, "cuDevicePrimaryCtxRetain")
    return context


def current_context(device: int) -> int:
    """The calling thread's context, or else the device's primary one."""
    return _native.current_context() or primary_context(device)


def device_of_stream(handle: int, preferred: int | None) -> tuple[int, int]:
    fallback = primary_context(preferred) if preferred is not None else 0
    context = _context_of(handle, fallback or (current_context(0) if handle <= 2 else 0))
    code, device = _native.context_device(context)
    _driver.check(code, "cuCtxGetDevice")
    return device, context


def handle_of(stream: Any) -> int | None:
    """The handle of the caller's stream; ``None`` where none is named. The driver must be bound."""
    handle = None if stream is None else resolve_handle(stream)
    refuse_capture(handle)
    return handle


def refuse_capture(handle: int | None) -> None:
    """Refuses a stream under capture, before any object is asked for its memory: a lender makes the stream wait, which
    would invalidate the capture.

    The driver's special handles mean nothing without a context, and there is then nothing that is captured.
    """
    context = _native.current_context()
    if (handle or 0) > 2 or context:
        check_admission(_native.check_not_capturing(handle or 0, context), "cuStreamIsCapturing")


def streams_of(regions: Iterable[Region]) -> set[tuple[int, int]]:
    """The streams that arrays name, and the contexts that special handles mean there."""
    return {(region.stream, _context_of_region(region)) for region in regions if region.stream is not None}


def special(handle: int, regions: Iterable[Region]) -> set[tuple[int, int]]:
    """What the driver's special handles mean where the arrays are in several contexts: the stream of each."""
    return {(handle, _context_of_region(region)) for region in regions} if handle <= 2 else set()


def _context_of_region(region: Region) -> int:
    return region.context or primary_context(region.device)
