"""What a task of asyncio's awaits: an iterator, in place of a coroutine, which must behave as one does."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from calls import copies_enqueued, on_device, pinned_array, until
from kinds import one_loop, stream_of

from aiocuda_copy import _dispatcher, _driver, _native

pytestmark = one_loop

QUOTA = _native.Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False)


def submitted(dispatcher: _dispatcher.Dispatcher, behind: int | None = None) -> _native.Operation:
    """One without parts, which touches nothing, behind what is in a stream."""
    operation = _native.Operation(QUOTA)
    if behind is None:
        operation.synchronize_quota()
    else:
        assert operation.mark(behind, 0, own=True, always=True) == 0
    operation.submit(0, dispatcher.queue, [])
    return operation


@pytest.fixture
async def dispatcher(emulated_gpu: Any) -> _dispatcher.Dispatcher:
    _driver.ensure()
    return _dispatcher.current()


async def test_it_is_awaited_once(dispatcher: _dispatcher.Dispatcher) -> None:
    wait = dispatcher.wait(submitted(dispatcher))
    assert await wait == 0
    with pytest.raises(RuntimeError, match="awaited already"):
        await wait


async def test_what_has_finished_before_does_not_suspend(dispatcher: _dispatcher.Dispatcher) -> None:
    operation = submitted(dispatcher)
    await until(lambda: operation.finished)
    iterator = dispatcher.wait(operation).__await__()
    with pytest.raises(StopIteration) as caught:
        next(iterator)
    assert caught.value.value == 0


async def test_what_a_failure_is_made_into(dispatcher: _dispatcher.Dispatcher, emulated_gpu: Any) -> None:
    loop = asyncio.get_running_loop()
    assert await _native.Wait(submitted(dispatcher), loop, dispatcher, failed=ValueError) is None
    with stream_of(0) as stream:
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        operation = submitted(dispatcher, behind=stream)
        operation.cancel()
        with pytest.raises(ValueError, match=str(_native.CANCELLED)):
            await _native.Wait(operation, loop, dispatcher, failed=ValueError)
        emulated_gpu.release(stream)


@pytest.mark.parametrize("thrown", [(KeyError,), (KeyError("x"),), (KeyError, "x"), (KeyError, KeyError("x"), None)])
async def test_an_exception_ends_it(dispatcher: _dispatcher.Dispatcher, thrown: tuple[Any, ...]) -> None:
    operation = submitted(dispatcher)
    iterator = dispatcher.wait(operation).__await__()
    future = next(iterator)
    with pytest.raises(KeyError) as caught:
        iterator.throw(*thrown)
    assert caught.value.args in ((), ("x",))
    assert operation.state == _native.State.ABANDONED
    await until(lambda: operation.state == _native.State.REAPED)
    assert not future.done()


async def test_closing_it_abandons_the_operation(dispatcher: _dispatcher.Dispatcher) -> None:
    never = submitted(dispatcher)
    dispatcher.wait(never).__await__().close()
    operation = submitted(dispatcher)
    iterator = dispatcher.wait(operation).__await__()
    next(iterator)
    iterator.close()
    iterator.close()
    assert operation.state == _native.State.ABANDONED
    await until(lambda: operation.state == _native.State.REAPED)
    await until(lambda: never.finished)


@pytest.mark.parametrize("end", ["close", "throw"])
async def test_closing_it_while_a_piece_is_in_flight_holds_nothing(
    dispatcher: _dispatcher.Dispatcher, emulated_gpu: Any, end: str
) -> None:
    nbytes = 100_000
    source, target = on_device(nbytes, 1), pinned_array(nbytes, 2)
    emulated_gpu.hold()
    operation = _native.Operation(QUOTA)
    operation.add_part(0, [(target.ctypes.data, source.ptr, nbytes, 1, 1, 0, 0, 0, 0, 0)])
    operation.submit(0, dispatcher.queue, [source, target])
    iterator = dispatcher.wait(operation).__await__()
    next(iterator)
    await until(lambda: copies_enqueued(emulated_gpu) > 0)
    error = KeyError()
    iterator.throw(error)  # which waits until the piece has landed
    if end == "close":
        iterator.close()
    else:
        with pytest.raises(GeneratorExit):
            iterator.throw(GeneratorExit())
    assert operation.state == _native.State.ABANDONED
    held = gc.get_referents(iterator)
    assert operation not in held
    assert error not in held
    emulated_gpu.release()
    await until(lambda: operation.state == _native.State.REAPED)
