"""The emulated driver and the controls that a test has over it."""

from __future__ import annotations

import ctypes
import difflib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from aiocuda_copy import _native
from aiocuda_copy.testing._library import EmuCall, EmuLive, EmuWait, load
from aiocuda_copy.testing._probe import from_environment

_GIB = 1 << 30


class _HasCudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...


class _HasHandle(Protocol):
    @property
    def handle(self) -> Any: ...


StreamLike = int | _HasCudaStream | _HasHandle
"""A stream handle, or any object with ``__cuda_stream__`` or ``handle``."""


@dataclass(frozen=True)
class Wait:
    """One driver call that had to wait.

    Attributes
    ----------
    thread_id
        The native id of the calling thread, as ``threading.get_native_id()`` gives it.
    entry_point
        The driver function that was called.
    reason
        What it waited for: "full queue", "pageable copy", "synchronous copy", "synchronize", "pinning", "pinning held",
        "running kernel" or "memory in use".
    """

    thread_id: int
    entry_point: str
    reason: str


@dataclass(frozen=True)
class Call:
    """One driver call.

    Attributes
    ----------
    thread_id
        The native id of the calling thread, as ``threading.get_native_id()`` gives it.
    entry_point
        The driver function that was called.
    result
        The ``CUresult`` that it returned.
    """

    thread_id: int
    entry_point: str
    result: int


def _handle(stream: StreamLike) -> int:
    if isinstance(stream, int) and not isinstance(stream, bool):
        if not 0 <= stream < 1 << 64:
            raise ValueError(f"no such stream: {stream!r}")
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    handle = getattr(stream, "handle", None)
    if handle is None:
        raise TypeError(
            f"a stream is an int handle or an object with __cuda_stream__ or handle, not {type(stream).__qualname__}"
        )
    return int(handle)


def _lines(function: Callable[[Any, int], int]) -> list[str]:
    """What a function of the library writes, one a line; it returns the length that the whole text has."""
    size = 1 << 12
    while True:
        text = ctypes.create_string_buffer(size)
        length = int(function(text, size))
        if length < size:
            return text.value.decode().split()
        size = 2 * length


def _check_plan(nth: int, code: int) -> None:
    """What would never come to pass is a mistake."""
    if nth < 1:
        raise ValueError(f"nth counts from 1, so it cannot be {nth}")
    if code == 0:
        raise ValueError("code 0 is success; a failure has a CUresult such as 2 or 700")


class Emulator:
    """The controls of the emulated driver. There is one per process; `use_emulated_driver` returns it.

    Nothing here needs a sleep: `step` and `settle` return when what they stand for has happened, and
    `wait_for_waiting_threads` tells when another thread is inside a call that blocks.
    """

    def __init__(self, library: ctypes.CDLL, devices: int, driver_version: int, device_nbytes: int) -> None:
        self._library = library
        self.devices = devices
        self.driver_version = driver_version
        self.device_nbytes = device_nbytes
        self._entry_points: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<Emulator: {self.devices} emulated GPUs, driver version {self.driver_version}>"

    def reset(self) -> None:
        """Put every control back to its default and let everything that can run do so.

        Nothing is held any more, planned failures are forgotten, counters and records are empty, failed contexts work
        again, and operations that wait for something that cannot come are dropped. Memory, streams and events stay.
        """
        self._library.emu_reset()

    # When operations run

    def hold(self, stream: StreamLike | None = None) -> None:
        """Let nothing in a stream run until it is stepped or released.

        Parameters
        ----------
        stream
            The stream; ``None`` means all, also those created later.
        """
        if stream is None:
            self._library.emu_hold_all()
        else:
            self._known(self._library.emu_hold(_handle(stream)), stream)

    def release(self, stream: StreamLike | None = None) -> None:
        """Let a held stream run freely; ``None`` means all."""
        if stream is None:
            self._library.emu_release_all()
        else:
            self._known(self._library.emu_release(_handle(stream)), stream)

    def step(self, stream: StreamLike, n: int = 1) -> int:
        """Let exactly `n` operations of a held stream run, and wait until they have.

        Returns
        -------
        int
            How many ran: fewer than `n` when the stream ran out, waits for something unmet, or failed.
        """
        ran = int(self._library.emu_step(_handle(stream), n))
        self._known(ran >= 0, stream)
        return ran

    def pending(self, stream: StreamLike) -> list[str]:
        """Kinds of the operations in a stream, the next one first.

        They are "copy", "memset", "kernel", "host_function", "event_record", "event_wait", "write_value",
        "wait_value", "allocate" and "free". A launched graph shows as its nodes.
        """
        handle = _handle(stream)

        def write(text: Any, size: int) -> int:
            length = int(self._library.emu_pending(handle, text, size))
            self._known(length >= 0, stream)
            return length

        return _lines(write)

    def busy_streams(self) -> list[int]:
        """The handles of the streams with something in them, also of streams that a library made for itself."""
        capacity = int(self._library.emu_busy_streams(None, 0))
        handles = (ctypes.c_size_t * capacity)()
        return list(handles[: int(self._library.emu_busy_streams(handles, capacity))])

    def wait_until_begun(self, stream: StreamLike, timeout: float = 30.0) -> None:
        """Wait until the next operation of a stream has begun: one that takes its time, or a host function.

        Raises
        ------
        TimeoutError
            If it has not after `timeout` seconds, or there is no such stream.
        """
        if not self._library.emu_await_begun(_handle(stream), timeout):
            raise TimeoutError(f"nothing in {stream!r} has begun after {timeout} s")

    def settle(self) -> None:
        """Wait until no operation can run: what is left is held, stalled, or waits for something unmet."""
        self._library.emu_settle()

    def kernel(self, stream: StreamLike, milliseconds: float = 0.0) -> None:
        """Enqueue an artificial kernel that takes a time and does nothing; in a held stream it takes none.

        Raises
        ------
        RuntimeError
            If the driver refuses it, as when the stream does not exist.
        """
        code = self._library.emu_kernel(_handle(stream), milliseconds)
        if code != 0:
            raise RuntimeError(f"the kernel could not be enqueued: CUDA error {code}")

    def virtual_clock(self, enabled: bool = True) -> None:
        """Let time pass only as operations need it: durations then cost no real time, and event timings are exact."""
        self._library.emu_virtual_clock(enabled)

    def wait_for_waiting_threads(self, n: int = 1, timeout: float = 30.0) -> None:
        """Wait until `n` threads are inside a driver call that waits for something.

        Raises
        ------
        TimeoutError
            If they are not after `timeout` seconds.
        """
        if not self._library.emu_await_waiting(n, timeout):
            raise TimeoutError(f"there are not {n} threads waiting in a driver call after {timeout} s")

    # Failures

    def fail_call(self, name: str, nth: int = 1, code: int = 2) -> None:
        """Make the `nth` call from now of the entry point `name` return `code` before it does anything.

        Parameters
        ----------
        name
            The driver function, as ``cuGetProcAddress`` knows it: without a suffix such as ``_v2``.
        nth
            Which of its calls, from 1.
        code
            The ``CUresult``, by default ``CUDA_ERROR_OUT_OF_MEMORY``.

        Raises
        ------
        ValueError
            If the emulated driver has no such function.
        """
        self._check_entry_point(name)
        _check_plan(nth, code)
        self._library.emu_fail_call(name.encode(), nth, code)

    def fail_operation(self, kind: str, nth: int = 1, code: int = 700) -> None:
        """Make the `nth` operation from now of a `kind` fail when it runs, and its context with it.

        Parameters
        ----------
        kind
            One of those that `pending` names, such as "copy".
        nth
            Which operation of that kind, in the order in which they run, from 1.
        code
            The ``CUresult``, by default ``CUDA_ERROR_ILLEGAL_ADDRESS``.

        Raises
        ------
        ValueError
            If there is no such kind.
        """
        kinds = _lines(self._library.emu_kinds)
        if kind not in kinds:
            raise ValueError(f"kind must be one of {', '.join(kinds)}, not {kind!r}")
        _check_plan(nth, code)
        self._library.emu_fail_operation(kind.encode(), nth, code)

    def fault(self, device: int = 0, code: int = 700) -> None:
        """Make a device's primary context fail now, as after an illegal access by some kernel.

        Every later call in it returns `code` and none of its host functions runs. What was queued never runs, but a
        copy that was running may still write its destination.

        Raises
        ------
        RuntimeError
            If the device's primary context does not exist.
        """
        if not self._library.emu_fault(device, code):
            raise RuntimeError(f"device {device} has no primary context")

    def stall_host_functions(self) -> None:
        """Begin no more host functions, as if a foreign one were taking its time."""
        self._library.emu_stall_host_functions(True)

    def resume_host_functions(self) -> None:
        """Undo `stall_host_functions`."""
        self._library.emu_stall_host_functions(False)

    def drop_host_functions(self, n: int) -> None:
        """Skip the next `n` host functions; their streams go on as if they had run."""
        self._library.emu_drop_host_functions(n)

    def linger(self, queries: int = 1) -> None:
        """Let the next `queries` queries of a stream say that it is busy when a value write has just ended it.

        The written value is seen before the stream is done, on a real GPU for some microseconds. Here it is so until
        the stream has been asked `queries` times, has been synchronised with, or has more to do; and until `settle`.
        """
        self._library.emu_linger(queries)

    def hold_pinning(self) -> None:
        """Let every call that pins or unpins memory stay inside the driver's lock, so that all others wait.

        Queries do not.
        """
        self._library.emu_hold_pinning(True)

    def release_pinning(self) -> None:
        """Undo `hold_pinning`."""
        self._library.emu_hold_pinning(False)

    # Limits

    def limit_memory(self, device_nbytes: int | None = None, pinned_nbytes: int | None = None) -> None:
        """Limit the memory of each device, and the page-locked memory of the host; ``None`` means no limit."""
        unlimited = (1 << 64) - 1
        self._library.emu_limit_memory(
            unlimited if device_nbytes is None else device_nbytes,
            unlimited if pinned_nbytes is None else pinned_nbytes,
        )

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of host memory that are page-locked now, the library's own slots among them."""
        return int(self._library.emu_pinned_nbytes())

    def throttle(
        self,
        gigabytes_per_second: float | None = None,
        latency_us: float | None = None,
        pinning_ms_per_gib: float | None = None,
    ) -> None:
        """Give copies a bandwidth and a latency, and pinning a duration; what is ``None`` costs nothing.

        Parameters
        ----------
        gigabytes_per_second
            Of 10^9 bytes, for each direction of each device.
        latency_us
            Microseconds that each copy takes beside that.
        pinning_ms_per_gib
            Milliseconds for each 2^30 bytes that are page-locked.
        """
        self._library.emu_throttle(gigabytes_per_second or 0.0, latency_us or 0.0, pinning_ms_per_gib or 0.0)

    # Records

    def calls(self, name: str | None = None) -> int:
        """How often an entry point was called since the last reset; ``None`` means all of them together.

        Raises
        ------
        ValueError
            If the emulated driver has no such function.
        """
        if name is not None:
            self._check_entry_point(name)
        return int(self._library.emu_calls(None if name is None else name.encode()))

    def call_log(self, enable: bool = True) -> None:
        """Start or stop recording single calls, for `logged_calls`."""
        self._library.emu_log_calls(enable)

    def logged_calls(self) -> list[Call]:
        """The calls recorded since the last reset, in order (the first 100,000)."""
        capacity = int(self._library.emu_call_log(None, 0))
        records = (EmuCall * capacity)()
        n = min(capacity, int(self._library.emu_call_log(records, capacity)))
        return [Call(record.thread_id, record.entry_point.decode(), record.result) for record in records[:n]]

    def waits(self) -> list[Wait]:
        """Every driver call that had to wait since the last reset (the first 100,000)."""
        capacity = int(self._library.emu_waits(None, 0))
        records = (EmuWait * capacity)()
        n = min(capacity, int(self._library.emu_waits(records, capacity)))
        return [Wait(record.thread_id, record.entry_point.decode(), record.reason.decode()) for record in records[:n]]

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist: a difference between two calls is a leak."""
        record = EmuLive()
        self._library.emu_live(ctypes.byref(record))
        return {str(field[0]): int(getattr(record, str(field[0]))) for field in EmuLive._fields_}

    # Memory

    def read(self, address: int, nbytes: int) -> bytes:
        """Read memory that the driver knows, of a device or of the host, without a driver call.

        Raises
        ------
        ValueError
            If the bytes are not inside one allocation.
        """
        data = ctypes.create_string_buffer(nbytes)
        if not self._library.emu_read(address, data, nbytes):
            raise ValueError(f"{nbytes} bytes at {address:#x} are not inside one allocation")
        return data.raw

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Write memory that the driver knows, of a device or of the host, without a driver call.

        Raises
        ------
        ValueError
            If the bytes are not inside one allocation.
        """
        content = bytes(data)
        if not self._library.emu_write(address, content, len(content)):
            raise ValueError(f"{len(content)} bytes at {address:#x} are not inside one allocation")

    def _check_entry_point(self, name: str) -> None:
        names = self._entry_points = self._entry_points or frozenset(_lines(self._library.emu_entry_points))
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1, 0.0)
            raise ValueError(
                f"the emulated driver has no entry point {name!r}; the closest that it has is {close[0]!r}"
            )

    @staticmethod
    def _known(known: bool, stream: StreamLike) -> None:
        if not known:
            raise ValueError(f"no such stream: {stream!r}")


_emulator: Emulator | None = None
_lock = threading.Lock()


def use_emulated_driver(
    devices: int | None = None, driver_version: int | None = None, device_nbytes: int | None = None
) -> Emulator:
    """Make the emulated driver this process's CUDA driver. To be called before the first driver call.

    Further calls return the same emulator.

    Parameters
    ----------
    devices
        How many GPUs there are (2).
    driver_version
        The CUDA version that the driver reports, which decides what entry points it has (13000).
    device_nbytes
        Memory of each device (16 GiB). It costs nothing until it is written.

    Returns
    -------
    Emulator
        Its controls.

    Raises
    ------
    RuntimeError
        If the real driver is already loaded, or the emulated one is in use with other parameters.
    """
    global _emulator
    with _lock:
        if _emulator is not None:
            asked = (devices, driver_version, device_nbytes)
            have = (_emulator.devices, _emulator.driver_version, _emulator.device_nbytes)
            if any(a is not None and a != h for a, h in zip(asked, have, strict=True)):
                raise RuntimeError("the emulated driver is already in use with other parameters")
            return _emulator
        emulator = Emulator(
            load(),
            2 if devices is None else devices,
            13000 if driver_version is None else driver_version,
            16 * _GIB if device_nbytes is None else device_nbytes,
        )
        if not emulator._library.emu_configure(emulator.devices, emulator.driver_version, emulator.device_nbytes):
            raise RuntimeError("the emulated driver is already in use with other parameters")
        # Whether the copy engine is tried must not depend on how busy the machine was a moment ago.
        _native.set_road_times(avoided=0, linger=0.01)
        _emulator = emulator
        return emulator


def current_emulator() -> Emulator | None:
    """The emulator, if it is this process's driver."""
    return _emulator


def emulated() -> bool:
    """Whether this process's CUDA driver is the emulated one."""
    return _emulator is not None


def driver_from_environment() -> None:
    """Use the emulated driver if the environment variable ``AIOCUDA_COPY_DRIVER`` asks for it.

    Its values are those of ``--driver``: ``emulated``, ``real``, and ``auto``, which is the real driver if it finds a
    device and else the emulated one. Unset or empty it means the real one.

    Raises
    ------
    ValueError
        If the variable has another value.
    """
    if from_environment() == "emulated":
        use_emulated_driver()
