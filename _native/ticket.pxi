# The state table of one operation, and what it keeps alive. No driver, no loop.
#
#     PENDING   --signal-->  SIGNALLED --resolve--> RESOLVED      the copy is done, the await returns
#     PENDING   --signal-->  FAILED                               the copy failed, the await raises
#     PENDING   --abandon--> ABANDONED --signal-->  REAPED        the await was cancelled before the copy was done
#
# 1. A native thread decides an outcome once and pushes it; only the loop's thread changes a state. So "cancelled at the
#    moment of completion" has one order, the one in which the loop sees the two.
# 2. Owners are held from submission until the completion has been drained, or until the operation has been abandoned
#    before anything was touched. One that is abandoned later may still be read by the device until its piece has
#    landed, and so may one that has come by the quicker of two roads, where the other takes long: that is signalled
#    after a while, and keeps its owners until the other road is done with them.
# 3. After a fault the completion says that the device might still touch the memory. Then the owners are never dropped.
#    Else the list of owners is emptied: the frames of a traceback, which hold the list, must not keep a buffer
#    exported.
# 4. Dropping owners may run a framework's free. It happens on the loop's thread, never on the engine's.

cdef enum:
    kPending
    kSignalled
    kResolved
    kFailed
    kAbandoned
    kReaped
    # What no transition leads to.
    kNowhere


class State(enum.IntEnum):
    """Of an operation, as the loop's side sees it."""

    PENDING = kPending
    SIGNALLED = kSignalled
    RESOLVED = kResolved
    FAILED = kFailed
    ABANDONED = kAbandoned
    REAPED = kReaped


# Calling the enumeration would take longer than a transition.
cdef tuple states = tuple(State)

# What a lost context's device might still write to. It is never emptied, on purpose.
leaked_owners = []


cdef class Ticket:
    """One operation as the loop's side sees it."""
    cdef int _state
    cdef list _owners
    # So many of them, the first ones, are not needed while the copy is only read.
    cdef Py_ssize_t _targets
    cdef bint _still_read
    cdef readonly int code
    """0, a driver's code, or ``CANCELLED``; valid once signalled."""
    cdef public object wake
    """Called on the loop's thread when the outcome is there; ``None`` when nobody waits."""

    @property
    def state(self):
        """See the table at the top of ``ticket.pxi``."""
        return states[self._state]

    @property
    def finished(self):
        """Whether the library has let go of the caller's memory."""
        return self._state != kPending and self._state != kAbandoned

    cpdef hold(self, list owners, Py_ssize_t targets=0):
        """Keeps the owners, of which the first ones may be said to be targets, until the completion."""
        self._owners, self._targets = owners, targets

    cdef int move(self, str event, int pending, int abandoned) except -1:
        cdef int target = kNowhere
        if self._state == kPending:
            target = pending
        elif self._state == kAbandoned:
            target = abandoned
        if target == kNowhere:
            raise AssertionError(f"an operation that is {self.state.name} cannot {event}")
        self._state = target
        return 0

    cpdef signal(self, int code, bint leaked, bint still_read=False):
        """The completion has been drained: 0 for success, else a code. Drops the owners, and wakes who waits.

        The owners of what is still read are dropped by :meth:`release`.
        """
        if code == 0:
            self.move("signal", kSignalled, kReaped)
        else:
            self.move("fail", kFailed, kReaped)
        self.code = code
        if still_read:
            self._still_read = True
            self.release_targets()
        else:
            self.release(leaked)
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()

    cdef void release_targets(self):
        """Nothing will be written any more."""
        if self._owners is not None:
            del self._owners[:self._targets]
        self._targets = 0

    cpdef release(self, bint leaked):
        """The device no longer touches the memory, or, after a fault, might for good."""
        owners, self._owners = self._owners, None
        if leaked and owners is not None:
            leaked_owners.append(owners)
        elif owners is not None:
            owners.clear()

    def resolve(self):
        """The await returns, or raises for the code that this returns."""
        if self._state == kSignalled:
            self._state = kResolved
        return self.code

    def abandon(self, *, bint untouched, bint only_read=False):
        """The await ends before the operation does, which is held on to unless it never touches anything, and of which
        the targets are let go where it only reads."""
        self.move("abandon", kAbandoned, kNowhere)
        self.wake = None
        if untouched:
            self.release(False)
        elif only_read:
            self.release_targets()
