"""Work in threads that is waited for, whoever is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

__all__ = ["once", "run_to_end"]

T = TypeVar("T")


def once(work: Callable[[], T]) -> Callable[[], T]:
    """What runs it a single time, and has let go of it when it returns.

    A thread keeps what it was given for a moment after the waiter has been told, and what that holds: a buffer would
    stay exported after the await.
    """
    held = [work]
    return lambda: held.pop()()


async def run_to_end(work: Callable[[], T]) -> T:
    """Runs in a thread of its own, and is waited for also where the caller is cancelled.

    asyncio's own cancellation does not wait for a thread; the task group does. Nor does it keep the thread from being
    started, where it comes right behind this call: what closes something has to be done.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    work = once(work)
    done: list[T] = []
    errors: list[BaseException] = []

    async def run() -> None:
        try:
            with anyio.CancelScope(shield=True):
                done.append(await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1)))
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as exc:  # the group would wrap it
            errors.append(exc)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
    try:
        if errors:
            raise errors[0]
        return done[0]
    finally:
        errors.clear()  # the traceback holds this frame
