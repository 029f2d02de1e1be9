"""Anywhere: loops in threads, one after another, closed early, in a forked child; and no loop is ever held up."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import uvloop
from calls import (
    BULK,
    PATIENCE,
    SMALL,
    WAYS,
    Stream,
    calls,
    check,
    content,
    copies_enqueued,
    on_device,
    pinned_array,
    streams_with,
    turns,
    until,
    use_device,
)
from cuda.bindings import driver

from aiocuda_copy import Copier, _dispatcher, copy_to_device, copy_to_host, synchronize
from aiocuda_copy.testing import DeviceArray, Emulator

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def run_script(script: str, *arguments: str) -> str:
    """Runs a script in a process of its own, on the emulated driver, and returns what it printed."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "AIOCUDA_COPY_DRIVER": "emulated", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_trio_as_the_guest_of_asyncio() -> None:
    """Each loop's copies are resolved by itself, whichever of the two runs in the thread at the moment."""
    trio = pytest.importorskip("trio")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()
        guests: list[Any] = []

        async def guest() -> None:
            for _ in range(3):
                await there_and_back(1)
                guests.append(_dispatcher.current())

        trio.lowlevel.start_guest_run(
            guest, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=ended.set_result
        )
        await there_and_back(2)
        assert isinstance(_dispatcher.current(), _dispatcher._Asyncio)
        (await ended).unwrap()
        assert {type(one) for one in guests} == {_dispatcher._Trio}

    asyncio.run(main())


async def there_and_back(seed: int, count: int = 10) -> None:
    for k in range(count):
        nbytes = (16, SMALL, 100_000)[k % 3]
        value = (seed + k) % 255 + 1
        device, dst = DeviceArray(nbytes), bytearray(nbytes)
        await copy_to_device(bytes([value]) * nbytes, device, stream=0)
        await copy_to_host(device, dst, stream=0)
        assert dst == bytes([value]) * nbytes


async def many(seed: int) -> None:
    async with anyio.create_task_group() as group:
        for k in range(8):
            group.start_soon(there_and_back, seed + 10 * k)


def test_loops_in_threads_at_once(gpu: Emulator | None) -> None:
    trio = pytest.importorskip("trio")

    def run(number: int) -> None:
        if number % 3 == 2:
            trio.run(many, number)
            return
        with asyncio.Runner(loop_factory=LOOPS[number % 3]) as runner:
            runner.run(many(number))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(run, range(6)))


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_one_loop_after_another(gpu: Emulator | None, loop_factory: Callable[[], Any]) -> None:
    def run() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(there_and_back(1, 3))

    run()
    run()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        run()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.asyncio_only
async def test_from_a_fresh_thread(gpu: Emulator | None) -> None:
    await asyncio.to_thread(lambda: asyncio.run(there_and_back(3)))
    await there_and_back(4)


def test_without_a_loop() -> None:
    coroutine = copy_to_host(on_device(SMALL, 1), bytearray(SMALL))
    with pytest.raises(RuntimeError, match="no running event loop"):
        coroutine.send(None)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks(gpu: Emulator | None) -> None:
    async def run() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        await many(5)
        src, dst = on_device(SMALL, 1), bytearray(SMALL)
        task = asyncio.create_task(copy_to_host(src, dst, stream=0))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await there_and_back(6)

    asyncio.run(run())


def quiet(task: asyncio.Task[Any]) -> None:
    """Takes asyncio's own complaint about a task that is left pending from the test's account."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("loop_factory", LOOPS)
@pytest.mark.parametrize("state", ["waiting", "in flight", "being cancelled"])
def test_a_loop_that_is_closed_with_copies_in_flight(
    emulated_gpu: Emulator, loop_factory: Callable[[], Any], state: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = Stream()
    before = emulated_gpu.live()["device_allocations"]
    sides = [way.memory(1, 2) for way in WAYS]
    if state == "waiting":
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
    else:
        emulated_gpu.hold()

    async def begin(sides: list[Any]) -> None:
        tasks = [asyncio.ensure_future(way.copy(*side, stream)) for way, side in zip(WAYS, sides, strict=True)]
        await asyncio.sleep(0)
        for task in tasks:
            quiet(task)
        if state != "waiting":
            await until(lambda: copies_enqueued(emulated_gpu) > 2)
        if state == "being cancelled":
            for task in tasks:
                task.cancel()
            await turns(3)

    loop = loop_factory()
    loop.run_until_complete(begin(sides))
    loop.close()
    del loop
    gc.collect()
    emulated_gpu.release()
    emulated_gpu.settle()
    asyncio.run(there_and_back(7, 3))

    async def all_reclaimed() -> None:
        await synchronize(stream)

        def reclaimed() -> bool:
            _dispatcher.reclaim()
            return not _dispatcher._orphans

        await until(reclaimed)

    asyncio.run(all_reclaimed())
    del sides
    gc.collect()
    # A scope of anyio's that is never left keeps its task, and that the frames of its coroutine.
    if state != "being cancelled":
        assert emulated_gpu.live()["device_allocations"] == before
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [300])
def test_a_loop_that_does_not_come_round_holds_up_no_other(emulated_gpu: Emulator, number: int) -> None:
    started, release = threading.Event(), threading.Event()
    src = on_device(SMALL, 1)

    def stalled() -> None:
        async def run() -> None:
            stream = Stream()
            emulated_gpu.hold(stream)
            emulated_gpu.kernel(stream)
            targets = [bytearray(SMALL) for _ in range(number)]
            tasks = [asyncio.ensure_future(copy_to_host(src, dst, stream=stream)) for dst in targets]
            await turns(2)
            emulated_gpu.release(stream)
            started.set()
            release.wait(PATIENCE)
            await asyncio.gather(*tasks)
            assert [index for index, dst in enumerate(targets) if dst != bytes([1]) * SMALL] == []

        asyncio.run(run())

    thread = ThreadPoolExecutor(1)
    future = thread.submit(stalled)
    try:
        assert started.wait(PATIENCE)

        async def run() -> None:
            async with Copier(inline=False) as copier, asyncio.timeout(PATIENCE / 2):
                for _ in range(3):
                    dst = bytearray(SMALL)
                    await copier.copy_to_host(src, dst, stream=Stream())
                    assert dst == bytes([1]) * SMALL
                    await copier.copy_to_device(dst, on_device(SMALL, 0), stream=Stream())

        asyncio.run(run())
    finally:
        release.set()
        future.result()
        thread.shutdown()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("as_object", [False, True])
async def test_ten_thousand_awaits_do_not_hold_the_loop(emulated_gpu: Emulator, as_object: bool) -> None:
    asyncio.get_running_loop().set_debug(False)
    stream = Stream()
    src = on_device(16, 1)
    pinned = pinned_array(16, 0)
    tasks = []
    emulated_gpu.reset()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    for k in range(10_000):
        dst = pinned if k % 2 else bytearray(16)
        named = stream if as_object and k < 1000 else stream.handle
        tasks.append(asyncio.ensure_future(copy_to_host(src, dst, stream=named)))
        if k % 500 == 499:
            await asyncio.sleep(0)
    await turns(3)
    assert not any(task.done() for task in tasks)
    own = threading.get_native_id()
    assert [wait for wait in emulated_gpu.waits() if wait.thread_id == own] == []
    emulated_gpu.release(stream)
    await asyncio.gather(*tasks)
    assert [wait for wait in emulated_gpu.waits() if wait.thread_id == own] == []


@pytest.mark.parametrize("way", WAYS, ids=repr)
async def test_no_kind_of_memory_makes_the_loop_wait(emulated_gpu: Emulator, way: Any) -> None:
    stream = Stream()
    sides = [way.memory(1, 2) for _ in range(3)]
    emulated_gpu.reset()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        running = [start(way.copy(*side, stream)) for side in sides]
        running.append(start(synchronize(stream)))
        await turns()
        waits = emulated_gpu.waits()
        emulated_gpu.release(stream)
        for call in running:
            await call.result()
        own = threading.get_native_id()
        assert [wait for wait in waits + emulated_gpu.waits() if wait.thread_id == own] == []
    assert all((content(dst) == 1).all() for _, dst in sides)


@pytest.mark.asyncio_only
async def test_copies_inside_calls_let_others_have_their_turn(gpu: Emulator | None) -> None:
    src, dst = on_device(16, 1), bytearray(16)
    others = row = longest = 0
    # What takes 8 µs may be done 25 times in 200. A real copy takes longer than 2.
    most = 100
    if gpu is not None:
        gpu.throttle(latency_us=8)
        most = 25

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    async with Copier() as copier:
        for _ in range(1000):
            before = others
            await copier.copy_to_host(src, dst, stream=0)
            row = row + 1 if others == before else 0
            longest = max(longest, row)
        assert copier.stats().completed == 1000
    task.cancel()
    assert longest <= most


@pytest.mark.asyncio_only
async def test_a_cancelled_scope_does_not_cancel_in_every_turn(emulated_gpu: Emulator) -> None:
    """Which anyio does until the task has left the scope, unless it is in one that shields."""
    src, dst = on_device(BULK, 1), bytearray(BULK)
    scope, tasks = anyio.CancelScope(), []

    async def copy() -> None:
        tasks.append(asyncio.current_task())
        with scope:
            await copy_to_host(src, dst)

    async with calls() as start:
        emulated_gpu.hold()
        call = start(copy())
        await until(lambda: bool(streams_with(emulated_gpu, "copy")))
        scope.cancel()
        await turns(100)
        # What is on the device is waited for.
        assert not call.ended
        assert tasks[0].cancelling() <= 2
        emulated_gpu.release()
        await call.end()


@pytest.mark.asyncio_only
async def test_a_thread_that_holds_the_gil_in_driver_calls_delays_and_hangs_nothing(gpu: Emulator | None) -> None:
    # In debug mode asyncio asks for the source files of every stack that it keeps; each question gives the GIL away.
    asyncio.get_running_loop().set_debug(False)
    use_device()
    result, address, _ = driver.cuGetProcAddress(b"cuStreamQuery", 12000, 0)
    check((result,))
    query = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)  # which keeps the GIL, unlike CFUNCTYPE
    stream = Stream()
    stop = threading.Event()

    def hog() -> None:
        use_device()
        while not stop.is_set():
            query(stream.handle)

    thread = threading.Thread(target=hog)
    thread.start()
    try:
        src = on_device(SMALL, 1)
        targets = [bytearray(SMALL) for _ in range(1000)]
        async with asyncio.timeout(60):
            for first in range(0, len(targets), 100):
                await asyncio.gather(
                    *(copy_to_host(src, dst, stream=stream.handle) for dst in targets[first : first + 100])
                )
    finally:
        stop.set()
        thread.join()
    assert [index for index, dst in enumerate(targets) if dst != bytes([1]) * SMALL] == []


@pytest.mark.emulated_only
def test_importing_starts_nothing() -> None:
    assert (
        run_script("""
        import os
        os.environ.pop("AIOCUDA_COPY_DRIVER")
        def state():
            threads = len(os.listdir("/proc/self/task"))
            descriptors = len(os.listdir("/proc/self/fd"))
            with open("/proc/self/maps") as maps:
                return threads, descriptors, "libcuda" in maps.read()
        import numpy, asyncio, anyio
        before = state()
        import aiocuda_copy
        copier = aiocuda_copy.Copier()
        assert state() == before, (before, state())
        print("nothing")
    """)
        == "nothing"
    )


FORK = """
    import asyncio, gc, os, sys
    import numpy as np
    import aiocuda_copy
    from aiocuda_copy import Copier, ForkedError, copy_batch, copy_to_device, copy_to_host, pinned_empty, synchronize
    from aiocuda_copy.testing import DeviceArray

    copier = Copier()
    array = host = None
    if sys.argv[1] == "used":
        array, host = DeviceArray.from_numpy(np.ones(64, np.uint8)), pinned_empty(64)
        asyncio.run(copy_to_host(array, host))
        asyncio.run(copier.copy_to_host(array, host))

    async def begin():
        batches = aiocuda_copy.prefetch([np.ones(64), np.ones(64)], depth=1)
        return batches, await anext(batches)

    held = list(asyncio.run(begin())) if sys.argv[1] == "used" else []

    def child():
        if array is None:
            device = DeviceArray.from_numpy(np.ones(64, np.uint8))
            assert (asyncio.run(copy_to_host(device)) == 1).all()
            return
        calls = [
            lambda: copy_to_host(array), lambda: copy_to_host(array, host), lambda: copy_to_device(host, array),
            lambda: copy_to_host(array, host, in_stream=True), lambda: copy_batch(0, [array], [host]),
            lambda: copy_batch(0, [], []), lambda: synchronize(0), lambda: copier.copy_to_host(array, host),
            lambda: copier.aclose(), lambda: Copier().copy_to_host(array, host),
            lambda: aiocuda_copy.pinned_empty_async(64),
        ]
        for call in calls:
            try:
                asyncio.run(call())
            except ForkedError:
                continue
            raise AssertionError("no ForkedError")
        try:
            pinned_empty(64)
        except ForkedError:
            pass
        else:
            raise AssertionError("no ForkedError")
        assert (np.asarray(host) == 1).all()
        unraisable = []
        sys.unraisablehook = unraisable.append
        held.clear()
        gc.collect()
        assert not unraisable, unraisable

    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as exc:
            import traceback
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    if array is not None:
        asyncio.run(copy_to_host(array, host))
    print("well")
"""


@pytest.mark.emulated_only
@pytest.mark.parametrize("parent", ["used", "untouched"])
def test_fork(parent: str) -> None:
    assert run_script(FORK, parent) == "well"


@pytest.mark.emulated_only
@pytest.mark.parametrize("end", ["return", "sys.exit(0)", "raise SystemExit", "os._exit(0)"])
def test_a_process_that_ends_with_copies_in_flight(end: str) -> None:
    assert (
        run_script(
            """
        import asyncio, os, sys
        from aiocuda_copy.testing import use_emulated_driver
        gpu = use_emulated_driver()
        from calls import WAYS, Stream, copies_enqueued, turns, until

        tasks = []

        async def main():
            stream, idle = Stream(), Stream()
            sides = [way.memory(1, 2) for way in WAYS + WAYS]
            gpu.hold()
            gpu.kernel(stream)
            for way, side in zip(WAYS + WAYS, sides):
                tasks.append(asyncio.ensure_future(way.copy(*side, idle if len(tasks) % 2 else stream)))
                tasks[-1]._log_destroy_pending = False
            await until(lambda: copies_enqueued(gpu) > 2)
            print("in flight", flush=True)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        exec("" if sys.argv[1] == "return" else sys.argv[1])
        """,
            end,
        )
        == "in flight"
    )


@pytest.mark.emulated_only
def test_a_pipe_serves_where_there_is_no_eventfd() -> None:
    assert (
        run_script("""
        import asyncio, os
        os.environ["AIOCUDA_COPY_WAKE"] = "pipe"
        from aiocuda_copy import _dispatcher, copy_to_host
        from calls import SMALL, on_device

        async def main():
            src = on_device(SMALL, 1)
            targets = [bytearray(SMALL) for _ in range(200)]
            await asyncio.gather(*(copy_to_host(src, dst, stream=0) for dst in targets))
            assert [index for index, dst in enumerate(targets) if dst != bytes([1]) * SMALL] == []
            print(os.readlink(f"/proc/self/fd/{_dispatcher.current().queue.fileno()}").partition(":")[0])

        asyncio.run(main())
    """)
        == "pipe"
    )


def test_loops_that_take_turns_in_a_thread_share_nothing_and_leak_nothing() -> None:
    src, loops = on_device(SMALL, 1), [asyncio.new_event_loop() for _ in range(2)]

    async def once() -> Any:
        dst = await copy_to_host(src, bytearray(SMALL))
        assert dst == bytes([1]) * SMALL
        return _dispatcher.current()

    try:
        first = [loop.run_until_complete(once()) for loop in loops]
        assert first[0].queue.fileno() != first[1].queue.fileno()
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert [loop.run_until_complete(once()) for loop in loops] == first
        assert len(os.listdir("/proc/self/fd")) == descriptors
    finally:
        for loop in loops:
            loop.close()


def test_while_another_thread_imports_anyios_backend() -> None:
    """What is half imported is not asked for scopes, and is, once it is there."""
    script = """
        import asyncio, sys, types
        import anyio
        from aiocuda_copy import copy_to_host
        from aiocuda_copy.testing import DeviceArray

        name = "anyio._backends._asyncio"

        async def main():
            device, host = DeviceArray.from_numpy(bytes(range(4))), bytearray(4)
            await copy_to_host(device, host)
            assert name not in sys.modules
            sys.modules[name] = types.ModuleType(name)
            for _ in range(100):
                await copy_to_host(device, host)
            del sys.modules[name]
            with anyio.CancelScope() as scope:
                scope.cancel()
                await copy_to_host(device, host)
                raise AssertionError
            assert scope.cancelled_caught
            print(name in sys.modules)

        asyncio.run(main())
    """
    assert run_script(script) == "True"
