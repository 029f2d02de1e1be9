"""The public functions: those of a copier that follows the arrays to their devices."""

from __future__ import annotations

import threading
from typing import Any

from ._copier import Copier, Progress

__all__ = ["copy_batch", "copy_to_device", "copy_to_host", "synchronize"]

_default: Copier | None = None
_default_lock = threading.Lock()


def _default_copier() -> Copier:
    """The copier of the module's functions, which follow the arrays to their devices."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = Copier._for_all_devices()
    return _default


async def copy_to_host(
    src: Any,
    dst: Any = None,
    *,
    stream: Any = None,
    in_stream: bool = False,
    progress: Progress | None = None,
    like: Any = None,
) -> Any:
    """Copies from a device to host memory.

    Parameters
    ----------
    src : array or Buffer on a device
        Anything with ``__cuda_array_interface__`` or ``__dlpack__``, a ``cuda.core.Buffer``, managed memory.
    dst : array or Buffer in host memory, optional
        Anything with the buffer protocol, a NumPy array, a CPU tensor, a host Buffer; of the source's size in bytes.
        By default a new array of the source's shape and dtype (one-dimensional ``uint8`` where it has none), in pooled
        page-locked memory while the pool's limit allows. Types that NumPy lacks are those of ``ml_dtypes``.
    stream : optional
        The stream that the copy is ordered in: anything with ``__cuda_stream__``, a torch or CuPy stream, or an int
        handle. By default the current stream of the framework that ``src`` comes from, else the legacy default stream.
    in_stream : bool, default False
        Enqueue the copy as an ordinary operation of the stream, so that later work in the stream is ordered behind it.
        Page-locked memory only. The call may then wait where the driver makes every enqueue on the stream wait.
    progress : callable, optional
        Called as ``progress(done_nbytes, total_nbytes)`` on the loop's thread, at most 20 times a second, and once at
        the end of a success. An exception from it cancels the copy and is raised.
    like : optional
        What the new array is: a NumPy array (by default, and for ``"numpy"``), a CPU tensor over the same memory
        (``"torch"``, the module ``torch``, or a CPU tensor), or a JAX array on the host, likewise where the memory is
        page-locked (``"jax"``, the module ``jax``, or such an array). Only without ``dst``.

    Returns
    -------
    array
        ``dst``, or the new array.

    Raises
    ------
    TypeError, ValueError
        Bad arguments, before anything is enqueued.
    RuntimeError
        The stream is under capture (which stays valid), or a Buffer is closed.
    CudaError
        The driver failed, at the latest a second after a fault of the device.

    Notes
    -----
    The copy comes after all work that was in the stream when the call began. Between the call and its return do not
    touch either side, not even by enqueuing work in the stream: the copy itself runs in a stream of the library's own.
    """
    copier = _default if _default is not None else _default_copier()
    # As the copier's own: a coroutine of its around that would be felt by small copies.
    begun = copier._short_way.begin(src, dst, stream, True, in_stream, progress, like)
    if not begun:
        return await copier._copy(src, dst, "to_host", stream, in_stream, progress, like, begun=begun)
    if begun is not True:
        await begun
    return dst


async def copy_to_device(
    src: Any, dst: Any, *, stream: Any = None, in_stream: bool = False, progress: Progress | None = None
) -> Any:
    """Copies to a device, from host memory of any kind or from the same or another device.

    Parameters
    ----------
    src : array or Buffer
        In host memory or on a device. Host memory is read when the stream has reached the copy, not before.
    dst : array or Buffer on a device
        Of the source's size in bytes.
    stream, in_stream, progress
        As for :func:`copy_to_host`.

    Returns
    -------
    array
        ``dst``.

    Raises
    ------
    TypeError, ValueError, RuntimeError, CudaError
        As :func:`copy_to_host`; and ``ValueError`` for contiguous memory on a device that overlaps, since the driver
        says nothing of the order in which bytes are copied. Of strided memory that is not found out.
    """
    copier = _default if _default is not None else _default_copier()
    begun = copier._short_way.begin(src, dst, stream, False, in_stream, progress)
    if not begun:
        return await copier._copy(src, dst, "to_device", stream, in_stream, progress, begun=begun)
    if begun is not True:
        await begun
    return dst


async def copy_batch(
    stream: Any, srcs: Any, dsts: Any, *, sizes: Any = None, options: Any = None, in_stream: bool = False
) -> None:
    """Copies many buffers with one await; mirrors ``cuda.core.utils.copy_batch``.

    Parameters
    ----------
    stream
        The stream that the batch is ordered in, as for :func:`copy_to_host`; ``None`` likewise.
    srcs, dsts : sequence of arrays or Buffers, Blocks, or buffer of uint64
        A sequence of arrays; or :class:`Blocks`, one array and offsets into it; or a ``uint64`` buffer of addresses,
        whose memory is the caller's to keep. The last two need ``sizes`` and cost no Python work per entry. Each
        destination must have its source's size. Entries may go to the host, to the device and between devices in one
        batch; empty ones are dropped.
    sizes : int or buffer of int64 or uint64, optional
        Bytes of every entry, or of each; for Blocks and addresses only.
    options : cuda.core.utils.CopyOptions or sequence of them, optional
        One for all, or one for each entry; by default stream order.
    in_stream : bool, default False
        As for :func:`copy_to_host`.

    Raises
    ------
    TypeError
        A single buffer in place of a sequence.
    ValueError
        Unequal lengths or sizes, naming the index; overlapping destinations.
    NotImplementedError
        Options other than the defaults where the driver has no ``cuMemcpyBatchAsync`` (before CUDA 12.8).
    RuntimeError, CudaError
        As :func:`copy_to_host`.

    Warns
    -----
    UserWarning
        When overlap with compute is asked for on a discrete GPU, where it has no effect.
    """
    await _default_copier()._copy_batch(stream, srcs, dsts, sizes, options, in_stream)


async def synchronize(stream_or_event: Any) -> None:
    """Waits for a stream, or for an event, without holding the loop.

    Parameters
    ----------
    stream_or_event
        A stream as for :func:`copy_to_host`, or an event of cuda.core, torch or CuPy.

    Raises
    ------
    RuntimeError
        The stream is under capture.
    CudaError
        The driver failed.

    Notes
    -----
    Resolves when all work enqueued so far in the stream (or captured by the event), and the library's own copies
    accepted for that stream so far, have finished. Of the same copier's calls those count as well that have begun and
    are still waiting for memory, or being planned.
    """
    await _default_copier().synchronize(stream_or_event)
