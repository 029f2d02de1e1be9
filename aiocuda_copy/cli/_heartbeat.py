"""A task that wakes every millisecond and notes how long the loop kept it waiting."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

__all__ = ["Heartbeat"]


class Heartbeat:
    """Measures the longest gap between two turns of the loop: ``async with Heartbeat() as beat: ...; beat.longest``.

    An undisturbed beat comes every ``period``, so that is the least that can be measured.
    """

    def __init__(self, period: float = 0.001) -> None:
        self.period = period
        self.longest = 0.0
        self._last = 0.0

    async def __aenter__(self) -> Heartbeat:
        started = asyncio.Event()
        self._task = asyncio.create_task(self._beat(started))
        await started.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A gap that lasts to the end is a gap as well.
        self._note()
        self._task.cancel()
        await asyncio.wait([self._task])

    def _note(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last)
        self._last = now

    async def _beat(self, started: asyncio.Event) -> None:
        self._last = time.perf_counter()
        started.set()
        while True:
            await asyncio.sleep(self.period)
            self._note()
