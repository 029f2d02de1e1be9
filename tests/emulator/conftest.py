"""What the tests of the emulated driver share."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from aiocuda_copy.testing import Emulator

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass
class Driver:
    """The driver's functions with their results checked, and `code` for those that are to fail."""

    api: Any
    functions: list[Any] = field(default_factory=list)

    def code(self, name: str, *arguments: Any) -> int:
        result = getattr(self.api, name)(*arguments)
        return int(result[0])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def checked(*arguments: Any) -> Any:
            code, *values = getattr(self.api, name)(*arguments)
            assert int(code) == 0, f"{name}: {code!r}"
            return values[0] if len(values) == 1 else tuple(values)

        return checked

    def host_function(self, function: Callable[[], object]) -> Any:
        """A host function that outlives the test, as (function, argument)."""
        native = HOST_FUNCTION(lambda _: function())
        self.functions.append(native)
        return self.api.CUhostFn(ctypes.cast(native, ctypes.c_void_p).value)

    def launch(self, stream: Any, function: Callable[[], object]) -> None:
        """Past the bindings, whose own function in between (before 13.5) does for one call and not for a graph's."""
        address = int(self.api.cuGetProcAddress(b"cuLaunchHostFunc", 12000, 0)[1])
        launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, HOST_FUNCTION, ctypes.c_void_p)(address)
        native = HOST_FUNCTION(lambda _: function())
        self.functions.append(native)
        assert launch(int(stream), native, None) == 0


@pytest.fixture(scope="session")
def functions() -> list[Any]:
    return []


@pytest.fixture
def cu(emulated_gpu: Emulator, functions: list[Any]) -> Iterator[Driver]:
    """The driver, with device 0's primary context current. It outlives the test: cuda.core and the engines keep it."""
    from cuda.bindings import driver

    cu = Driver(driver, functions)
    cu.cuInit(0)
    context = cu.cuDevicePrimaryCtxRetain(0)
    cu.cuCtxSetCurrent(context)
    yield cu
    emulated_gpu.reset()
    cu.cuCtxSetCurrent(0)


class Waiter:
    """A driver call on a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self.thread_id = 0
        self._function = function
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.thread_id = threading.get_native_id()
        self.result = self._function()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(30)
        assert self.done
        return self.result


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Any]], Waiter]:
    return Waiter


def memory_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)
