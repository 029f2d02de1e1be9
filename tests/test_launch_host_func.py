"""launch_host_func, and the host functions in cuda.core's graphs."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, LegacyPinnedMemoryResource, Stream

from aiocuda_copy import (
    HOST_COPY_FN,
    HOST_SIGNAL_FN,
    launch_host_func,
    pack_host_copy_args,
    pack_host_signal_args,
)
from aiocuda_copy._errors import CudaError
from aiocuda_copy.testing import Emulator

CUhostFn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def made(result: tuple[Any, ...]) -> Any:
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
    return result[1] if len(result) == 2 else result[1:]


@pytest.fixture
def device(gpu: Emulator | None) -> Device:
    device = Device()
    device.set_current()
    return device


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    stream = device.create_stream()
    yield stream
    stream.sync()
    stream.close()


class Blocker:
    """Holds a stream until it is opened, on any driver: a host function that waits for a pipe, without the GIL."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        libc = ctypes.CDLL(None)
        self._buffer = ctypes.create_string_buffer(1)
        # read(fd, buffer, 1) has three arguments, so that it cannot be the host function itself.
        self._function = CUhostFn(lambda _: libc.read(self.reader, self._buffer, 1))

    def launch(self, stream: Stream) -> None:
        launch_host_func(stream, self._function)

    def open(self) -> None:
        os.write(self.writer, b"x")

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def blocker() -> Iterator[Blocker]:
    blocker = Blocker()
    yield blocker
    blocker.close()


def is_idle(stream: Stream) -> bool:
    return driver.cuStreamQuery(stream.handle)[0] == driver.CUresult.CUDA_SUCCESS


def begin_capture(stream: Stream, mode: str = "GLOBAL") -> None:
    made(
        (
            *driver.cuStreamBeginCapture(
                stream.handle, getattr(driver.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
            ),
            None,
        )
    )


def end_capture(stream: Stream) -> int:
    """The number of nodes that were captured; fails for a capture that has been invalidated."""
    graph = made(driver.cuStreamEndCapture(stream.handle))
    _, count = made(driver.cuGraphGetNodes(graph))
    driver.cuGraphDestroy(graph)
    return int(count)


# Order and ownership


def test_runs_in_stream_order(device: Device, stream: Stream) -> None:
    pinned = LegacyPinnedMemoryResource()
    first, second = pinned.allocate(64), pinned.allocate(64)
    first_view, second_view = (np.from_dlpack(b).view(np.uint8) for b in (first, second))
    first_view[:], second_view[:] = 7, 0
    on_device = device.allocate(64, stream=stream)
    on_device.copy_from(first, stream=stream)
    on_device.copy_to(second, stream=stream)
    dst, zeros = np.zeros(64, np.uint8), bytes(64)
    launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(dst, second, 64))
    launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(second, zeros, 64))
    on_device.copy_from(second, stream=stream)
    on_device.copy_to(first, stream=stream)
    stream.sync()
    assert (dst == 7).all()
    assert not first_view.any()


def test_waits_for_earlier_work(stream: Stream, blocker: Blocker) -> None:
    src, dst = bytearray(b"12345678"), bytearray(8)
    blocker.launch(stream)
    launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(dst, src, 8))
    assert not is_idle(stream)
    assert dst == bytes(8)
    src[:] = b"laterer!"
    blocker.open()
    stream.sync()
    assert dst == b"laterer!"


def test_owns_a_copy_of_the_bytes(stream: Stream, blocker: Blocker) -> None:
    src, dst = bytearray(b"12345678"), bytearray(8)
    record = bytearray(pack_host_copy_args(dst, src, 8))
    blocker.launch(stream)
    launch_host_func(stream, HOST_COPY_FN, record)
    record[:] = b"\xff" * 24
    record.extend(b"resizable again")
    del record
    blocker.open()
    stream.sync()
    assert dst == src


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, np.frombuffer])
def test_takes_any_bytes_like(stream: Stream, wrap: Callable[..., Any]) -> None:
    src, dst = bytearray(b"12345678"), bytearray(8)
    record = pack_host_copy_args(dst, src, 8)
    launch_host_func(stream, HOST_COPY_FN, wrap(record, np.uint8) if wrap is np.frombuffer else wrap(record))
    stream.sync()
    assert dst == src


def test_an_address_is_read_when_it_runs(stream: Stream, blocker: Blocker) -> None:
    src, dst = bytearray(b"12345678"), bytearray(8)
    record = ctypes.create_string_buffer(24)
    blocker.launch(stream)
    launch_host_func(stream, HOST_COPY_FN, ctypes.addressof(record))
    ctypes.memmove(record, pack_host_copy_args(dst, src, 8), 24)
    blocker.open()
    stream.sync()
    assert dst == src


def test_signals(stream: Stream) -> None:
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    launch_host_func(stream, HOST_SIGNAL_FN, pack_host_signal_args(fd, 41))
    launch_host_func(stream, HOST_SIGNAL_FN, pack_host_signal_args(fd))
    stream.sync()
    assert os.eventfd_read(fd) == 42
    os.close(fd)


@pytest.mark.parametrize("data", [None, b"", b"abc", 4096])
def test_any_function_gets_its_data(stream: Stream, data: Any) -> None:
    got: list[Any] = []

    def record(address: int | None) -> None:
        got.append(ctypes.string_at(address, len(data)) if isinstance(data, bytes) and address else address)

    launch_host_func(stream, CUhostFn(record), data)  # nobody but the library keeps the pointer
    gc.collect()
    stream.sync()
    assert got == [data]


def test_a_function_is_kept_until_it_has_run_and_not_for_ever(stream: Stream, blocker: Blocker) -> None:
    function = CUhostFn(lambda _: None)
    kept = weakref.ref(function)
    blocker.launch(stream)
    launch_host_func(stream, function, b"data")
    del function
    gc.collect()
    assert kept() is not None
    blocker.open()
    stream.sync()
    launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))
    stream.sync()
    assert kept() is None


def test_the_same_address_in_a_pointer_of_ones_own(stream: Stream) -> None:
    pointer = CUhostFn(ctypes.cast(HOST_COPY_FN, ctypes.c_void_p).value)
    with pytest.raises(ValueError, match="HOST_COPY_FN"):
        launch_host_func(stream, pointer)
    src, dst = bytearray(b"12345678"), bytearray(8)
    launch_host_func(stream, pointer, pack_host_copy_args(dst, src, 8))
    stream.sync()
    assert dst == src


@pytest.mark.parametrize("as_what", ["object", "protocol", "int", "legacy", "per-thread"])
def test_streams(stream: Stream, as_what: str) -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, int(stream.handle)

    given: Any = {"object": stream, "protocol": Protocol(), "int": int(stream.handle), "legacy": 0, "per-thread": 2}
    src, dst = bytearray(b"12345678"), bytearray(8)
    launch_host_func(given[as_what], HOST_COPY_FN, pack_host_copy_args(dst, src, 8))
    driver.cuCtxSynchronize()
    assert dst == src


# Refusals


@pytest.mark.parametrize("function", [HOST_COPY_FN, HOST_SIGNAL_FN])
@pytest.mark.parametrize("data", [None, 0, b"", b"short", bytes(17), bytes(25)])
def test_a_record_is_needed(stream: Stream, function: Any, data: Any) -> None:
    with pytest.raises(ValueError, match="pack_host_"):
        launch_host_func(stream, function, data)
    assert is_idle(stream)


@pytest.mark.parametrize(
    "function",
    [
        lambda _: None,
        print,
        object(),
        4096,
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(4096),
        ctypes.CFUNCTYPE(None)(4096),
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(4096),
        ctypes.CFUNCTYPE(None, ctypes.c_size_t)(4096),
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(4096),
        ctypes.CDLL(None).free,
    ],
)
def test_other_functions_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="fn "):
        launch_host_func(0, function, b"")


def test_a_python_callable_is_told_why() -> None:
    with pytest.raises(TypeError, match=r"GIL.*HOST_COPY_FN"):
        launch_host_func(0, lambda _: None)


def test_a_null_function_is_refused() -> None:
    with pytest.raises(ValueError, match="null function"):
        launch_host_func(0, CUhostFn())


@pytest.mark.parametrize("data", [True, 1.5, "text", [1], np.uint64(4096), ctypes.c_void_p(4096)])
def test_other_data_is_refused(data: Any) -> None:
    with pytest.raises(TypeError, match="user_data"):
        launch_host_func(0, CUhostFn(4096), data)


@pytest.mark.parametrize("data", [-1, 2**64])
def test_an_address_has_to_fit(data: int) -> None:
    with pytest.raises(OverflowError, match="user_data"):
        launch_host_func(0, CUhostFn(4096), data)


def test_data_has_to_be_contiguous() -> None:
    with pytest.raises(BufferError):
        launch_host_func(0, CUhostFn(4096), memoryview(bytes(48))[::2])


@pytest.mark.parametrize("wrong", [None, "stream", object(), 1.5, True])
def test_what_is_no_stream_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError):
        launch_host_func(wrong, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_a_captured_stream_is_refused_and_stays_captured(stream: Stream, mode: str) -> None:
    src, dst = bytearray(b"12345678"), bytearray(8)
    record = pack_host_copy_args(dst, src, 8)
    begin_capture(stream, mode)
    with pytest.raises(RuntimeError, match="captured") as caught:
        launch_host_func(stream, HOST_COPY_FN, record)
    assert not isinstance(caught.value, CudaError)
    assert end_capture(stream) == 0
    launch_host_func(stream, HOST_COPY_FN, record)
    stream.sync()
    assert dst == src


def test_the_legacy_stream_beside_a_captured_blocking_stream(device: Device) -> None:
    blocking = made(driver.cuStreamCreate(0))
    begin_capture(Stream.from_handle(int(blocking)))
    with pytest.raises(RuntimeError, match="captured"):
        launch_host_func(0, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))
    assert end_capture(Stream.from_handle(int(blocking))) == 0
    driver.cuStreamDestroy(blocking)


def test_another_threads_capture_stays_valid(device: Device, stream: Stream) -> None:
    other = device.create_stream()
    begin_capture(other)
    done: list[bool] = []

    def work() -> None:
        device.set_current()
        launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
    assert end_capture(other) == 0
    other.close()


def test_the_capture_mode_is_restored(stream: Stream) -> None:
    modes = driver.CUstreamCaptureMode
    for mode in (modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, modes.CU_STREAM_CAPTURE_MODE_GLOBAL):
        made(driver.cuThreadExchangeStreamCaptureMode(mode))
        launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))
        assert made(driver.cuThreadExchangeStreamCaptureMode(mode)) == mode
    made(driver.cuThreadExchangeStreamCaptureMode(modes.CU_STREAM_CAPTURE_MODE_GLOBAL))


# The GIL


def test_no_deadlock_beside_a_thread_that_holds_the_gil_in_driver_calls(device: Device) -> None:
    stop = threading.Event()
    query = ctypes.PyDLL(None)  # a foreign launcher that keeps the GIL while it is in C
    query.usleep.argtypes = [ctypes.c_uint]

    def hog() -> None:
        device.set_current()
        mine = device.create_stream()
        while not stop.is_set():
            driver.cuStreamQuery(mine.handle)
            query.usleep(200)
        mine.close()

    ran = 0

    def count(_: int | None) -> None:
        nonlocal ran
        ran += 1

    counter = CUhostFn(count)
    streams = [device.create_stream() for _ in range(4)]
    src, dst = bytearray(8), bytearray(8)
    record = pack_host_copy_args(dst, src, 8)
    thread = threading.Thread(target=hog)
    thread.start()
    # Far more than a stream takes without waiting for the driver's thread, which wants the GIL for every other one.
    for index in range(300):
        launch_host_func(streams[index % 4], HOST_COPY_FN, record)
        launch_host_func(streams[index % 4], counter)
    deadline = time.monotonic() + 60
    while ran < 300 and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert ran == 300
    for stream in streams:
        stream.sync()
        stream.close()


# Graphs


@pytest.mark.real_gpu
def test_graph_replays_on_the_gpu(stream: Stream) -> None:
    replay_graphs(stream)


def test_graph_replays(stream: Stream) -> None:
    replay_graphs(stream)


def replay_graphs(stream: Stream) -> None:
    src = np.zeros(64, np.uint8)
    by_bytes, by_address = np.zeros_like(src), np.zeros_like(src)
    record = np.frombuffer(bytearray(pack_host_copy_args(by_address, src, 64)), np.uint8)
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    builder = stream.create_graph_builder()
    builder.begin_building()
    builder.callback(HOST_COPY_FN, user_data=pack_host_copy_args(by_bytes, src, 64))
    builder.callback(HOST_COPY_FN, user_data=int(record.ctypes.data))
    builder.callback(HOST_SIGNAL_FN, user_data=pack_host_signal_args(fd))
    graph = builder.end_building().complete()
    for value in range(1, 6):
        src[:] = value
        graph.launch(stream)
        stream.sync()
        assert (by_bytes == value).all()
        assert (by_address == value).all()
        assert os.eventfd_read(fd) == 1
    # A record of one's own may be changed between replays.
    record.view(np.uintp)[2] = 32
    src[:] = 9
    graph.launch(stream)
    stream.sync()
    assert struct.unpack("@PPN", record.tobytes())[2] == 32
    assert (by_address[:32] == 9).all()
    assert (by_address[32:] == 5).all()
    os.close(fd)
    graph.close()
    builder.close()


# Faults


@pytest.mark.emulated_only
class TestFaults:
    def test_a_failed_enqueue_raises_and_frees(self, emulated_gpu: Emulator, stream: Stream) -> None:
        function = CUhostFn(lambda _: None)
        kept = weakref.ref(function)
        data = bytes(1 << 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(300):
            emulated_gpu.fail_call("cuLaunchHostFunc", 1, 2)
            with pytest.raises(CudaError, match=r"cuLaunchHostFunc.*OUT_OF_MEMORY"):
                launch_host_func(stream, function, data)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 100 << 10, f"{grown} KiB"
        del function
        gc.collect()
        assert kept() is None

    def test_a_failed_question_raises_and_enqueues_nothing(self, emulated_gpu: Emulator, stream: Stream) -> None:
        calls = emulated_gpu.calls("cuLaunchHostFunc")
        emulated_gpu.fail_call("cuStreamIsCapturing", 1, 400)
        with pytest.raises(CudaError, match="cuStreamIsCapturing"):
            launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))
        assert emulated_gpu.calls("cuLaunchHostFunc") == calls

    def test_a_captured_stream_gets_no_launch(self, emulated_gpu: Emulator, stream: Stream) -> None:
        calls = emulated_gpu.calls("cuLaunchHostFunc")
        begin_capture(stream)
        with pytest.raises(RuntimeError, match="captured"):
            launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))
        end_capture(stream)
        assert emulated_gpu.calls("cuLaunchHostFunc") == calls

    def test_a_full_stream_is_waited_for_without_the_gil(
        self, emulated_gpu: Emulator, device: Device, stream: Stream
    ) -> None:
        memory = device.allocate(8, stream=stream)
        address = int(memory.handle)
        record = pack_host_copy_args(1, 2, 0)
        launched = 0

        def launch() -> None:
            nonlocal launched
            device.set_current()
            for _ in range(200):
                driver.cuMemcpyDtoDAsync(address, address + 4, 4, stream.handle)
                launch_host_func(stream, HOST_COPY_FN, record)
                launched += 1

        emulated_gpu.hold(stream)
        thread = threading.Thread(target=launch)
        thread.start()
        try:
            emulated_gpu.wait_for_waiting_threads()
            assert 0 < launched < 200
        finally:
            emulated_gpu.release(stream)
            thread.join()
        assert launched == 200

    def test_a_fault_leaks_and_later_launches_raise(self) -> None:
        # In a process of its own, since the context is lost.
        program = """
import ctypes, gc, weakref
from aiocuda_copy import HOST_COPY_FN, _errors, launch_host_func, pack_host_copy_args, testing
emulator = testing.use_emulated_driver()
from cuda.core import Device
device = Device(); device.set_current()
stream = device.create_stream()
emulator.hold(stream)
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: print("ran"))
kept = weakref.ref(function)
launch_host_func(stream, function, b"data")
del function
emulator.fault()
emulator.release(stream)
try:
    launch_host_func(stream, HOST_COPY_FN, pack_host_copy_args(1, 2, 0))
except _errors.CudaError as exc:
    print(exc.code, exc.sticky)
gc.collect()
print(kept() is not None)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (0, "700 True\nTrue\n"), done.stderr
