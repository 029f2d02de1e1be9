"""Calls that have begun: while the pool grows, or a batch is planned, they may suspend before they submit anything."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from . import _dispatcher

__all__ = ["Call", "Calls"]


class Call:
    """One of them."""

    def __init__(self) -> None:
        self.dispatcher = _dispatcher.current()
        self.submitted = False


class Calls:
    """Those of a copier that have not ended, from whatever loop."""

    def __init__(self) -> None:
        self._begun: set[Call] = set()

    def begin(self) -> Call:
        self._begun.add(call := Call())
        return call

    def end(self, call: Call) -> None:
        self._begun.discard(call)

    async def submission(self) -> None:
        """Waits until all that have begun by now have submitted, or ended."""
        await self._wait_for(lambda call: call.submitted)

    async def ends(self) -> None:
        """Waits until all that have begun by now have ended."""
        await self._wait_for(lambda call: False)

    async def _wait_for(self, done: Callable[[Call], bool]) -> None:
        waits = self._begun.copy()
        # Of any loop, so that no event can tell. Those of a closed one go no further.
        while any(call in self._begun and not done(call) and not call.dispatcher.closed() for call in waits):  # noqa: ASYNC110
            await anyio.sleep(0.001)
