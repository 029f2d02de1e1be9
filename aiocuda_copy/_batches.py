"""Items whose arrays are being copied, a few at a time, in order: what prefetch() and collect() have in common.

A copy that has been started goes on without a task of the loop's, so nothing has to run here while the consumer
computes, but the source. In ``async with`` a task advances it; else ``__anext__`` does, and what is left when somebody
just stops iterating is cancelled when it is dropped.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NoReturn, Protocol, Self

import anyio
import anyio.lowlevel

from . import _dispatcher, _driver
from ._errors import let_go_of_buffers
from ._nested import Search, Side, replaced
from ._sources import source_of
from ._started import Started, let_go

__all__ = ["Batches", "Way"]

_ANOTHER_LOOP = "the iteration has begun in another event loop"
# Arrays of an item that are started before the loop gets its turn: less than a millisecond's work.
_ARRAYS_A_TURN = 16
_NOTHING = object()


class Way(Protocol):
    """What is done to each array of an item."""

    side: Side

    def check(self) -> None:
        """Raises what can be known before the first item."""

    async def start(self, array: Any, copies: list[Started]) -> Any:
        """Starts the array's copy, adds it to the list, and returns the array that it goes to."""


class _UnderWay:
    """An item whose copies have been started."""

    def __init__(self) -> None:
        self.copies: list[Started] = []
        self.result: Any = None

    def __del__(self) -> None:
        # Dropped by whoever just stopped iterating.
        for copy in self.copies:
            copy.cancel()


class Batches(AsyncIterator[Any]):
    """What :func:`prefetch` and :func:`collect` return: an async iterator, and an async context manager."""

    def __init__(self, iterable: Any, depth: int, way: Way) -> None:
        self._depth = _checked_depth(depth)
        self._source = source_of(iterable)
        self._way = way
        self._in_source = False
        # Around the starting of an item's copies, which may wait for memory.
        self._starting: anyio.CancelScope | None = None
        # Taken from the source, and not under way yet.
        self._item: Any = _NOTHING
        self._under_way: deque[_UnderWay] = deque()
        # Cancelled, and maybe still at work.
        self._leaving: list[Started] = []
        # Nothing further comes from the source; and why, which is raised behind what is under way.
        self._ended = False
        self._error: BaseException | None = None
        self._loop: _dispatcher.Dispatcher | None = None
        self._guard = anyio.ResourceGuard("iterating over")
        self._news: anyio.Event | None = None
        self._context: AbstractAsyncContextManager[None] | None = None
        # Of the task beside the consumer, where there is one; and what closing the source there raised.
        self._pump: anyio.CancelScope | None = None
        self._pump_ended: anyio.Event | None = None
        self._close_error: BaseException | None = None

    async def __aenter__(self) -> Self:
        if self._context is not None:
            raise RuntimeError("it has been entered before")
        self._begin()
        self._context = self._pumping()
        await self._context.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        assert self._context is not None
        return await self._context.__aexit__(*exc_info)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        with self._guard:
            self._begin()
            # The task that advances the source is to get its turn, also where everything is there already.
            await anyio.lowlevel.checkpoint()
            if self._pump is None:
                while len(self._under_way) < self._depth and not self._ended:
                    await self._pull()
            else:
                while not self._under_way and not self._ended:
                    await self._change()
            if not self._under_way:
                await self._raise_end()
            batch = self._under_way[0]
            try:
                for copy in batch.copies:
                    await copy.wait()
            except Exception as exc:
                # What the source may have raised since comes later, so never; what was closed meanwhile just ends.
                self._error = exc if self._under_way else None
                await self._raise_end()
            if not self._under_way:
                await self._raise_end()
            self._under_way.popleft()
            self._tell()
            return batch.result

    async def aclose(self) -> None:
        """Ends the iteration: cancels what is under way, closes the source, and returns when nothing is left.

        Raises
        ------
        RuntimeError
            In another loop than the one in which the iteration began, while that one is not closed.
        """
        self._error = None
        await self._clear()

    def _begin(self) -> None:
        loop = _dispatcher.current()
        if self._loop is None:
            _driver.ensure()
            self._way.check()
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(_ANOTHER_LOOP)

    async def _raise_end(self) -> NoReturn:
        await self._clear()
        error, self._error = self._error, None
        try:
            raise StopAsyncIteration if error is None else error
        finally:
            # Else the traceback, which holds this frame, and the exception hold each other, and the batches with them.
            del error

    async def _clear(self) -> None:
        abandoned = self._loop is not None and self._loop is not _dispatcher.current()
        if abandoned and self._loop is not None and not self._loop.closed():
            raise RuntimeError(_ANOTHER_LOOP)
        self._ended = True
        self._item = _NOTHING
        # Only out of the source: one that rests between two items is to clean up undisturbed.
        if self._pump is not None and self._in_source and not abandoned:
            self._pump.cancel()
        if self._starting is not None and not abandoned:
            self._starting.cancel()
        self._leaving += (copy for batch in self._under_way for copy in batch.copies)
        self._under_way.clear()
        if not abandoned:
            self._tell()
        pump_ended = None if abandoned else self._pump_ended
        try:
            await let_go(self._leaving)
            self._leaving = [copy for copy in self._leaving if not copy.finished]
        finally:
            if pump_ended is None:
                await self._source.aclose()
        if pump_ended is None:
            return
        await pump_ended.wait()
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    @asynccontextmanager
    async def _pumping(self) -> AsyncIterator[None]:
        error: BaseException | None = None
        async with anyio.create_task_group() as group:
            self._pump = anyio.CancelScope()
            self._pump_ended = anyio.Event()
            group.start_soon(self._advance, self._pump, self._pump_ended)
            try:
                try:
                    yield
                finally:
                    await self.aclose()
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as exc:  # the group would wrap it
                error = exc
        if error is not None:
            try:
                raise error
            finally:
                del error

    async def _advance(self, scope: anyio.CancelScope, ended: anyio.Event) -> None:
        """Advances the source and closes it.

        All of that in one task and one scope, because an async generator may have scopes of its own open, which have
        to be left where they were entered.
        """
        with scope:
            try:
                try:
                    while not self._ended:
                        await (self._change() if len(self._under_way) == self._depth else self._pull())
                except BaseException as exc:
                    # Also a cancellation that was the source's own: it must not look like the end.
                    self._end(exc)
                await self._source.aclose()
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as exc:
                self._close_error = exc
            finally:
                ended.set()

    async def _pull(self) -> None:
        """Takes one item from the source and starts its copies."""
        batch = _UnderWay()
        try:
            if self._item is _NOTHING:
                self._in_source = True
                try:
                    self._item = await self._source.next()
                except StopAsyncIteration:
                    self._end(None)
                    return
                finally:
                    self._in_source = False
            batch.result = await self._start(self._item, batch.copies)
        except BaseException as exc:
            await let_go(batch.copies)
            let_go_of_buffers(exc)
            # Whoever is only interrupted finds the item where it was.
            if not isinstance(exc, Exception):
                raise
            self._end(exc)
        else:
            self._item = _NOTHING
            if self._ended:  # closed meanwhile
                await let_go(batch.copies)
                return
            self._under_way.append(batch)
            self._tell()

    async def _start(self, item: Any, copies: list[Started]) -> Any:
        """Returns the item with the arrays that its own go to; nothing of use if it has been closed meanwhile."""
        search = Search(self._way.side)
        steps = search.steps(item)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                place = end.value
                break
            await anyio.lowlevel.checkpoint()
        results = []
        with anyio.CancelScope() as self._starting:
            for index, array in enumerate(search.arrays, 1):
                results.append(await self._way.start(array, copies))
                if index % _ARRAYS_A_TURN == 0 or self._ended:
                    await anyio.lowlevel.checkpoint()
        self._starting = None
        return item if place is None or self._ended else replaced(place, results)

    def _end(self, error: BaseException | None) -> None:
        """Nothing further comes from the source."""
        if not self._ended:  # else it was closed, and nobody asks any more
            self._ended = True
            self._error = error
        self._item = _NOTHING
        self._tell()

    async def _change(self) -> None:
        """Waits until a batch has come or gone. Only one at a time has reason to: none is there, or too many."""
        event = self._news = anyio.Event()
        await event.wait()

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()


def _checked_depth(depth: Any) -> int:
    try:
        number = operator.index(depth)
    except TypeError:
        raise TypeError(f"depth must be an int, not {type(depth).__qualname__}") from None
    if isinstance(depth, bool) or number < 1:
        raise ValueError(f"depth must be at least 1, not {depth!r}")
    return number
