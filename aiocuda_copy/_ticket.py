"""The state table of one operation, and what it keeps alive. No driver, no loop.

::

    PENDING   --signal-->  SIGNALLED --resolve--> RESOLVED      the copy is done, the await returns
    PENDING   --signal-->  FAILED                               the copy failed, the await raises
    PENDING   --abandon--> ABANDONED --signal-->  REAPED        the await was cancelled before the copy was done

1. A native thread decides an outcome once and pushes it; only the loop's thread changes a state. So "cancelled at the
   moment of completion" has one order, the one in which the loop sees the two.
2. Owners are held from submission until the completion has been drained, or until the operation has been abandoned
   before anything was touched. One that is abandoned later may still be read by the device until its piece has landed,
   and so may one that has come by the quicker of two roads, where the other takes long: that is signalled after a
   while, and keeps its owners until the other road is done with them.
3. After a fault the completion says that the device might still touch the memory. Then the owners are never dropped.
   Else the list of owners is emptied: the frames of a traceback, which hold the list, must not keep a buffer exported.
4. Dropping owners may run a framework's free. It happens on the loop's thread, never on the engine's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

__all__ = ["State", "Ticket", "leaked_owners"]


class State(enum.IntEnum):
    """See the table at the top of the module."""

    PENDING = 0
    SIGNALLED = enum.auto()
    RESOLVED = enum.auto()
    FAILED = enum.auto()
    ABANDONED = enum.auto()
    REAPED = enum.auto()


# By event and state: hashing a member of an enumeration takes longer than all the rest of a transition.
_TRANSITIONS: dict[str, list[State | None]] = {
    event: [targets.get(state) for state in State]
    for event, targets in {
        "signal": {State.PENDING: State.SIGNALLED, State.ABANDONED: State.REAPED},
        "fail": {State.PENDING: State.FAILED, State.ABANDONED: State.REAPED},
        "abandon": {State.PENDING: State.ABANDONED},
        "resolve": {State.SIGNALLED: State.RESOLVED},
    }.items()
}
_PENDING, _ABANDONED, _SIGNALLED = State.PENDING, State.ABANDONED, State.SIGNALLED

# What a lost context's device might still write to. It is never emptied, on purpose.
leaked_owners: list[Any] = []


class Ticket:
    """One submitted operation as the loop's side sees it."""

    __slots__ = ("code", "owners", "state", "still_read", "targets", "wake")

    def __init__(self, owners: list[Any], targets: int = 0) -> None:
        self.state = _PENDING
        self.owners: list[Any] | None = owners
        # So many of them, the first ones, are not needed while the copy is only read.
        self.targets = targets
        self.still_read = False
        self.code = 0
        # Called on the loop's thread when the outcome is there; None when nobody waits.
        self.wake: Callable[[], None] | None = None

    def _move(self, event: str) -> None:
        state = _TRANSITIONS[event][self.state]
        if state is None:
            raise AssertionError(f"an operation that is {self.state.name} cannot {event}")
        self.state = state

    @property
    def finished(self) -> bool:
        """Whether the library has let go of the caller's memory."""
        return self.state is not _PENDING and self.state is not _ABANDONED

    def signal(self, code: int, leaked: bool, *, still_read: bool = False) -> None:
        """The completion has been drained: 0 for success, else a code. Drops the owners, and wakes who waits.

        The owners of what is still read are dropped by :meth:`release`.
        """
        self._move("fail" if code else "signal")
        self.code = code
        if still_read:
            self.still_read = True
            if self.owners is not None:
                del self.owners[: self.targets]
        else:
            self.release(leaked)
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()

    def release(self, leaked: bool) -> None:
        """The device no longer touches the memory, or, after a fault, might for good."""
        owners, self.owners = self.owners, None
        if leaked and owners is not None:
            leaked_owners.append(owners)
        elif owners is not None:
            owners.clear()

    def resolve(self) -> int:
        """The await returns, or raises for the code that this returns."""
        if self.state is _SIGNALLED:
            self._move("resolve")
        return self.code

    def abandon(self, *, untouched: bool) -> None:
        """The await ends before the operation does, which is held on to unless it never touches anything."""
        self._move("abandon")
        self.wake = None
        if untouched and self.owners is not None:
            self.owners.clear()
            self.owners = None
