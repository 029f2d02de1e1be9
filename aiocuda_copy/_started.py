"""Copies that somebody has started and will wait for later, or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from . import _driver, _native
from ._ticket import Ticket

__all__ = ["Started", "let_go"]


class Started:
    """One copy that goes on by itself: the engine needs no task of the loop's for it."""

    __slots__ = ("_ended", "_name", "_operation", "_ticket")

    def __init__(self, name: str, ticket: Ticket, operation: _native.Operation) -> None:
        self._name = name
        self._ticket = ticket
        self._operation = operation
        self._ended: anyio.Event | None = None

    async def wait(self) -> None:
        """Returns when the copy is done, and raises what became of it. Unlike an awaited copy it survives the wait's
        cancellation, so that whoever was interrupted may wait again."""
        await self.ended()
        _driver.check(self._ticket.resolve(), self._name)

    async def ended(self) -> None:
        """Returns when the library has let go of the memory, for whatever reason."""
        if not self._ticket.finished:
            if self._ended is None:
                self._ended = anyio.Event()
                self._ticket.wake = self._ended.set
            await self._ended.wait()

    def cancel(self) -> None:
        """Has the copy end early, within milliseconds. In any thread."""
        if not self._ticket.finished:
            self._operation.cancel()


async def let_go(copies: Iterable[Started]) -> None:
    """Cancels copies, and returns when nothing touches their memory any more."""
    copies = list(copies)
    for copy in copies:
        copy.cancel()
    with anyio.CancelScope(shield=True):
        for copy in copies:
            await copy.ended()
