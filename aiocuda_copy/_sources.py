"""What batches come from: sync and async iterables, advanced one item at a time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

import anyio
import anyio.to_thread

from ._threads import run_to_end

__all__ = ["AsyncSource", "SyncSource", "source_of"]

_END = object()


class AsyncSource:
    """An async iterable."""

    def __init__(self, iterable: Any) -> None:
        self._iterator = aiter(iterable)
        self._was_cancelled = False

    async def next(self) -> Any:
        try:
            return await anext(self._iterator)
        except anyio.get_cancelled_exc_class():
            # A generator that lets it pass has ended.
            self._was_cancelled = getattr(self._iterator, "ag_frame", self) is None
            raise
        except StopAsyncIteration:
            if self._was_cancelled:
                raise RuntimeError(
                    "a wait for the next item was cancelled, and the async generator ended by that; in "
                    "'async with prefetch(...)' or 'async with collect(...)' it goes on"
                ) from None
            raise

    async def aclose(self) -> None:
        aclose = getattr(self._iterator, "aclose", None)
        if aclose is not None:
            await aclose()


class SyncSource:
    """A sync iterable, whose every step is a worker thread's, because it may block.

    The thread leaves what it has found here: a waiter whose task was cancelled by asyncio itself is gone when the
    thread is done, and the next one finds it.
    """

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable
        self._iterator: Any = None
        self._found: tuple[Any, BaseException | None] | None = None
        self._lock = threading.Lock()

    async def next(self) -> Any:
        if self._found is None:
            # Of its own: one that blocks for long must not take a thread away from others.
            await anyio.to_thread.run_sync(self._step, limiter=anyio.CapacityLimiter(1))
        assert self._found is not None
        (item, error), self._found = self._found, None
        if error is not None:
            try:
                if isinstance(error, StopAsyncIteration):  # which would be taken for the end
                    raise RuntimeError("the iterable raised StopAsyncIteration") from error
                raise error
            finally:
                # The traceback holds this frame: a cycle, which would keep the batches before it from being freed.
                del error
        if item is _END:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await run_to_end(self._close)

    def _step(self) -> None:
        with self._lock:
            if self._found is not None:
                return
            try:
                if self._iterator is None:
                    self._iterator = iter(self._iterable)
                self._found = next(self._iterator, _END), None
            except BaseException as exc:
                self._found = None, exc

    def _close(self) -> None:
        with self._lock:
            iterator = self._iterable if self._iterator is None else self._iterator
            self._iterable = self._iterator = ()
            if isinstance(iterator, Generator):
                iterator.close()
            # Some wait for their workers when they are dropped, torch's among them: that is for this thread to do.
            del iterator


def source_of(iterable: Any) -> AsyncSource | SyncSource:
    """The source for an iterable of either kind.

    Raises
    ------
    TypeError
        It is of neither.
    """
    if hasattr(type(iterable), "__aiter__"):
        return AsyncSource(iterable)
    if hasattr(type(iterable), "__iter__") or hasattr(type(iterable), "__getitem__"):
        return SyncSource(iterable)
    raise TypeError(f"an iterable or an async iterable is needed, not {type(iterable).__qualname__}")
