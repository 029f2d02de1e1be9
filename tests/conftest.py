"""The matrix of event loops, and what every test is held to beyond its own assertions.

A test fails for what it leaves behind as well: an exception that only reached a loop's handler, a future or a task
whose exception nobody took, an exception in a thread or a destructor, a coroutine that was never awaited, an operation
that is still in flight, an open descriptor. How long a callback took is not judged: machines that run tests are busy.
"""

from __future__ import annotations

import asyncio
import asyncio.constants
import ctypes
import gc
import importlib.util
import inspect
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import pytest
import uvloop

from aiocuda_copy import _copier
from aiocuda_copy.testing import Emulator, emulated

# In debug mode a callback keeps the stack that it was made in; nobody looks at more than its last frame, and ten take a
# quarter of the tests' time.
asyncio.constants.DEBUG_STACK_DEPTH = 1

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile(
    "fuzz",
    parent=hypothesis.settings.get_profile("default"),
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "2000")),
)
hypothesis.settings.load_profile("default")

# The environment's own way to choose a driver would win over --driver in the processes that tests start.
os.environ.pop("AIOCUDA_COPY_DRIVER", None)


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
    return loop


# Debug mode checks that calls come from the loop's thread; one backend runs without, as programs do.
BACKENDS = [
    pytest.param(("asyncio", {"debug": True}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
]
if importlib.util.find_spec("trio"):
    BACKENDS.append(pytest.param(("trio", {"restrict_keyboard_interrupt_to_checkpoints": True}), id="trio"))
if sys.version_info >= (3, 12):
    BACKENDS.append(pytest.param(("asyncio", {"debug": True, "loop_factory": _eager_loop}), id="eager"))


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Emulator | None:
    """The GPU there is, for tests that run on either: the emulator's controls, or ``None`` on a real one."""
    return request.getfixturevalue("emulated_gpu") if emulated() else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: Any) -> None:
    """Gives every coroutine test to anyio, which looks for the mark in this same hook."""
    if name.startswith("test"):
        function = obj.hypothesis.inner_test if hasattr(obj, "hypothesis") else obj
        if inspect.iscoroutinefunction(function):
            pytest.mark.usefixtures("anyio_backend")(pytest.mark.anyio(obj))


# With files handed out in the order of their names, one of these could be begun when the other process is done.
LONG_AND_LATE = ("test_ray_example", "test_roads", "test_scatter", "test_server_example")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def fits(item: pytest.Item) -> bool:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        backend = parameters.get("anyio_backend", ("",))
        return backend[0] != "trio" or item.get_closest_marker("asyncio_only") is None

    unfit = [item for item in items if not fits(item)]
    if unfit:
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if fits(item)]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.stem not in LONG_AND_LATE)


def pytest_collection_finish() -> None:
    uvloop.new_event_loop().close()  # libuv keeps a pipe for the process from the first loop on
    # What has been imported is not garbage; out of the collector's sight, a full pass takes a millisecond.
    gc.collect()
    gc.freeze()


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


# Of what ends by itself in a thread.
_PATIENCE = 5.0


def _left_open(before: dict[int, str]) -> dict[int, str]:
    return {
        fd: target
        for fd, target in _descriptors().items()
        if before.get(fd) != target and not _belongs_to_process(target)
    }


def _belongs_to_process(target: str) -> bool:
    """Whether a descriptor is kept for the process rather than leaked.

    The library returns eventfds to a pool, since a late writer may still hold one; the GPU driver keeps its devices,
    and the emulated one its memory.
    """
    return target == "anon_inode:[eventfd]" or target.startswith(
        ("/dev/nvidia", "/dev/zero", "/proc/driver", "/memfd:emulated device memory")
    )


def _unfinished() -> str | None:
    """What the copier of the module's functions has not let go of; what was cancelled may take milliseconds to land."""
    copies = sys.modules.get("aiocuda_copy._copies")
    copier = None if copies is None else copies._default
    end = time.monotonic() + 1.0
    while copier is not None:
        stats = copier.stats()
        if not stats.in_flight and not stats.slots_in_use:
            break
        if time.monotonic() > end:
            return str(stats)
        time.sleep(0.001)
    return None


@contextmanager
def _loop_complaints() -> Iterator[list[str]]:
    """What loops report to their default handlers, which is all that asyncio logs at this level."""
    complaints: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(self.format(record))

    handler = Collect(logging.ERROR)
    logger = logging.getLogger("asyncio")
    logger.addHandler(handler)
    try:
        yield complaints
    finally:
        logger.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def _driver_is_warm(request: pytest.FixtureRequest) -> None:
    """A real driver opens pipes and sockets of its own when it is first used, which no test has left behind."""
    if emulated() or request.config.getoption("--driver") is None:
        return
    from cuda.bindings import driver

    import aiocuda_copy
    from aiocuda_copy.testing import DeviceArray

    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    legacy_stream = 1
    driver.cuInit(0)
    for device in range(min(2, driver.cuDeviceGetCount()[1])):
        array = DeviceArray(1 << 20, device=device)
        asyncio.run(aiocuda_copy.copy_to_host(array))
        driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(device)[1])
        aiocuda_copy.launch_host_func(legacy_stream, nothing)
        driver.cuCtxSynchronize()
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(device)


@pytest.fixture(scope="module", autouse=True)
def _reports_are_out_of_sight() -> Iterator[None]:
    """Takes what is there between two files, reports of tests above all, for no garbage.

    Pytest keeps all of it to the end, and after two thousand tests a full pass took forty milliseconds.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind(_driver_is_warm: None) -> Iterator[None]:
    before, modules = _descriptors(), len(sys.modules)
    with _loop_complaints() as complaints:
        yield
        gc.collect()
    if len(sys.modules) > modules + 50:  # torch's take a full pass fifty milliseconds
        gc.freeze()
    unfinished = _unfinished()
    assert unfinished is None, f"still in flight: {unfinished}"
    assert not complaints, "an event loop reported:\n" + "\n".join(complaints)
    end = time.monotonic() + _PATIENCE
    # The threads that feed the queues of multiprocessing, and so torch's loaders, close their pipes when they end.
    while (leaked := _left_open(before)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not leaked, f"descriptors left open: {leaked}"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test whose copies take the long way."""

    def export(obj: object, **_: Any) -> None:
        raise AssertionError(f"{obj!r} takes the long way")

    monkeypatch.setattr(_copier, "export", export)
