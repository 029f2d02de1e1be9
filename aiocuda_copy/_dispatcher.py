"""From the native completion queue to the awaiting task: one dispatcher for each running loop.

A dispatcher has a queue of its own, whose descriptor the loop watches. The reader stays registered as long as the loop
lives: registering it for each await would cost more than the rest of the Python path. Queues are recycled when their
loop is closed and nothing is outstanding on them, and their descriptors are never closed, because a native thread may
be about to write to one.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel

from . import _native

__all__ = ["Dispatcher", "current"]

# One round of the loop takes so many completions: small results are copied out here, up to 32 KiB each.
_MOST_A_ROUND = 64
# progress() is called at most 20 times a second (api.md).
_PROGRESS_PERIOD = 0.05
_ANYIO_BACKEND = "anyio._backends._asyncio"
# What Operation.cancel() returns.
_MUST_WAIT, _ONLY_READ, _UNTOUCHED = 0, 1, 2

_lock = threading.Lock()
# By the identity of the loop, which another one may have when the loop is gone, or of trio's token.
_dispatchers: dict[int, Any] = {}
_orphans: list[_native.Queue] = []
_free_queues: list[_native.Queue] = []


class Dispatcher:
    """What the backends share. Every method is called on the loop's thread."""

    def __init__(self) -> None:
        self.queue = _take_queue()

    def wait(self, operation: _native.Operation, on_progress: Callable[[], None] | None = None) -> Awaitable[int]:
        """Waits for the outcome of what has been submitted to this dispatcher's queue, and returns its code.

        A cancellation ends the wait at once where nothing of the caller's has been touched yet, and else as soon as
        the library has let go of it.
        """
        raise NotImplementedError

    def scope_cancelled(self) -> bool:
        """Whether a scope of anyio's or trio's around the running task has been cancelled."""
        raise NotImplementedError

    async def checkpoint(self) -> None:
        """Suspends the running task for a turn of the loop."""
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            self.queue.had_a_turn()

    def closed(self) -> bool:
        """Whether the loop will never run again."""
        raise NotImplementedError


class _Asyncio(Dispatcher):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = weakref.ref(loop)
        loop.add_reader(self.queue.fileno(), self._on_readable)

    async def checkpoint(self) -> None:
        # anyio's would load its backend, which every later call would then have to ask for cancelled scopes.
        try:
            await asyncio.sleep(0)
        finally:
            self.queue.had_a_turn()

    def closed(self) -> bool:
        loop = self._loop()
        return loop is None or loop.is_closed()

    def scope_cancelled(self) -> bool:
        # It tells its task in a later turn of the loop. The backend is asked itself: to find out which one runs takes
        # anyio as long as a small copy.
        backend = sys.modules.get(_ANYIO_BACKEND)
        # None of that while another thread imports it.
        backend_class = getattr(backend, "backend_class", None)
        if backend_class is None or asyncio.current_task() is None:
            return False
        return bool(backend_class.current_effective_deadline() == -math.inf)

    def _on_readable(self) -> None:
        more = True
        try:
            more = self.queue.drain(_MOST_A_ROUND)
        finally:
            # Also where an interrupt has come between: nobody would wake the loop for those that are left.
            loop = self._loop()
            if more and loop is not None:
                loop.call_soon(self._on_readable)

    def wait(self, operation: _native.Operation, on_progress: Callable[[], None] | None = None) -> Awaitable[int]:
        loop = asyncio.get_running_loop()
        timed = None if on_progress is None else partial(_Timer, loop, on_progress)
        return _native.Wait(operation, loop, self, timed=timed)

    async def let_go(self, operation: _native.Operation) -> None:
        """Waits until the library has let go of the memory of an operation that has been cancelled, and so has the
        task."""
        # Under anyio a swallowed cancellation is delivered again in every iteration, unless a scope of its own shields.
        # A scope that is never left keeps its task alive, so there is none where nobody else has any.
        scope = anyio.CancelScope(shield=True) if _ANYIO_BACKEND in sys.modules else None
        if scope is not None:
            scope.__enter__()
        while not operation.finished:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            operation.wake = partial(_end, future)
            try:
                await future
            except asyncio.CancelledError:
                continue
            except GeneratorExit:
                # Maybe the loop is closed: then there is no task any more that could leave the scope.
                operation.abandon(untouched=False)
                raise
        if scope is not None:
            scope.__exit__(None, None, None)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Timer:
    """Calls a function now and then until stopped; its exception goes to the future."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, function: Callable[[], None], future: asyncio.Future[None]
    ) -> None:
        self._loop = loop
        self._function = function
        self._future = future
        self._handle = loop.call_later(_PROGRESS_PERIOD, self._tick)

    def _tick(self) -> None:
        if self._future.done():
            return
        try:
            self._function()
        except BaseException as exc:
            # It may have cancelled its task before it raised. And no future takes a StopIteration.
            if not self._future.done():
                self._future.set_exception(RuntimeError(repr(exc)) if isinstance(exc, StopIteration) else exc)
            return
        self._handle = self._loop.call_later(_PROGRESS_PERIOD, self._tick)

    def stop(self) -> None:
        self._handle.cancel()


class _Trio(Dispatcher):
    def __init__(self, token: Any) -> None:
        super().__init__()
        import trio

        self._trio = trio
        self._token = token  # which keeps its identity from being another's
        self._ended = False
        trio.lowlevel.spawn_system_task(self._run, name="aiocuda_copy dispatcher")

    def closed(self) -> bool:
        return self._ended

    def scope_cancelled(self) -> bool:
        return bool(self._trio.current_effective_deadline() == -math.inf)

    async def _run(self) -> None:
        try:
            while True:
                await self._trio.lowlevel.wait_readable(self.queue.fileno())
                while self.queue.drain(_MOST_A_ROUND):
                    await self._trio.lowlevel.cancel_shielded_checkpoint()
        finally:
            self._ended = True

    async def wait(self, operation: _native.Operation, on_progress: Callable[[], None] | None = None) -> int:
        if operation.finished:
            return operation.resolve()
        trio = self._trio
        event = trio.Event()
        operation.wake = event.set
        try:
            while not event.is_set():
                if on_progress is None:
                    await event.wait()
                    break
                with trio.move_on_after(_PROGRESS_PERIOD):
                    await event.wait()
                    break
                on_progress()
        except BaseException as exc:
            if not operation.finished:
                cancelled = operation.cancel()
                if cancelled != _MUST_WAIT or isinstance(exc, GeneratorExit):
                    operation.abandon(untouched=cancelled == _UNTOUCHED, only_read=cancelled == _ONLY_READ)
                else:
                    with trio.CancelScope(shield=True):
                        await event.wait()
            raise
        return operation.resolve()


def _in_trio_run() -> bool:
    # Another thread may be importing it.
    from trio.lowlevel import in_trio_run

    return in_trio_run()


def current() -> Dispatcher:
    """The dispatcher of the loop that runs in this thread.

    Raises
    ------
    RuntimeError
        When no loop runs.
    """
    loop = asyncio._get_running_loop()
    # Trio may be a guest of an asyncio loop, but never runs in one of its tasks.
    if "trio" in sys.modules and (loop is None or asyncio.current_task(loop) is None) and _in_trio_run():
        token = sys.modules["trio"].lowlevel.current_trio_token()
        guest: _Trio | None = _dispatchers.get(id(token))
        return _register(_Trio, token) if guest is None or guest.closed() else guest
    known: _Asyncio | None = _dispatchers.get(id(loop))
    if known is None or known._loop() is not loop:
        return _register(_Asyncio, asyncio.get_running_loop())
    return known


def _register(kind: Callable[[Any], Dispatcher], loop: Any) -> Dispatcher:
    reclaim()
    dispatcher = kind(loop)
    with _lock:
        _dispatchers[id(loop)] = dispatcher
    return dispatcher


def _take_queue() -> _native.Queue:
    with _lock:
        if _free_queues:
            return _free_queues.pop()
    return _native.Queue(pipe=os.environ.get("AIOCUDA_COPY_WAKE") == "pipe")


def reclaim() -> None:
    """Takes back the queues of loops that were closed, and what had still been in flight on them."""
    with _lock:
        closed = [key for key, dispatcher in _dispatchers.items() if dispatcher.closed()]
        _orphans.extend(_dispatchers.pop(key).queue for key in closed)
        orphans, _orphans[:] = _orphans[:], []
    for queue in orphans:
        while queue.drain(_MOST_A_ROUND, discard=True):
            pass
        with _lock:
            (_orphans if queue.outstanding else _free_queues).append(queue)
