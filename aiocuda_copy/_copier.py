"""The copier: what the copies do, within its limits."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from . import _dispatcher, _driver, _native
from ._calls import Call, Calls
from ._copy_batch import Batches
from ._errors import ClosedError, let_go_of_buffers
from ._exports import export
from ._inline import inline_is_sensible
from ._order import (
    MARKING,
    Order,
    check_admission,
    device_of_stream,
    handle_of,
    primary_context,
    special,
    streams_of,
)
from ._pinned import PinnedPool, default_pool
from ._plan import Direction, Plan, Route, plan_copy
from ._regions import Kind, Region, classify
from ._results import Like, library_of, make, result_spec, result_type
from ._started import Started
from ._stats import CopierStats
from ._streams import default_for, device_named_by, event_handle, is_event, resolve_handle

__all__ = ["Copier", "Progress"]

Progress = Callable[[int, int], object]

_MOST, _MOST_NBYTES = 2**31 - 1, 2**47
_CLOSED = "the copier has been closed: make another one, or use the functions of the module"


class Copier(Batches):
    """Copies with limits and options of their own.

    A copier is a quota on the one engine that a device has in a process, not an engine of its own: making one costs
    nothing, and copies of different copiers share the link fairly.

    Parameters
    ----------
    device : int, default 0
        The ordinal of the device. Arrays of another one are a ``ValueError``.
    slots : int, default 16
        Staging slots of page-locked memory that the copier's copies may use at a time. However many copies wait, they
        hold no more.
    slot_nbytes : int, default 4 MiB
        Bytes of a slot, and so of a piece that is copied at a time. A multiple of 4096.
    workers : int, optional
        Threads that may copy between slots and pageable memory at a time; by default two fewer than the process has
        processors, at most 14, of which 11 serve copies to the device.
    pinned_limit_nbytes : int, optional
        Page-locked bytes that results (``dst=None``) may hold; by default the process's pool and its limit.
    inline : bool, default True
        Whether a small copy on an idle stream may finish inside the call.
    completion : {"host_function", "flag"}, default "host_function"
        Whether the engine lets the driver call it when a stream that it has waited for for a while is reached, or only
        looks by itself, at least every millisecond.
    check_overlap : bool, default False
        Whether overlapping destinations are also looked for in batches of raw addresses.
    zero_on_reuse : bool, default False
        Whether page-locked memory of results is zeroed before it is used again.
    kernel_blocks : int, optional
        Blocks of 256 threads that the kernel for batches takes over the link, at most 1024. By default the fewest that
        fill it, 4 to 32 (up to 128 for some microseconds, where it only fills bundles on the device), because each
        slows down what else runs on the device. Copies inside a device take all of it.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong type, or out of its range.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        slots: int = 16,
        slot_nbytes: int = 4 << 20,
        workers: int | None = None,
        pinned_limit_nbytes: int | None = None,
        inline: bool = True,
        completion: Literal["host_function", "flag"] = "host_function",
        check_overlap: bool = False,
        zero_on_reuse: bool = False,
        kernel_blocks: int | None = None,
    ) -> None:
        ordinal = _checked_int("device", device, 0, most=_MOST)
        self._set_up(
            slots=_checked_int("slots", slots, 1, most=_MOST),
            slot_nbytes=_checked_int("slot_nbytes", slot_nbytes, 4096, most=_MOST_NBYTES, multiple=4096),
            workers=None if workers is None else _checked_int("workers", workers, 1, most=_MOST),
            completion=completion,
            kernel_blocks=0 if kernel_blocks is None else _checked_int("kernel_blocks", kernel_blocks, 1, most=1024),
        )
        self._inline = bool(inline) and inline_is_sensible()
        self._serve(ordinal)
        self._check_overlap = bool(check_overlap)
        self._pool: PinnedPool | None = None
        if pinned_limit_nbytes is not None or zero_on_reuse:
            limit = pinned_limit_nbytes
            if limit is not None:
                limit = _checked_int("pinned_limit_nbytes", limit, 0, most=_MOST_NBYTES)
            self._pool = PinnedPool(limit, zero_on_reuse=zero_on_reuse)

    def _set_up(
        self, *, slots: int, slot_nbytes: int, workers: int | None, completion: str, kernel_blocks: int
    ) -> None:
        if completion not in ("host_function", "flag"):
            raise ValueError(f"completion must be 'host_function' or 'flag', not {completion!r}")
        self._slot_nbytes = slot_nbytes
        self._quota = _native.Quota(
            slots=slots,
            slot_nbytes=slot_nbytes,
            workers=2**31 if workers is None else workers,
            host_function_hints=completion == "host_function",
            kernel_blocks=kernel_blocks,
        )
        self._devices: set[int] = set()
        self._calls = Calls()
        self._nbytes_in_stream = 0

    def _serve(self, device: int | None) -> None:
        self._device = device
        self._native_device = -1 if device is None else device
        self._short_way = _native.ShortWay(
            self._quota, self._native_device, self._inline, self._devices, _dispatcher.current, resolve_handle,
            _driver.error,
        )  # fmt: skip

    @classmethod
    def _for_all_devices(cls) -> Copier:
        """The copier of the module's functions, which follow the arrays."""
        copier = cls()
        copier._serve(None)
        return copier

    async def __aenter__(self) -> Copier:
        self._check_open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Waits for all that is in flight, then frees what the copier alone used.

        Further use raises ``ClosedError``.
        """
        _driver.refuse_fork()
        self._short_way.closed = True
        await self._calls.ends()
        if self.stats().in_flight:
            dispatcher = _dispatcher.current()
            waits = []
            for device in _native.engine_devices():
                operation = _native.Operation(self._quota)
                operation.synchronize_quota()
                operation.submit(device, dispatcher.queue, [])
                waits.append(operation)
            await _wait_for_all(dispatcher, waits, "aclose")
        if self._slot_nbytes != 4 << 20:
            for device in _native.engine_devices():
                _native.trim_slots(device, self._slot_nbytes)
        if self._pool is not None:
            self._pool.close()

    def stats(self) -> CopierStats:
        """The copier's counters."""
        submitted, completed, failed, cancelled, inline, parked, slots, busy, by_route, small = self._quota.counters()
        pool = self._pool if self._pool is not None else default_pool()
        return CopierStats(
            submitted=submitted,
            completed=completed,
            failed=failed,
            cancelled=cancelled,
            in_flight=submitted - completed - failed - cancelled,
            nbytes_direct=by_route[Route.TO_HOST_DIRECT] + by_route[Route.TO_DEVICE_DIRECT],
            nbytes_staged=by_route[Route.TO_HOST_STAGED] + by_route[Route.TO_DEVICE_STAGED],
            nbytes_small=small,
            nbytes_between_devices=by_route[Route.DEVICE_TO_DEVICE],
            nbytes_in_stream=self._nbytes_in_stream,
            slots_in_use=slots,
            slots_held_nbytes=sum(_native.engine_nbytes_held(device) for device in self._devices),
            pinned_held_nbytes=pool.stats().held_nbytes,
            inline_completions=inline,
            parked_completions=parked,
            worker_busy_seconds=busy,
        )

    async def copy_to_host(
        self,
        src: Any,
        dst: Any = None,
        *,
        stream: Any = None,
        in_stream: bool = False,
        progress: Progress | None = None,
        like: Any = None,
    ) -> Any:
        """See :func:`aiocuda_copy.copy_to_host`."""
        begun = self._short_way.begin(src, dst, stream, True, in_stream, progress, like)
        if not begun:
            return await self._copy(src, dst, "to_host", stream, in_stream, progress, like, begun=begun)
        if begun is not True:
            await begun
        return dst

    async def copy_to_device(
        self,
        src: Any,
        dst: Any,
        *,
        stream: Any = None,
        in_stream: bool = False,
        progress: Progress | None = None,
    ) -> Any:
        """See :func:`aiocuda_copy.copy_to_device`."""
        begun = self._short_way.begin(src, dst, stream, False, in_stream, progress)
        if not begun:
            return await self._copy(src, dst, "to_device", stream, in_stream, progress, begun=begun)
        if begun is not True:
            await begun
        return dst

    async def copy_batch(
        self,
        stream: Any,
        srcs: Any,
        dsts: Any,
        *,
        sizes: Any = None,
        options: Any = None,
        in_stream: bool = False,
    ) -> None:
        """See :func:`aiocuda_copy.copy_batch`."""
        await self._copy_batch(stream, srcs, dsts, sizes, options, in_stream)

    async def synchronize(self, stream_or_event: Any) -> None:
        """See :func:`aiocuda_copy.synchronize`."""
        self._check_open()
        await self._synchronize(stream_or_event)

    def _check_open(self) -> None:
        if self._short_way.closed:
            raise ClosedError(_CLOSED)

    def _check_device(self, device: int) -> None:
        if self._device is not None and device != self._device:
            raise ValueError(
                f"the arrays are on device {device}, but this copier is for device {self._device}; use the module's "
                f"functions, which follow the arrays, or Copier(device={device})"
            )

    async def _copy(
        self,
        src: Any,
        dst: Any,
        direction: Direction,
        stream: Any,
        in_stream: bool,
        progress: Progress | None,
        like: Any = None,
        *,
        begun: Any,
    ) -> Any:
        """What the public functions do where the short way has not begun (``None``), or is to be asked again
        (``False``)."""
        self._check_open()
        if progress is not None:
            _check_progress(progress)
        if dst is None:
            if direction == "to_device":
                raise TypeError("copy_to_device needs a destination: an array or a Buffer on a device")
            like = library_of(like)
        elif like is not None:
            raise TypeError("like= says what a new array is to be, so it cannot go with a destination")
        try:
            _driver.ensure()
            if progress is None and not in_stream:
                memory, shape, dtype = self._small_result(src, like) if dst is None else (dst, (), None)
                if begun is False or dst is None:
                    begun = self._short_way.begin(src, memory, stream, direction == "to_host")
                if begun is False:
                    await _dispatcher.current().checkpoint()
                    begun = self._short_way.begin(src, memory, stream, direction == "to_host")
                if begun:
                    if begun is not True:
                        await begun
                    return dst if dst is not None else make(shape, dtype, memory)
                memory = None  # the long way takes its own
            if dst is None:
                return await self._copy_to_new(src, stream, in_stream, progress, like)
            return await self._copy_any(src, dst, direction, stream, in_stream, progress)
        except BaseException as exc:
            memory = begun = None
            let_go_of_buffers(exc)
            raise

    def _small_result(self, src: Any, like: Like) -> tuple[Any, Any, Any]:
        """Memory, shape and type of the new array, if it is for a copy that the short way may take."""
        known = _native.small_source(src)
        if known is None:
            return None, None, None
        nbytes, shape, dtype = known
        pool = self._pool if self._pool is not None else default_pool()
        return pool.try_block(nbytes), shape, result_type(src, dtype, nbytes, like)

    async def _copy_any(
        self, src: Any, dst: Any, direction: Direction, stream: Any, in_stream: bool, progress: Progress | None
    ) -> Any:
        plan, order, owners = self._prepare(src, dst, direction, stream)
        if order is None:
            await _dispatcher.current().checkpoint()
        else:
            operation = _native.Operation(self._quota)
            await self._run(
                f"copy_{direction}", operation, plan, order, in_stream, owners, progress, _targets(direction)
            )
        if progress is not None:
            progress(plan.nbytes, plan.nbytes)
        return dst

    def _operation_after(self, handle: int, context: int) -> _native.Operation | None:
        """One that comes after what is in a stream now; ``None`` where the stream takes no mark."""
        operation = _native.Operation(self._quota)
        return None if operation.mark(handle, context, own=True) else operation

    def _start(
        self,
        src: Any,
        dst: Any,
        direction: Direction,
        stream: Any,
        operation: _native.Operation | None = None,
        others: Iterable[tuple[int, int]] = (),
    ) -> Started | None:
        """Submits a copy without waiting for it; there is nothing to wait for where there is nothing to copy.

        An operation that is given comes after what was in the stream when it was made, not after what is there now, nor
        in the other streams, which are named by handle and context.
        """
        self._check_open()
        _driver.ensure()
        plan, order, owners = self._prepare(src, dst, direction, stream)
        if order is None:
            return None
        if operation is None:
            operation = _native.Operation(self._quota)
            order.add(set(others))
            order.mark(operation)
        else:
            order.mark_others(operation)
        operation.add_part(plan.route, plan.entries)
        self._devices.add(plan.device)
        dispatcher = _dispatcher.current()
        operation.submit(plan.device, dispatcher.queue, owners, _targets(direction))
        return Started(f"copy_{direction}", dispatcher, operation)

    def _prepare(self, src: Any, dst: Any, direction: Direction, stream: Any) -> tuple[Plan, Order | None, list[Any]]:
        """What a copy does, what it comes after (nothing where it is empty), and what it must keep alive."""
        handle = handle_of(stream)
        source = export(src, role="source", stream=handle)
        destination = export(dst, role="destination", stream=handle)
        of_source, of_destination = _native.pointer_attributes_pair(source.address, destination.address)
        src_region, dst_region = classify(source, of_source), classify(destination, of_destination)
        plan = plan_copy(src_region, dst_region, direction, _native.pointer_attributes)
        if plan.nbytes == 0:
            return plan, None, []
        # The regions end with this call: from here on the ticket alone holds the buffers exported.
        owners = [dst, destination.owner, src, source.owner, stream]
        return plan, self._order(handle, plan, (src_region, dst_region)), owners

    async def _copy_to_new(self, src: Any, stream: Any, in_stream: bool, progress: Progress | None, like: Like) -> Any:
        call = self._calls.begin()
        try:
            return await self._copy_to_result(call, src, stream, in_stream, progress, like)
        finally:
            self._calls.end(call)

    async def _copy_to_result(
        self, call: Call, src: Any, stream: Any, in_stream: bool, progress: Progress | None, like: Like
    ) -> Any:
        pool = self._pool if self._pool is not None else default_pool()
        handle = handle_of(stream)
        source = export(src, role="source", stream=handle)
        src_region = classify(source, _native.pointer_attributes(source.address))
        shape, dtype = result_spec(src_region, like)
        # Finds out, before memory is taken, whether the source can be copied at all.
        plan = plan_copy(src_region, _host_like(src_region), "to_host", _native.pointer_attributes)
        if plan.nbytes == 0:
            await _dispatcher.current().checkpoint()
            if progress is not None:
                progress(0, 0)
            return make(shape, dtype, np.empty(0, np.uint8))
        order = self._order(handle, plan, (src_region,))
        operation = _native.Operation(self._quota)
        memory = pool.try_empty(plan.nbytes)
        if memory is None:
            # The order is that of the call, and growing takes a while.
            if not in_stream:
                order.mark(operation)
            try:
                memory = await pool.empty_async(plan.nbytes, device=plan.device)
            except MemoryError as exc:
                if in_stream:
                    raise ValueError(
                        "in_stream=True needs page-locked memory, and the pool's limit allows no more; pass a "
                        "destination or raise pinned_limit_nbytes"
                    ) from exc
                memory = np.empty(plan.nbytes, np.uint8)
        destination = export(memory, role="destination")
        dst_region = classify(destination, _native.pointer_attributes(destination.address))
        plan = plan_copy(src_region, dst_region, "to_host", _native.pointer_attributes)
        owners = [memory, destination.owner, src, src_region.owner, stream]
        await self._run("copy_to_host", operation, plan, order, in_stream, owners, progress, _targets("to_host"), call)
        if progress is not None:
            progress(plan.nbytes, plan.nbytes)
        return make(shape, dtype, memory)

    def _order(self, handle: int | None, plan: Plan, regions: tuple[Region, ...]) -> Order:
        """The streams that the copy comes after."""
        on_device = regions if plan.route is Route.DEVICE_TO_DEVICE else ()
        self._check_device(plan.device)
        for region in on_device:
            self._check_device(region.device)
        if handle is None:
            handle = default_for(regions)
        context = plan.context or primary_context(plan.device)
        return Order(handle, context, streams_of(regions) | special(handle, on_device))

    async def _run(
        self,
        name: str,
        operation: _native.Operation,
        plan: Plan,
        order: Order,
        in_stream: bool,
        owners: list[Any],
        progress: Progress | None,
        targets: int,
        call: Call | None = None,
    ) -> None:
        operation.add_part(plan.route, plan.entries)
        await self._submit(name, operation, plan.device, order, in_stream, owners, progress, targets=targets, call=call)

    async def _submit(
        self,
        name: str,
        operation: _native.Operation,
        device: int,
        order: Order,
        in_stream: bool,
        owners: list[Any],
        progress: Progress | None = None,
        *,
        targets: int = 0,
        batched_only: bool = False,
        call: Call | None = None,
    ) -> None:
        """Submits an operation that has its parts, and waits for it; the name is the one that its error gives. So many
        of the owners are not needed while the copy is only read."""
        self._devices.add(device)
        dispatcher = _dispatcher.current()
        if in_stream:
            if any(Route(route).staged for route in operation.routes):
                raise ValueError(
                    "in_stream=True takes page-locked and device memory only: the driver makes the caller wait for a "
                    "copy of pageable memory; use pinned_empty() or pinned(array)"
                )
            if batched_only and order.handle < 2:
                raise NotImplementedError(
                    "options other than the defaults cannot be enqueued in the legacy default stream, where the driver "
                    "takes no batches; use another stream, or in_stream=False"
                )
            order.mark_others(operation)
            code = operation.enqueue(device, order.handle, order.context)
            if operation.leaked:
                _native.leaked_owners.append(owners.copy())
            check_admission(code, name)
            self._nbytes_in_stream += operation.nbytes
        else:
            order.mark(operation)
        on_progress = None if progress is None else _reporter(operation, operation.nbytes, progress)
        operation.submit(device, dispatcher.queue, owners, targets)
        if call is not None:
            call.submitted = True
        _driver.check(await dispatcher.wait(operation, on_progress), name)

    async def _synchronize(self, stream_or_event: Any) -> None:
        event = event_handle(stream_or_event) if is_event(stream_or_event) else None
        try:
            handle = 0 if event is not None else resolve_handle(stream_or_event)
        except TypeError as exc:
            raise TypeError(f"synchronize() takes a stream or an event, and {exc}") from None
        _driver.ensure()
        if event == 0:
            return
        if event is None:
            named = device_named_by(stream_or_event)
            device, context = device_of_stream(handle, self._device if named is None else named)
        else:
            device, context = self._any_device(), 0
        self._check_device(device)
        dispatcher = _dispatcher.current()
        waits = []
        # Copies for one stream may have gone to the engines of several devices, between which arrays were copied.
        others = [] if event is not None else [d for d in _native.engine_devices() if d != device]
        for one in [device, *others]:
            # Counted once, however many devices there are.
            operation = _native.Operation(self._quota if one == device else _uncounted)
            if event is not None:
                operation.mark_event(event, stream_or_event)
            else:
                check_admission(operation.mark(handle, context, own=True, always=True) if one == device else 0, MARKING)
                operation.synchronize_stream(handle, context)
            waits.append((one, operation))
        # The marks are those of the call; copies that began before it may still be on their way to the engine.
        if event is None:
            await self._calls.submission()
        for one, operation in waits:
            self._devices.add(one)
            operation.submit(one, dispatcher.queue, [stream_or_event])
        await _wait_for_all(dispatcher, [operation for _, operation in waits], "synchronize")

    def _any_device(self) -> int:
        return self._device if self._device is not None else next(iter(_native.engine_devices()), 0)


_uncounted = _native.Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=True)


def _targets(direction: Direction) -> int:
    """How many owners, the first ones, are those of a destination that a small copy has been emptied into."""
    return 2 if direction == "to_host" else 0


def _reporter(operation: _native.Operation, total: int, progress: Progress) -> Callable[[], None]:
    def report() -> None:
        try:
            progress(min(operation.nbytes_done, total), total)
        except GeneratorExit as exc:  # which would mean that the coroutine is being closed
            raise RuntimeError("progress raised GeneratorExit") from exc

    return report


async def _wait_for_all(dispatcher: _dispatcher.Dispatcher, waits: list[_native.Operation], name: str) -> None:
    codes = []
    try:
        while waits:
            codes.append(await dispatcher.wait(waits.pop(0)))
    finally:
        # Only a synchronisation has several operations, and it touches no memory.
        for operation in waits:
            operation.cancel()
            if not operation.finished:
                operation.abandon(untouched=True)
    for code in codes:
        _driver.check(code, name)


def _check_progress(progress: Any) -> None:
    if not callable(progress):
        raise TypeError(f"progress must be a function of two numbers of bytes, not {type(progress).__qualname__}")


def _host_like(region: Region) -> Region:
    """A pageable destination that any source of the region's size can be copied to."""
    return region._replace(
        address=1, extent=region.nbytes, kind=Kind.PAGEABLE, device=-1, context=0, shape=None, strides=None, itemsize=1
    )


def _checked_int(name: str, value: Any, least: int, *, most: int | None = None, multiple: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {type(value).__qualname__}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not bool")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, not {number}")
    if number < least or number % multiple:
        of = f" and a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{name} must be at least {least}{of}, not {number}")
    return number
