"""Device 0 of whichever driver this process has, and the list that the checks add themselves to."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

LEGACY, PER_THREAD = 1, 2

# Spins for a number of nanoseconds; writes to address 0 if that number is 0.
KERNEL = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
  .reg .u64 %length, %start, %now, %null;
  .reg .pred %more;
  ld.param.u64 %length, [nanoseconds];
  setp.ne.u64 %more, %length, 0;
  @%more bra BEGIN;
  mov.u64 %null, 0;
  st.global.u64 [%null], %length;
BEGIN:
  mov.u64 %start, %globaltimer;
LOOP:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %more, %now, %length;
  @%more bra LOOP;
  ret;
}
\x00"""


class TooShort(Exception):
    """A kernel ended before what was to go on beside it: the machine was busy with something else."""


class Gpu:
    """Device 0 with its primary context current."""

    # By how much kernels are longer than they should need to be.
    patience = 1

    def __init__(self, quick: bool = False) -> None:
        from cuda.bindings import driver

        from aiocuda_copy import testing

        self.quick = quick
        self.api = driver
        self.emulator = testing.current_emulator()
        self.kept: list[Any] = []
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxSetCurrent", self.context)
        if self.emulator is None:
            module = self.call("cuModuleLoadData", KERNEL)
            self.spin = self.call("cuModuleGetFunction", module, b"spin")
            self.kernel(0, 0.001)
            self.call("cuCtxSynchronize")
        else:
            self.throttle()
        self.device = int(self.call("cuMemAlloc", 1 << 20))
        self.host = int(self.call("cuMemHostAlloc", 1 << 20, 0))
        self._flags = self.call("cuMemHostAlloc", 4096, 0)
        self._flag = 0

    def code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.api, name)(*arguments)[0])

    def call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.api, name)(*arguments)
        assert int(code) == 0, f"{name}: {code!r}"
        return values[0] if values else None

    def throttle(self, pinning_ms_per_gib: float = 200) -> None:
        if self.emulator is not None:
            self.emulator.throttle(gigabytes_per_second=50, pinning_ms_per_gib=pinning_ms_per_gib)

    def native(self, name: str) -> Callable[..., int]:
        """An entry point that is called without the GIL and without any of the bindings' work."""
        address = int(self.api.cuGetProcAddress(name.encode(), 12000, 0)[1])
        return ctypes.CFUNCTYPE(ctypes.c_int)(address)

    def stream(self, flags: int = 1) -> Any:
        return self.call("cuStreamCreate", flags)

    def event(self) -> Any:
        return self.call("cuEventCreate", 2)

    def kernel(self, stream: Any, milliseconds: float) -> None:
        if self.emulator is not None:
            self.emulator.kernel(int(stream), milliseconds)
            return
        length = ctypes.c_uint64(int(milliseconds * 1e6))
        arguments = ((length,), (ctypes.c_uint64,))
        self.call("cuLaunchKernel", self.spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)

    def running_kernel(self, stream: Any, milliseconds: float = 80) -> Running:
        """A kernel that has begun."""
        self._flag += 1
        running = Running(self, ctypes.c_uint32.from_address(int(self._flags)), self._flag)
        self.kernel(stream, milliseconds * self.patience)
        self.call("cuStreamWriteValue32", stream, int(self._flags), self._flag, 0)
        time.sleep(0.01)
        return running

    def waits(self, thread_id: int | None) -> int:
        """How many calls of a thread the emulated driver has made wait."""
        return 0 if self.emulator is None else sum(wait.thread_id == thread_id for wait in self.emulator.waits())

    def is_blocked(self, thread: threading.Thread, seconds: float) -> bool:
        """Whether a thread that has just begun waits in a call: the emulator knows, and a GPU is given some time."""
        if self.emulator is None:
            thread.join(seconds)
            return thread.is_alive()
        while thread.is_alive() and not self.waits(thread.native_id):
            thread.join(0.002)
        return thread.is_alive()

    def fault(self, stream: Any, nth: int = 1) -> None:
        """The emulated one is of the nth kernel that begins from now on."""
        if self.emulator is None:
            self.kernel(stream, 0)
        else:
            self.emulator.fail_operation("kernel", nth, code=700)
            self.kernel(stream, 0)

    def function(self, function: Callable[[], object]) -> Any:
        native = HOST_FUNCTION(lambda _: function())
        self.kept.append(native)
        return self.api.CUhostFn(ctypes.cast(native, ctypes.c_void_p).value)

    def launch(self, stream: Any, function: Callable[[], object]) -> None:
        self.call("cuLaunchHostFunc", stream, self.function(function), 0)

    def copy(self, stream: Any, nbytes: int = 4, towards_host: bool = True) -> None:
        to, source = (self.host, self.device) if towards_host else (self.device, self.host)
        self.call("cuMemcpyAsync", to, source, nbytes, stream)

    def batch(self, stream: Any, entries: list[tuple[int, int, int]], runs: int = 1, order: int = 1) -> int:
        attributes = self.api.CUmemcpyAttributes()
        attributes.srcAccessOrder = self.api.CUmemcpySrcAccessOrder(order)
        pointer = self.api.CUdeviceptr
        to, source = [pointer(entry[0]) for entry in entries], [pointer(entry[1]) for entry in entries]
        sizes = [entry[2] for entry in entries]
        return self.code(
            "cuMemcpyBatchAsync", to, source, sizes, len(sizes), [attributes] * runs, [0] * runs, runs, stream
        )

    def second_context(self) -> Any:
        try:
            context = self.call("cuCtxCreate", None, 0, 0)
        except TypeError:  # cuda.bindings 12
            context = self.call("cuCtxCreate", 0, 0)
        self.call("cuCtxPopCurrent")
        return context

    def on_thread(self, function: Callable[[], Any], context: bool = True) -> Any:
        """The result of a function on a thread of its own, with the same context current or none."""
        results: list[Any] = []

        def body() -> None:
            if context:
                self.call("cuCtxSetCurrent", self.context)
            results.append(function())

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return results[0]


class Running:
    """A kernel, and how to ask without a driver call what has become of it."""

    def __init__(self, gpu: Gpu, flag: ctypes.c_uint32, wanted: int) -> None:
        self._gpu, self._flag, self._wanted = gpu, flag, wanted
        self._thread = threading.get_native_id()
        self._waits = gpu.waits(self._thread)

    @property
    def ended(self) -> bool:
        return self._flag.value == self._wanted

    def made_wait(self) -> bool:
        """Whether the calls of this thread since then have waited for it."""
        if self._gpu.emulator is None:
            return self.ended
        # What is on record does not depend on how busy the machine is.
        if self._gpu.waits(self._thread) > self._waits:
            return True
        self.must_go_on()
        return False

    def must_go_on(self) -> None:
        if self.ended:
            raise TooShort


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


CHECKS: dict[str, Callable[[Gpu], Any]] = {}
# Those that leave the context, or the process, unusable.
ALONE: set[str] = set()


def check(function: Callable[[Gpu], Any]) -> Callable[[Gpu], Any]:
    CHECKS[function.__name__] = function
    return function


def check_alone(function: Callable[[Gpu], Any]) -> Callable[[Gpu], Any]:
    ALONE.add(function.__name__)
    return check(function)
