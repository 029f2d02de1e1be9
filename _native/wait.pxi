# How a task of asyncio's waits for an operation. It is here, not in _dispatcher.py, and no coroutine, because that is
# much of what a crowd of small copies costs (docs/explanation/measurements.md).

cdef object kEnd = object()


@cython.final
@cython.freelist(64)
cdef class Wait:
    """What is awaited, once, for the outcome of an operation that has been submitted to the loop's queue: its code.

    With ``failed`` it is ``None``, or raises what that makes of a code. ``timed`` makes something from the future that
    is waited for, which is stopped in the end. A cancellation ends the wait at once where nothing of the caller's has
    been touched yet, and else as soon as the library has let go of it.
    """
    cdef Operation _operation
    cdef object _loop
    cdef object _dispatcher
    cdef object _timed
    cdef object _failed
    cdef object _future
    # Of the future, and of what lets go of the operation after a cancellation.
    cdef object _iterator
    cdef object _timer
    # That is raised when the operation has been let go of.
    cdef object _raised_then

    def __cinit__(self, Operation operation, loop, dispatcher, *, timed=None, failed=None):
        self._operation, self._loop, self._dispatcher = operation, loop, dispatcher
        self._timed, self._failed = timed, failed

    def __await__(self):
        return self

    def __call__(self):
        """The outcome is there."""
        if not self._future.done():
            self._future.set_result(None)

    def __next__(self):
        if self._iterator is None:
            if self._operation is None:
                raise RuntimeError("it has been awaited already")
            if not self._operation.finished:  # while another one was waited for
                self._future = self._loop.create_future()
                self._operation.wake = self
                self._iterator = self._future.__await__()
                if self._timed is not None:
                    self._timer = self._timed(self._future)
        if self._iterator is not None:
            try:
                yielded = next(self._iterator, kEnd)
            except BaseException as exc:
                yielded = self.interrupted(exc)
            if yielded is not kEnd:
                return yielded
        result = self.outcome()
        if result is None:
            raise StopIteration  # without an exception being made
        raise StopIteration(result)

    def throw(self, kind, value=None, traceback=None):
        """Raises an exception where the task waits."""
        if value is None:
            value = kind() if isinstance(kind, type) else kind
        elif not isinstance(value, BaseException):
            value = kind(value)
        if traceback is not None:
            value = value.with_traceback(traceback)
        if self._raised_then is None:
            yielded = self.interrupted(value)
        else:
            try:
                yielded = self._iterator.throw(value)
            except StopIteration:
                yielded = kEnd
            except BaseException as exc:
                yielded = self.interrupted(exc)
        if yielded is kEnd:
            raise StopIteration(self.outcome())
        return yielded

    def close(self):
        """Ends the wait, which is that of a coroutine that is being closed."""
        if self._raised_then is not None:
            self._iterator.close()
            self._operation = self._iterator = self._raised_then = None
        elif self._iterator is not None:
            try:
                self.interrupted(GeneratorExit())
            except GeneratorExit:
                pass

    cdef object interrupted(self, exc):
        """Returns what to yield until the operation has been let go of, or raises."""
        cdef int cancelled
        cdef Operation operation = self._operation
        letting_go = self._raised_then is not None
        # Who keeps the exception keeps the frame that has this, which must hold nothing then.
        self._operation = self._iterator = self._raised_then = None
        if letting_go:
            raise exc
        self.stop()
        if not operation.finished:
            cancelled = operation.cancel()
            # The frame of a coroutine that is being closed cannot wait.
            if cancelled == <int>core.Cancelled.kMustWait and not isinstance(exc, GeneratorExit):
                self._raised_then, self._operation = exc, operation
                self._iterator = self._dispatcher.let_go(operation).__await__()
                return next(self._iterator, kEnd)
            operation.abandon(
                untouched=cancelled == <int>core.Cancelled.kUntouched,
                only_read=cancelled == <int>core.Cancelled.kDropped,
            )
        raise exc

    cdef void stop(self):
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.stop()

    cdef object outcome(self):
        cdef Operation operation = self._operation
        self._operation = self._iterator = self._future = None
        self.stop()
        raised, self._raised_then = self._raised_then, None
        if raised is not None:
            raise raised
        code = operation.resolve()
        if self._failed is None:
            return code
        if code:
            raise self._failed(code)
        return None
