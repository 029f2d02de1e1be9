"""Async iterators for loaders: batches on their way to the device, and results on their way back."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any

import numpy as np

from . import _copies, _driver, _native
from ._batches import Batches
from ._device_memory import DeviceMemory
from ._exports import export
from ._nested import Side
from ._order import refuse_capture
from ._pinned import default_pool
from ._results import result_spec
from ._started import Started
from ._streams import LEGACY_DEFAULT, resolve_handle
from ._threads import run_to_end

__all__ = ["collect", "prefetch"]


class _ToDevice:
    """Host arrays to the device."""

    side: Side = "host"

    def __init__(self, device: Any, stream: Any, empty: Callable[..., Any] | None) -> None:
        self._device = _ordinal(device)
        self._stream = stream
        self._handle = None if stream is None else resolve_handle(stream)
        if empty is not None and not callable(empty):
            raise TypeError(f"empty must be a callable (shape, dtype), not {type(empty).__qualname__}")
        self._empty = empty
        self._torch_stream: Any = None
        self._memory: DeviceMemory | None = None

    def check(self) -> None:
        if self._device is None:
            self._device = max(_native.current_device(), 0)
        code, count = _native.device_count()
        _driver.check(code, "cuDeviceGetCount")
        if self._device >= count:
            raise ValueError(f"there is no device {self._device}; the driver has {count}")

    async def start(self, array: Any, copies: list[Started]) -> Any:
        # What cannot be copied is found out before memory is taken for it.
        source = export(array, role="source")
        stream, operation, others = self._stream, None, list[tuple[int, int]]()
        if self._empty is not None:
            target = self._empty(*result_spec(source))
        elif source.framework == "torch":
            target, stream = self._tensor(array)
        else:
            if self._memory is None:
                # Importing cuda.core takes a while.
                self._memory = await run_to_end(self._make_memory)
            target, operation = await self._memory.empty(*result_spec(source))
            others.append(self._memory.allocating)
        _add(copies, _copies._default_copier()._start(array, target, "to_device", stream, operation, others))
        return target

    def _make_memory(self) -> DeviceMemory:
        assert self._device is not None
        copier = _copies._default_copier()
        return DeviceMemory(copier, self._device, self._stream, self._handle or LEGACY_DEFAULT)

    def _tensor(self, tensor: Any) -> tuple[Any, Any]:
        torch = sys.modules["torch"]
        place = torch.device("cuda", self._device)
        if self._torch_stream is None:
            if not torch.cuda.is_available():
                raise ValueError(
                    "prefetch makes tensors of tensors, and this torch finds no CUDA device "
                    "(torch.cuda.is_available()); install a torch that has CUDA, or pass empty=, which makes the "
                    "arrays on the device"
                )
            # One for all: later the consumer may be inside another one's block, which is the thread's.
            self._torch_stream = (
                torch.cuda.current_stream(place)
                if self._handle is None
                else torch.cuda.ExternalStream(self._handle, device=place)
            )
        # Like the stream, inference mode is the thread's, and maybe the consumer's for the moment.
        with torch.inference_mode(False), torch.cuda.stream(self._torch_stream):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=place), self._torch_stream


class _ToHost:
    """Device arrays to new arrays of NumPy's."""

    side: Side = "device"

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._handle = None if stream is None else resolve_handle(stream)

    def check(self) -> None:
        pass

    async def start(self, array: Any, copies: list[Started]) -> Any:
        refuse_capture(self._handle)
        shape, dtype = result_spec(export(array, role="source", stream=self._handle))
        pool = default_pool()
        target = pool.try_empty(shape, dtype)
        if target is None:
            try:
                target = await pool.empty_async(shape, dtype)
            except MemoryError:
                target = np.empty(shape, dtype)
        _add(copies, _copies._default_copier()._start(array, target, "to_host", self._stream))
        return target


def _add(copies: list[Started], copy: Started | None) -> None:
    if copy is not None:
        copies.append(copy)


def _ordinal(device: Any) -> int | None:
    """The ordinal that an int, "cuda:1" or a torch device means; ``None`` for the thread's current device."""
    if not isinstance(device, str) and hasattr(device, "type") and hasattr(device, "index"):
        device = str(device)
    if isinstance(device, str):
        match = re.fullmatch(r"cuda(?::(\d+))?", device)
        if match is None:
            raise ValueError(f"device must be an ordinal or a CUDA device such as 'cuda:0', not {device!r}")
        return None if match[1] is None else int(match[1])
    try:
        ordinal = operator.index(device)
    except TypeError:
        raise TypeError(f"device must be an int, a string or a torch device, not {type(device).__qualname__}") from None
    if isinstance(device, bool) or ordinal < 0:
        raise ValueError(f"device must be an ordinal of at least 0, not {device!r}")
    return ordinal


def prefetch(
    iterable: Iterable[Any] | AsyncIterable[Any],
    *,
    device: Any = 0,
    depth: int = 2,
    stream: Any = None,
    empty: Callable[..., Any] | None = None,
) -> Batches:
    """Copies the batches of a loader to a device while those before them are being computed with.

    ::

        async with prefetch(loader) as batches:
            async for batch in batches:
                ...

    Parameters
    ----------
    iterable
        A sync or an async iterable, such as a ``torch.utils.data.DataLoader``, of dicts, lists, tuples, named tuples
        and dataclasses, nested in any way. Their arrays in host memory (NumPy arrays, CPU tensors, host arrays with
        DLPack) are copied; all else, also what is on a device already, passes through unchanged. A sync iterable is
        advanced in a worker thread, one step at a time, since it may block. What it has yielded must not be written to
        again: it is copied while the next batch is made.
    device : int, str or torch.device, default 0
        The ordinal, ``"cuda:0"``, or ``"cuda"`` for the thread's current device.
    depth : int, default 2
        How many batches are on their way at most, beyond the one that you hold.
    stream : optional
        The stream in which you work with the batches: anything that :func:`copy_to_host` takes. By default torch's
        current stream when the first tensor comes, for tensors; else the legacy default stream. One that is given as an
        int must not be destroyed before the last batch has been dropped; an object is held.
    empty : callable, optional
        ``empty(shape, dtype)`` makes the array on the device that one is copied to, such as ``cupy.empty``; the dtype
        is NumPy's. By default tensors become tensors, allocated by torch, and other arrays small objects with
        ``__cuda_array_interface__``, which every framework takes.

    Returns
    -------
    Batches
        An async iterator, with ``aclose()``, that is an async context manager as well.

    Raises
    ------
    TypeError, ValueError
        Bad arguments: at once, or, where the driver must be asked, when the iteration begins.

    Notes
    -----
    A batch that is handed out is complete. Memory of a dropped batch is written to again only after the work that was
    then in ``stream``. Errors of the source and of copies are raised in the place of their batch. The contract of
    ``async with`` and of leaving it out is in the documentation.
    """
    return Batches(iterable, depth, _ToDevice(device, stream, empty))


def collect(iterable: Iterable[Any] | AsyncIterable[Any], *, depth: int = 2, stream: Any = None) -> Batches:
    """Copies results to the host while the next ones are being computed: :func:`prefetch` the other way.

    Parameters
    ----------
    iterable
        As for :func:`prefetch`. The arrays on a device become NumPy arrays, in pooled page-locked memory while its
        limit allows; all else passes through unchanged. What it has yielded must not be overwritten, as the next
        replay of a CUDA graph does with its outputs.
    depth : int, default 2
        How many results are on their way at most, beyond the one that you hold.
    stream : optional
        The stream in which the results are computed. By default, at the moment in which one comes from the iterable,
        the current stream of the framework that it comes from, else the legacy default stream.

    Returns
    -------
    Batches
        As :func:`prefetch`.
    """
    return Batches(iterable, depth, _ToHost(stream))
