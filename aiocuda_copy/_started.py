"""Copies that somebody has started and will wait for later, or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import anyio

from . import _dispatcher, _driver, _native

__all__ = ["Started", "let_go"]

# How often the copies of a loop that is gone are looked at.
_ORPHANS_PERIOD = 0.001


class Started:
    """One copy that goes on by itself: the engine needs no task of the loop's for it.

    The name is the one that its error gives.
    """

    __slots__ = ("_dispatcher", "_ended", "_name", "_operation")

    def __init__(self, name: str, dispatcher: _dispatcher.Dispatcher, operation: _native.Operation) -> None:
        self._name = name
        self._dispatcher = dispatcher
        self._operation = operation
        self._ended: anyio.Event | None = None

    @property
    def finished(self) -> bool:
        """Whether the library has let go of the memory."""
        return self._operation.finished

    async def wait(self) -> None:
        """Returns when the copy is done, and raises what became of it. Unlike an awaited copy it survives the wait's
        cancellation, so that whoever was interrupted may wait again."""
        await self.ended()
        _driver.check(self._operation.resolve(), self._name)

    async def ended(self) -> None:
        """Returns when the library has let go of the memory, for whatever reason."""
        while not self.finished:
            if self._dispatcher.closed():
                _dispatcher.reclaim()
                await anyio.sleep(_ORPHANS_PERIOD)
                continue
            if self._ended is None:
                self._ended = anyio.Event()
                self._operation.wake = self._ended.set
            await self._ended.wait()

    def cancel(self) -> None:
        """Has the copy end early, within milliseconds. In any thread."""
        if not self.finished:
            self._operation.cancel()


async def let_go(copies: Iterable[Started]) -> None:
    """Cancels copies, and returns when nothing touches their memory any more, whoever is cancelled meanwhile."""
    copies = list(copies)
    for copy in copies:
        copy.cancel()
    interrupted: BaseException | None = None
    # asyncio's own cancellation, unlike anyio's, passes the shield.
    with anyio.CancelScope(shield=True):
        for copy in copies:
            while not copy.finished:
                try:
                    await copy.ended()
                except anyio.get_cancelled_exc_class() as exc:
                    interrupted = exc
    if interrupted is not None:
        try:
            raise interrupted
        finally:
            del interrupted  # the traceback holds this frame
