# How a task of asyncio's waits for an operation. It is here, not in _dispatcher.py, because that is much of what a
# crowd of small copies costs (docs/explanation/measurements.md).


@cython.final
cdef class Resolver:
    """Gives a future of asyncio's its result when it is called, unless the future is done."""
    cdef object _future

    def __cinit__(self, object future):
        self._future = future

    def __call__(self):
        if not self._future.done():
            self._future.set_result(None)


async def wait(Operation operation, loop, dispatcher, *, timed=None, failed=None):
    """Waits for the outcome of an operation that has been submitted to the loop's queue, and returns its code.

    With ``failed`` it returns ``None``, or raises what that makes of a code. ``timed`` makes something from the future
    that is waited for, which is stopped in the end. A cancellation ends the wait at once where nothing of the caller's
    has been touched yet, and else as soon as the library has let go of it.
    """
    cdef int cancelled
    if not operation.finished:  # while another one was waited for
        future = loop.create_future()
        operation.wake = Resolver.__new__(Resolver, future)
        timer = None if timed is None else timed(future)
        try:
            await future
        except BaseException as exc:
            if not operation.finished:
                cancelled = operation.cancel()
                # The frame of a coroutine that is being closed cannot wait.
                if cancelled != <int>core.Cancelled.kMustWait or isinstance(exc, GeneratorExit):
                    operation.abandon(
                        untouched=cancelled == <int>core.Cancelled.kUntouched,
                        only_read=cancelled == <int>core.Cancelled.kDropped,
                    )
                else:
                    await dispatcher.let_go(operation)
            raise
        finally:
            if timer is not None:
                timer.stop()
    code = operation.resolve()
    if failed is None:
        return code
    if code:
        raise failed(code)
