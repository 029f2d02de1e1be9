"""The state table of an operation, against a model of its own: every order of what can happen to one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiocuda_copy._native import State, Ticket, leaked_owners


class Owner:
    pass


class OneOperation(RuleBasedStateMachine):
    """What the loop's side does with a ticket: the engine completes it once, the await waits, is cancelled, returns."""

    def __init__(self) -> None:
        super().__init__()
        owner = Owner()
        self.owner = weakref.ref(owner)
        # A traceback's frames hold the list, whatever becomes of the ticket.
        self.frame: list[Any] = [owner]
        self.ticket = Ticket()
        self.ticket.hold(self.frame)
        self.woken = 0
        self.ticket.wake = self._wake
        self.completed = self.abandoned = self.resolved = self.untouched = self.leaked = False
        self.code = 0
        self.kept_before = len(leaked_owners)

    def _wake(self) -> None:
        # The await may look at the ticket from here on.
        assert self.ticket.finished
        self.woken += 1

    @rule(code=st.sampled_from([0, -1, 1, 700]), leaked=st.booleans())
    def complete(self, code: int, leaked: bool) -> None:
        if self.completed:
            with pytest.raises(AssertionError):
                self.ticket.signal(code, leaked)
            return
        self.ticket.signal(code, leaked)
        self.completed, self.code = True, code
        self.leaked = leaked and not self.untouched

    @rule(untouched=st.booleans())
    def abandon(self, untouched: bool) -> None:
        if self.completed or self.abandoned:
            with pytest.raises(AssertionError):
                self.ticket.abandon(untouched=untouched)
            return
        self.ticket.abandon(untouched=untouched)
        self.abandoned, self.untouched = True, untouched

    @precondition(lambda self: self.completed and not self.abandoned)
    @rule()
    def resolve(self) -> None:
        assert self.ticket.resolve() == self.code
        self.resolved = True

    @invariant()
    def state(self) -> None:
        if self.abandoned:
            expected = State.REAPED if self.completed else State.ABANDONED
        elif not self.completed:
            expected = State.PENDING
        elif self.code:
            expected = State.FAILED
        else:
            expected = State.RESOLVED if self.resolved else State.SIGNALLED
        assert self.ticket.state is expected
        assert self.ticket.finished == self.completed

    @invariant()
    def woken_once(self) -> None:
        assert self.woken == (self.completed and not self.abandoned)
        assert self.completed or self.abandoned or self.ticket.wake is not None

    @invariant()
    def owners(self) -> None:
        held = self.leaked or not (self.completed or self.untouched)
        assert (self.owner() is not None) == held
        assert len(leaked_owners) == self.kept_before + self.leaked

    def teardown(self) -> None:
        del leaked_owners[self.kept_before :]
        self.frame.clear()
        assert self.owner() is None


pytestmark = pytest.mark.hypothesis

TestOneOperation = OneOperation.TestCase


def test_an_abandoned_one_wakes_nobody() -> None:
    ticket = Ticket()
    ticket.wake = lambda: pytest.fail("nobody waits")
    ticket.abandon(untouched=False)
    ticket.signal(0, False)
    assert ticket.state is State.REAPED


def test_transitions_say_what_they_refuse() -> None:
    ticket = Ticket()
    ticket.signal(0, False)
    with pytest.raises(AssertionError, match="SIGNALLED cannot abandon"):
        ticket.abandon(untouched=True)
