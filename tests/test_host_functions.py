"""The host functions and the packers of their records, on host memory and descriptors: no driver is needed."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiocuda_copy._host_functions import (
    HOST_COPY_FN,
    HOST_SIGNAL_FN,
    pack_host_copy_args,
    pack_host_signal_args,
)

ADDRESS_MAX = 2 ** (8 * struct.calcsize("P")) - 1
SIZE_MAX = 2 ** (8 * struct.calcsize("N")) - 1
EVENTFD_MAX = 2**64 - 2


def copy(dst: Any, src: Any, nbytes: int) -> None:
    HOST_COPY_FN(pack_host_copy_args(dst, src, nbytes))


def send(fd: int, value: int = 1) -> None:
    HOST_SIGNAL_FN(pack_host_signal_args(fd, value))


def address_of(array_like: np.ndarray) -> int:
    return int(array_like.ctypes.data)


def until_blocked(step: Callable[[], int]) -> int:
    """The sum of what a non-blocking call returns until it would block."""
    total = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            total += step()
    return total


# HOST_COPY_FN


def test_both_are_ctypes_pointers_of_the_prototype() -> None:
    for function in (HOST_COPY_FN, HOST_SIGNAL_FN):
        assert isinstance(function, ctypes.CFUNCTYPE(None, ctypes.c_void_p))
        assert function.restype is None
        assert function.argtypes == (ctypes.c_void_p,)


def test_import_makes_no_driver_call_and_needs_no_cuda_package() -> None:
    program = (
        "import sys, aiocuda_copy._host_functions as h\n"
        "h.pack_host_copy_args(bytearray(4), b'1234', 4)\n"
        "assert not [m for m in sys.modules if m == 'cuda' or m.startswith('cuda.')], sys.modules\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_copies_exactly_nbytes() -> None:
    src = np.arange(64, dtype=np.uint8)
    dst = np.full(64, 255, np.uint8)
    copy(dst, src, 40)
    assert (dst[:40] == src[:40]).all()
    assert (dst[40:] == 255).all()


def test_a_record_of_zero_bytes_touches_nothing() -> None:
    HOST_COPY_FN(struct.pack("@PPN", 1, 1, 0))


def test_a_null_record_is_survived() -> None:
    HOST_COPY_FN(None)
    HOST_SIGNAL_FN(None)


@pytest.mark.parametrize("offset", range(8))
def test_a_record_need_not_be_aligned(offset: int) -> None:
    src, dst = bytearray(b"payload!"), bytearray(8)
    record = ctypes.create_string_buffer(b"\0" * offset + pack_host_copy_args(dst, src, 8))
    HOST_COPY_FN(ctypes.addressof(record) + offset)
    assert dst == src


def test_a_record_may_be_reused_and_changed() -> None:
    record = np.zeros(3, np.uintp)
    src = np.arange(4, dtype=np.uint8)
    dst = np.zeros(4, np.uint8)
    for i in range(4):
        record[:] = (address_of(dst) + i, address_of(src) + i, 1)
        HOST_COPY_FN(address_of(record))
    assert (dst == src).all()


@pytest.mark.parametrize("function", [HOST_COPY_FN, HOST_SIGNAL_FN])
def test_runs_on_a_foreign_thread_while_the_gil_is_held(function: Any) -> None:
    # PyDLL keeps the GIL during its calls: a function that wanted it would never let pthread_join return.
    libc = ctypes.PyDLL(None)
    src, dst = bytearray(b"payload!"), bytearray(8)
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    record = pack_host_copy_args(dst, src, 8) if function is HOST_COPY_FN else pack_host_signal_args(fd)
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, function, record) == 0
    assert libc.pthread_join(thread, None) == 0
    if function is HOST_COPY_FN:
        assert dst == src
    else:
        assert os.eventfd_read(fd) == 1
    os.close(fd)


# pack_host_copy_args


@given(
    dst=st.integers(1, ADDRESS_MAX),
    src=st.integers(1, ADDRESS_MAX),
    nbytes=st.integers(0, SIZE_MAX) | st.integers(0, 64),
)
def test_a_record_of_addresses_reads_back(dst: int, src: int, nbytes: int) -> None:
    assume(abs(dst - src) >= nbytes)
    assert struct.unpack("@PPN", pack_host_copy_args(dst, src, nbytes)) == (dst, src, nbytes)
    assert pack_host_copy_args(dst, src, nbytes) == struct.pack("@PPN", dst, src, nbytes)


@given(low=st.integers(1, 2**48), gap=st.integers(0, 2**20), excess=st.integers(1, 2**20))
def test_overlapping_ranges_are_refused_in_either_order(low: int, gap: int, excess: int) -> None:
    for dst, src in ((low, low + gap), (low + gap, low)):
        with pytest.raises(ValueError, match="overlap"):
            pack_host_copy_args(dst, src, gap + excess)


@given(low=st.integers(1, 2**48), nbytes=st.integers(0, 2**40))
def test_adjacent_ranges_do_not_overlap(low: int, nbytes: int) -> None:
    for dst, src in ((low, low + nbytes), (low + nbytes, low)):
        assert struct.unpack("@PPN", pack_host_copy_args(dst, src, nbytes)) == (dst, src, nbytes)


@given(data=st.binary(min_size=1, max_size=200), room=st.integers(0, 20), nbytes=st.integers(0, 250))
def test_buffers_are_bounded_by_the_smaller_side(data: bytes, room: int, nbytes: int) -> None:
    dst = bytearray(len(data) + room)
    if nbytes > len(data):
        with pytest.raises(ValueError, match="nbytes is"):
            pack_host_copy_args(dst, data, nbytes)
        with pytest.raises(ValueError, match="nbytes is"):
            pack_host_copy_args(bytearray(len(data)), bytes(300), nbytes)
    else:
        copy(dst, data, nbytes)
        assert dst[:nbytes] == data[:nbytes]
        assert not any(dst[nbytes:])


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(b"12345678"),
        lambda: memoryview(bytearray(b"12345678")),
        lambda: np.frombuffer(bytearray(b"12345678"), np.uint8),
        lambda: np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        lambda: np.zeros(4, "datetime64[s]"),
        lambda: array.array("d", [1.0, 2.0]),
        lambda: ctypes.create_string_buffer(8),
        lambda: (ctypes.c_int * 4)(1, 2, 3, 4),
        lambda: mmap.mmap(-1, 8),
    ],
)
def test_takes_any_contiguous_writable_buffer(make: Callable[[], Any]) -> None:
    dst = make()
    src = bytes(range(1, 9))
    copy(dst, src, 8)
    read = bytearray(8)
    copy(read, dst, 8)
    assert read == src
    if isinstance(dst, mmap.mmap):
        dst.close()


def test_keeps_no_reference_and_no_export() -> None:
    dst, src = bytearray(8), bytearray(8)
    before = sys.getrefcount(dst), sys.getrefcount(src)
    pack_host_copy_args(dst, src, 8)
    assert (sys.getrefcount(dst), sys.getrefcount(src)) == before
    dst.extend(b"still resizable")
    src.extend(b"still resizable")


class Address(int):
    """An int of a class of its own, as IntEnum members are."""


def test_a_subclass_of_int_is_an_address() -> None:
    assert struct.unpack("@PPN", pack_host_copy_args(Address(64), Address(128), 8)) == (64, 128, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        True,
        np.True_,
        np.uintp(64),
        np.int8(64),
        ctypes.c_void_p(64),
        ctypes.c_size_t(64),
        ctypes.pointer(ctypes.c_int(1)),
        HOST_COPY_FN,
    ],
)
@pytest.mark.parametrize("side", ["dst", "src"])
def test_what_holds_an_address_is_no_address(wrong: Any, side: str) -> None:
    sides = {"dst": bytearray(8), "src": bytearray(8), side: wrong}
    with pytest.raises(TypeError, match=rf"{side} is .*int\(address\)"):
        pack_host_copy_args(sides["dst"], sides["src"], 1)


@pytest.mark.parametrize("wrong", [None, 1.0, "text", [1, 2], object()])
@pytest.mark.parametrize("side", ["dst", "src"])
def test_neither_address_nor_buffer(wrong: Any, side: str) -> None:
    sides = {"dst": bytearray(8), "src": bytearray(8), side: wrong}
    with pytest.raises(TypeError, match=f"{side} must be an int address"):
        pack_host_copy_args(sides["dst"], sides["src"], 1)


@pytest.mark.parametrize(
    ("dst", "error"), [(b"12345678", BufferError), (memoryview(b"12345678"), BufferError), ("numpy", ValueError)]
)
def test_a_readonly_destination_raises_its_own_error(dst: Any, error: type[Exception]) -> None:
    if dst == "numpy":
        dst = np.frombuffer(b"12345678", np.uint8)
    with pytest.raises(error, match=r"writable|read-only"):
        pack_host_copy_args(dst, bytearray(8), 8)


@pytest.mark.parametrize("side", ["dst", "src"])
@pytest.mark.parametrize(
    "strided", [np.zeros(16, np.uint8)[::2], memoryview(bytearray(16))[::2], np.zeros((4, 4), np.uint8)[:, :2]]
)
def test_a_strided_side_raises_its_own_error(strided: Any, side: str) -> None:
    sides = {"dst": bytearray(8), "src": bytearray(8), side: strided}
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        pack_host_copy_args(sides["dst"], sides["src"], 8)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="__buffer__ in Python came with 3.12")
def test_an_exporters_type_error_is_its_own() -> None:
    class Exporter:
        def __buffer__(self, flags: int) -> memoryview:
            raise TypeError("not today")

    with pytest.raises(TypeError, match="not today"):
        pack_host_copy_args(Exporter(), bytearray(8), 8)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_null_address_is_refused(side: str) -> None:
    sides: dict[str, Any] = {"dst": bytearray(8), "src": bytearray(8), side: 0}
    for nbytes in (0, 8):
        with pytest.raises(ValueError, match=f"{side} is a null address"):
            pack_host_copy_args(sides["dst"], sides["src"], nbytes)


@pytest.mark.parametrize("value", [-1, 2**64, -(2**70), 2**70])
@pytest.mark.parametrize("field", [0, 1, 2])
def test_a_field_that_does_not_fit_overflows(value: int, field: int) -> None:
    arguments = [64, 128, 8]
    arguments[field] = value
    with pytest.raises(OverflowError, match=("dst", "src", "nbytes")[field]):
        pack_host_copy_args(*arguments)


@pytest.mark.parametrize("nbytes", [1.0, "1", None])
def test_nbytes_is_an_integer(nbytes: Any) -> None:
    with pytest.raises(TypeError):
        pack_host_copy_args(bytearray(8), bytearray(8), nbytes)
    assert pack_host_copy_args(64, 128, np.int64(8)) == pack_host_copy_args(64, 128, 8)


class Resource:
    def __init__(self, host: bool) -> None:
        self.is_host_accessible = host


class FakeBuffer:
    """Stands for cuda.core.Buffer, whose real one needs a driver for most of these."""

    def __init__(self, handle: int, size: int, resource: Resource | None = None, closed: bool = False) -> None:
        self.handle, self.size, self.memory_resource, self.is_closed = handle, size, resource, closed

    @property
    def is_host_accessible(self) -> bool:
        raise AssertionError("asks the driver")


@pytest.fixture
def fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("cuda.core")
    module.Buffer = FakeBuffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.core", module)


@pytest.mark.usefixtures("fake_core")
class TestBuffers:
    def test_address_and_bound(self) -> None:
        buffer = FakeBuffer(4096, 100, Resource(host=True))
        assert struct.unpack("@PPN", pack_host_copy_args(buffer, 64, 100)) == (4096, 64, 100)
        assert struct.unpack("@PPN", pack_host_copy_args(64, buffer, 100)) == (64, 4096, 100)
        with pytest.raises(ValueError, match="only 100 bytes"):
            pack_host_copy_args(buffer, 64, 101)

    def test_without_a_resource_it_is_taken_at_its_word(self) -> None:
        assert pack_host_copy_args(FakeBuffer(4096, 8), 64, 8)

    @pytest.mark.parametrize("side", [0, 1])
    def test_device_memory_is_refused(self, side: int) -> None:
        arguments: list[Any] = [64, 128]
        arguments[side] = FakeBuffer(4096, 8, Resource(host=False))
        with pytest.raises(ValueError, match="cannot access"):
            pack_host_copy_args(*arguments, 8)

    @pytest.mark.parametrize("side", [0, 1])
    def test_closed_is_refused(self, side: int) -> None:
        arguments: list[Any] = [64, 128]
        arguments[side] = FakeBuffer(0, 0, Resource(host=True), closed=True)
        with pytest.raises(RuntimeError, match="closed"):
            pack_host_copy_args(*arguments, 8)

    def test_null_and_overlap(self) -> None:
        with pytest.raises(ValueError, match="null"):
            pack_host_copy_args(FakeBuffer(0, 8), 64, 8)
        with pytest.raises(ValueError, match="overlap"):
            pack_host_copy_args(FakeBuffer(4096, 8), FakeBuffer(4100, 8), 8)


def test_a_real_buffer_of_foreign_memory() -> None:
    core = pytest.importorskip("cuda.core")
    memory = np.arange(16, dtype=np.uint8)
    buffer = core.Buffer.from_handle(address_of(memory), 16, owner=memory)
    dst = bytearray(16)
    copy(dst, buffer, 16)
    assert dst == memory.tobytes()
    with pytest.raises(ValueError, match="only 16 bytes"):
        pack_host_copy_args(buffer, dst, 17)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        pack_host_copy_args(dst, buffer, 16)


# pack_host_signal_args


@given(fd=st.integers(0, 2**31 - 1), value=st.integers(0, 2**64 - 1))
def test_a_signal_record_reads_back(fd: int, value: int) -> None:
    assert struct.unpack("@qQ", pack_host_signal_args(fd, value)) == (fd, value)


def test_a_signal_is_one_by_default() -> None:
    assert pack_host_signal_args(5) == struct.pack("@qQ", 5, 1)


@pytest.mark.parametrize("fd", [True, None, 1.0, "1", sys.stdout])
def test_a_descriptor_is_an_int(fd: Any) -> None:
    with pytest.raises(TypeError, match="fd"):
        pack_host_signal_args(fd)


def test_a_descriptor_in_range() -> None:
    with pytest.raises(ValueError, match="-1"):
        pack_host_signal_args(-1)
    with pytest.raises(OverflowError, match="fd"):
        pack_host_signal_args(2**31)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_a_value_that_does_not_fit_overflows(value: int) -> None:
    with pytest.raises(OverflowError, match="value"):
        pack_host_signal_args(1, value)
    with pytest.raises(TypeError):
        pack_host_signal_args(1, 1.5)  # type: ignore[arg-type]


# HOST_SIGNAL_FN


@pytest.fixture
def watchdog() -> Iterator[None]:
    """A signal that waits would hang the test: the process is ended then, with a trace."""
    import faulthandler

    faulthandler.dump_traceback_later(30, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def eventfd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


@pytest.mark.usefixtures("watchdog")
class TestSignal:
    @pytest.mark.parametrize("value", [1, 7, 2**32, EVENTFD_MAX])
    def test_eventfd(self, eventfd: int, value: int) -> None:
        send(eventfd, value)
        assert os.eventfd_read(eventfd) == value

    def test_eventfd_adds_up(self, eventfd: int) -> None:
        for value in (1, 2, 3):
            send(eventfd, value)
        assert os.eventfd_read(eventfd) == 6

    @pytest.mark.parametrize(("full", "value"), [(EVENTFD_MAX, 1), (EVENTFD_MAX - 1, 2), (5, EVENTFD_MAX)])
    def test_a_full_blocking_eventfd_counts_as_signalled(self, eventfd: int, full: int, value: int) -> None:
        os.eventfd_write(eventfd, full)
        send(eventfd, value)
        assert os.eventfd_read(eventfd) == full

    def test_an_eventfd_takes_what_just_fits(self, eventfd: int) -> None:
        os.eventfd_write(eventfd, EVENTFD_MAX - 9)
        send(eventfd, 9)
        assert os.eventfd_read(eventfd) == EVENTFD_MAX

    def test_a_value_that_no_eventfd_takes(self, eventfd: int) -> None:
        send(eventfd, 2**64 - 1)
        assert not select.select([eventfd], [], [], 0)[0]

    def test_pipe(self, pipe: tuple[int, int]) -> None:
        send(pipe[1], 2**63 + 5)
        assert os.read(pipe[0], 100) == struct.pack("@Q", 2**63 + 5)

    @pytest.mark.parametrize("blocking", [True, False])
    def test_a_full_pipe_counts_as_signalled(self, pipe: tuple[int, int], blocking: bool) -> None:
        os.set_blocking(pipe[1], False)
        size = until_blocked(lambda: os.write(pipe[1], bytes(4096)))
        os.set_blocking(pipe[1], blocking)
        send(pipe[1])
        os.set_blocking(pipe[0], False)
        assert until_blocked(lambda: len(os.read(pipe[0], 65536))) == size

    def test_many_writers_on_a_nearly_full_blocking_pipe(self, pipe: tuple[int, int]) -> None:
        import fcntl

        fcntl.fcntl(pipe[1], 1031, 4096)  # F_SETPIPE_SZ
        threads = [threading.Thread(target=lambda: [send(pipe[1]) for _ in range(2000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(os.read(pipe[0], 65536)) % 8 == 0

    @pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
    def test_socket(self, kind: int) -> None:
        left, right = socket.socketpair(socket.AF_UNIX, kind)
        with left, right:
            send(left.fileno(), 77)
            assert right.recv(100) == struct.pack("@Q", 77)

    @pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
    def test_a_full_blocking_socket_counts_as_signalled(self, kind: int) -> None:
        left, right = socket.socketpair(socket.AF_UNIX, kind)
        with left, right:
            left.setblocking(False)
            size = until_blocked(lambda: left.send(bytes(512)))
            left.setblocking(True)
            send(left.fileno())
            right.setblocking(False)
            assert until_blocked(lambda: len(right.recv(65536))) == size

    def test_closed_peers_raise_no_sigpipe(self) -> None:
        # Python ignores SIGPIPE; a program that embeds it need not.
        program = """
import ctypes, os, signal, socket, threading
from aiocuda_copy._host_functions import HOST_SIGNAL_FN, pack_host_signal_args
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
def closed_pipe():
    reader, writer = os.pipe(); os.close(reader); return writer
def closed_socket():
    left, right = socket.socketpair(); right.close(); return left.detach()
for make in (closed_pipe, closed_socket):
    fd = make()
    for _ in range(3):
        HOST_SIGNAL_FN(pack_host_signal_args(fd))
    thread = threading.Thread(target=HOST_SIGNAL_FN, args=(pack_host_signal_args(fd),))
    thread.start(); thread.join()
assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert signal.SIGPIPE not in signal.sigpending()
print("alive")
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr

    def test_a_pending_sigpipe_of_the_threads_own_stays_pending(self, pipe: tuple[int, int]) -> None:
        os.close(pipe[0])
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        try:
            signal.pthread_kill(threading.get_ident(), signal.SIGPIPE)
            send(pipe[1])
            assert signal.SIGPIPE in signal.sigpending()
            assert signal.sigtimedwait([signal.SIGPIPE], 0) is not None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def test_bad_descriptors_are_survived(self, pipe: tuple[int, int]) -> None:
        os.close(pipe[0])
        os.close(pipe[1])
        send(pipe[1])
        for fd in (-1, 2**31, 2**31 - 1, -(2**63), 2**63 - 1):
            HOST_SIGNAL_FN(struct.pack("@qQ", fd, 1))

    def test_the_reading_end_is_survived(self, pipe: tuple[int, int]) -> None:
        send(pipe[0])

    @pytest.mark.parametrize("make", ["good", "closed"])
    def test_errno_is_preserved(self, eventfd: int, make: str) -> None:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, use_errno=True)(
            ctypes.cast(HOST_SIGNAL_FN, ctypes.c_void_p).value
        )
        fd = eventfd if make == "good" else 2**30
        ctypes.set_errno(errno.EXDEV)
        function(pack_host_signal_args(fd))
        assert ctypes.get_errno() == errno.EXDEV

    def test_interrupting_signals_lose_nothing(self, eventfd: int) -> None:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            end = time.monotonic() + 0.5
            sent = 0
            while time.monotonic() < end:
                send(eventfd)
                sent += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert os.eventfd_read(eventfd) == sent

    def test_wakes_a_selector(self, eventfd: int) -> None:
        poller = select.epoll()
        with poller:
            poller.register(eventfd, select.EPOLLIN)
            assert poller.poll(0) == []
            threading.Timer(0.05, send, (eventfd,)).start()
            assert poller.poll(10) == [(eventfd, select.EPOLLIN)]
