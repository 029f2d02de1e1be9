"""The stream-ordered building blocks: host functions in C, the packers of their records, and a launcher.

The interface is the one that cuda.core gives its host copy function, so that records and pointers are interchangeable.
Importing this module makes no driver call.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import sys
from _ctypes import CFuncPtr
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from . import _driver, _native
from ._streams import resolve_handle

if TYPE_CHECKING:
    import cuda.core
    from typing_extensions import Buffer

__all__ = ["HOST_COPY_FN", "HOST_SIGNAL_FN", "launch_host_func", "pack_host_copy_args", "pack_host_signal_args"]

_CUhostFn = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

HOST_COPY_FN: Final = _CUhostFn(_native.host_copy_address())
"""A ``CUhostFn`` in C that copies host memory, as a ctypes function pointer.

Its user data is a record ``dst, src, nbytes`` of native width (``struct`` format ``"@PPN"``), which
:func:`pack_host_copy_args` packs; ``nbytes == 0`` does nothing. It takes neither the GIL nor a lock. Any library that
takes a ``CUhostFn`` may be given it, with the packed bytes or with the address of a record that the caller keeps.

The driver runs all host functions of a context on one thread, one after another. A copy holds up every other one for
its whole length: copy in chunks of a few MiB.
"""

HOST_SIGNAL_FN: Final = _CUhostFn(_native.host_signal_address())
"""A ``CUhostFn`` in C that writes to a file descriptor, as a ctypes function pointer.

Its user data is a record ``fd, value`` of 64-bit integers (``struct`` format ``"@qQ"``), which
:func:`pack_host_signal_args` packs. It writes the 8 bytes of ``value`` to an eventfd, a pipe or a socket. It never
waits: where the descriptor cannot take 8 bytes, a wake-up is under way already and nothing is written. It raises no
``SIGPIPE``, and a descriptor that is closed or whose peer is gone is left alone.
"""

_COPY_RECORD = struct.Struct("@PPN")
_SIGNAL_RECORD = struct.Struct("@qQ")
_ADDRESS_MAX = 2 ** (8 * struct.calcsize("@P")) - 1
_SIZE_MAX = 2 ** (8 * struct.calcsize("@N")) - 1
_INT_MAX = 2**31 - 1
_VALUE_MAX = 2**64 - 1

# By address, since a caller may wrap the same address in a pointer of his own.
_OWN_FUNCTIONS: Final = {
    _native.host_copy_address(): ("HOST_COPY_FN", _COPY_RECORD.size, "pack_host_copy_args(dst, src, nbytes)"),
    _native.host_signal_address(): ("HOST_SIGNAL_FN", _SIGNAL_RECORD.size, "pack_host_signal_args(fd)"),
}

# ctypes gives prototypes made by PYFUNCTYPE this flag.
_EXPECTS_GIL = 4

# These hold an address as their value and export the memory of the object that holds it: copying there is never meant.
_AMBIGUOUS = (bool, np.bool_, np.integer, ctypes._SimpleCData, ctypes._Pointer, CFuncPtr)


def pack_host_copy_args(
    dst: int | cuda.core.Buffer | Buffer, src: int | cuda.core.Buffer | Buffer, nbytes: int
) -> bytes:
    """Packs the record of :data:`HOST_COPY_FN`.

    No driver call is made and no reference is kept: ``dst`` and ``src`` must stay alive, in place and of the same size
    (think of a ``bytearray``) until the copy has run, at every replay where it is part of a graph.

    Parameters
    ----------
    dst : int, cuda.core.Buffer or buffer-protocol object
        Where to copy to: a host address, or host memory that is contiguous and writable.
    src : int, cuda.core.Buffer or buffer-protocol object
        Where to copy from: a host address, or host memory that is contiguous.
    nbytes : int
        How many bytes to copy, from the start of each side. Zero packs a copy that does nothing.

    Returns
    -------
    bytes
        ``struct.pack("@PPN", dst, src, nbytes)`` with the two addresses.

    Raises
    ------
    TypeError
        When a side is none of the above, or is a ``bool``, a NumPy integer or a ctypes scalar or pointer, whose own
        memory would be copied in place of what it points to. An object that cannot export a contiguous view, or a
        writable one for ``dst``, raises its own error.
    ValueError
        When ``nbytes`` exceeds the size of a side, a Buffer's memory resource is not host-accessible, an address is
        null, or the ranges overlap. Adjacent ranges do not overlap.
    OverflowError
        When ``nbytes`` or an address is negative or does not fit its field.
    RuntimeError
        When a Buffer is closed.

    Notes
    -----
    An int, and a Buffer without a memory resource, are taken at the caller's word: whether the address is host memory
    could only be asked of the driver, which a host function must not do.
    """
    dst_address, dst_size = _span("dst", dst, writable=True)
    src_address, src_size = _span("src", src, writable=False)
    nbytes = _in_range("nbytes", operator.index(nbytes), _SIZE_MAX)
    for name, address, size in (("dst", dst_address, dst_size), ("src", src_address, src_size)):
        if size is not None and nbytes > size:
            raise ValueError(f"nbytes is {nbytes}, but {name} has only {size} bytes")
        if address == 0:
            raise ValueError(f"{name} is a null address")
    if dst_address < src_address + nbytes and src_address < dst_address + nbytes:
        raise ValueError(
            f"dst ({dst_address:#x}) and src ({src_address:#x}) overlap within {nbytes} bytes; the copy is a memcpy, "
            "copy through a third buffer"
        )
    return _COPY_RECORD.pack(dst_address, src_address, nbytes)


def pack_host_signal_args(fd: int, value: int = 1) -> bytes:
    """Packs the record of :data:`HOST_SIGNAL_FN`.

    The descriptor must stay open until the signal has run: its number may by then belong to something else.

    Parameters
    ----------
    fd : int
        An eventfd, or the writing end of a pipe or socket.
    value : int
        The 8 bytes to write, in native byte order. An eventfd adds it to its counter; it takes at most ``2**64 - 2``,
        and zero does not wake its readers.

    Returns
    -------
    bytes
        ``struct.pack("@qQ", fd, value)``.

    Raises
    ------
    TypeError
        When ``fd`` or ``value`` is not an int, or ``fd`` is a ``bool``.
    ValueError
        When ``fd`` is negative.
    OverflowError
        When ``fd`` does not fit a C ``int``, or ``value`` does not fit 64 unsigned bits.
    """
    if isinstance(fd, bool) or not hasattr(fd, "__index__"):
        raise TypeError(f"fd must be a file descriptor as an int, not {_kind(fd)}; pass object.fileno()")
    fd = operator.index(fd)
    if fd < 0:
        raise ValueError(f"fd is {fd}: not an open file descriptor")
    return _SIGNAL_RECORD.pack(_in_range("fd", fd, _INT_MAX), _in_range("value", operator.index(value), _VALUE_MAX))


def launch_host_func(stream: Any, fn: CFuncPtr, user_data: int | Buffer | None = None) -> None:
    """Enqueues a host function: it runs after all work that is in the stream now, and before all later work.

    Returns when the function has been enqueued. The GIL is released meanwhile, since the driver lets a caller wait
    whose stream is full.

    Parameters
    ----------
    stream
        Anything with ``__cuda_stream__``, a ``cuda.core``, torch or CuPy stream, or an int handle; 0, 1 and 2 mean the
        default streams of the current context.
    fn : ctypes function pointer
        Of prototype ``ctypes.CFUNCTYPE(None, ctypes.c_void_p)``, such as :data:`HOST_COPY_FN`. It is kept alive until
        it has run. It must not call the CUDA driver.
    user_data : int, bytes-like or None
        What ``fn`` is called with: an address, whose memory the caller keeps; bytes, which are copied here, so that the
        caller may overwrite or drop them at once; or a null pointer.

    Raises
    ------
    TypeError
        When ``fn`` is a plain Python callable or has another prototype, ``stream`` is no stream, or ``user_data`` is
        none of the above.
    ValueError
        When ``fn`` is null, or is one of this module's functions without a record: no user data, a null address, or
        bytes of another length than the record's. Nothing has been enqueued then.
    OverflowError
        When the address is negative or does not fit a pointer.
    RuntimeError
        When the stream is being captured. The copy of the bytes could not outlive the replays: add the function to the
        graph by other means, such as cuda.core's ``GraphBuilder.callback``. The capture stays valid.
    CudaError
        When the driver refuses. Nothing is kept then.

    Notes
    -----
    A pointer that ctypes made for a Python function has the same type as one to C code and is accepted, but it makes
    the driver's one host-function thread wait for the GIL, and all other host functions of the context with it;
    exceptions in it are only printed, and it must have run before the interpreter exits.

    After a device fault the driver neither runs host functions nor says so. The copy of the bytes of a function that
    has been enqueued is then never freed.
    """
    function = _function_address(fn)
    address, view = _user_data(user_data)
    try:
        _launch(stream, fn, function, address, view)
    finally:
        if view is not None:
            view.release()  # the frames of an error would keep it


def _launch(stream: Any, fn: CFuncPtr, function: int, address: int, view: memoryview | None) -> None:
    own = _OWN_FUNCTIONS.get(function)
    if own is not None:
        _check_record(*own, address, view)
    handle = resolve_handle(stream)
    _driver.ensure()
    enqueuing, code, capturing = _native.launch_host_func(handle, function, address, view, None if own else fn)
    if capturing:
        raise RuntimeError(
            "the stream is being captured, and launch_host_func cannot keep user_data for a graph's replays; add the "
            "function to the graph itself (cuda.core: GraphBuilder.callback), or launch on a stream outside the capture"
        )
    _driver.check(code, "cuLaunchHostFunc" if enqueuing else "cuStreamIsCapturing")


def _span(name: str, value: Any, *, writable: bool) -> tuple[int, int | None]:
    """The address of one side, and its size where it is known."""
    if isinstance(value, _AMBIGUOUS):
        raise TypeError(
            f"{name} is {_kind(value)}, which would be copied itself and not what it points to; for an address pass "
            "int(address)"
        )
    if isinstance(value, int):
        return _in_range(name, value, _ADDRESS_MAX), None
    if _is_core_buffer(value):
        return _core_buffer_span(name, value)
    span = _native.contiguous_span(value, writable)
    if span is None:
        raise TypeError(
            f"{name} must be an int address, a cuda.core.Buffer or an object with the buffer protocol, not "
            f"{_kind(value)}"
        )
    return span


def _is_core_buffer(value: Any) -> bool:
    # A Buffer can only come from a cuda.core that has been imported.
    core = sys.modules.get("cuda.core")
    buffer_type = getattr(core, "Buffer", None)
    return buffer_type is not None and isinstance(value, buffer_type)


def _core_buffer_span(name: str, buffer: Any) -> tuple[int, int]:
    if buffer.is_closed:
        raise RuntimeError(f"{name} is a closed Buffer")
    # Buffer.is_host_accessible would ask the driver where there is no memory resource.
    resource = buffer.memory_resource
    if resource is not None and not resource.is_host_accessible:
        raise ValueError(
            f"{name} is a Buffer of {_kind(resource)}, which the CPU cannot access; copy through a pinned Buffer"
        )
    return int(buffer.handle), int(buffer.size)


def _function_address(fn: Any) -> int:
    if not isinstance(fn, CFuncPtr):
        if callable(fn):
            raise TypeError(
                "fn is a Python callable: the driver's one host-function thread would have to wait for the GIL, and "
                "every other host function of the context with it. Pass a ctypes pointer to a C function of prototype "
                "CFUNCTYPE(None, c_void_p), such as HOST_COPY_FN; to run Python code at that point of the stream, "
                "await synchronize(stream)"
            )
        raise TypeError(f"fn must be a ctypes function pointer, such as HOST_COPY_FN, not {_kind(fn)}")
    if fn.restype is not None or tuple(fn.argtypes or ()) != (ctypes.c_void_p,):
        raise TypeError(
            f"fn must have the prototype CFUNCTYPE(None, c_void_p), but has restype {fn.restype!r} and argtypes "
            f"{fn.argtypes!r}; a function of a library has to be declared: fn.restype = None; fn.argtypes = [c_void_p]"
        )
    if getattr(type(fn), "_flags_", 0) & _EXPECTS_GIL:
        raise TypeError("fn was declared by PYFUNCTYPE: it expects the GIL, which the driver's thread does not hold")
    # Not by ctypes.cast, which makes fn refer to itself, so that only the garbage collector could free it.
    address: int = struct.unpack("@P", fn)[0]
    if not address:
        raise ValueError("fn is a null function pointer")
    return address


def _user_data(user_data: Any) -> tuple[int, memoryview | None]:
    """What the function is called with: an address, or a view of the bytes to copy."""
    if user_data is None:
        return 0, None
    if isinstance(user_data, _AMBIGUOUS):
        raise TypeError(
            f"user_data is {_kind(user_data)}; pass int(address) for the address of a record, or bytes for a record"
        )
    if isinstance(user_data, int):
        return _in_range("user_data", user_data, _ADDRESS_MAX), None
    try:
        return 0, memoryview(user_data)
    except TypeError as exc:
        raise TypeError(
            f"user_data must be None, an int address or a bytes-like object, not {_kind(user_data)}"
        ) from exc


def _check_record(name: str, size: int, packer: str, address: int, view: memoryview | None) -> None:
    if view is not None:
        if view.nbytes != size:
            raise ValueError(f"{name} takes a record of {size} bytes, not {view.nbytes}; pack it with {packer}")
    elif address == 0:
        raise ValueError(f"{name} needs user_data: the bytes of {packer}, or the address of such a record")


def _in_range(name: str, value: int, largest: int) -> int:
    if not 0 <= value <= largest:
        raise OverflowError(f"{name} is {value}; it must be between 0 and {largest}")
    return value


def _kind(value: Any) -> str:
    kind = type(value)
    name: str = kind.__qualname__
    return f"a {name}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{name}"
