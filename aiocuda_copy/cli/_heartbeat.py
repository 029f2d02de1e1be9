"""A timer that fires every millisecond, and how long the loop keeps it waiting."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from types import TracebackType

__all__ = ["Heartbeat"]

_CLOCK_MONOTONIC = 1


class Heartbeat:
    """Measures the longest gap between two turns of the loop: ``async with Heartbeat() as beat: ...; beat.longest``.

    An undisturbed beat comes every ``period``, so that is the least that can be measured. The kernel keeps the time:
    the loop's own timers are rounded up to a millisecond whenever something else has woken it.
    """

    def __init__(self, period: float = 0.001) -> None:
        self.period = period
        self.longest = 0.0
        self._last = 0.0

    async def __aenter__(self) -> Heartbeat:
        self._timer = _periodic_timer(self.period)
        self._loop = asyncio.get_running_loop()
        self._last = time.perf_counter()
        self._loop.add_reader(self._timer, self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A gap that lasts to the end is a gap as well.
        self._note()
        self._loop.remove_reader(self._timer)
        os.close(self._timer)

    def _note(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last)
        self._last = now

    def _beat(self) -> None:
        os.read(self._timer, 8)
        self._note()


def _periodic_timer(period: float) -> int:
    """A descriptor that becomes readable every so many seconds: ``os.timerfd_create``, which came with Python 3.13."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    interval = (int(period), round(period % 1 * 1e9))
    if descriptor < 0 or libc.timerfd_settime(descriptor, 0, (ctypes.c_long * 4)(*interval, *interval), None):
        code = ctypes.get_errno()
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(code, os.strerror(code))
    return descriptor
