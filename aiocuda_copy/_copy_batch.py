"""Batches, as a copier does them: planned step by step, with the loop's turns between, and given to the engine."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from time import perf_counter
from typing import Any, Literal

import anyio.lowlevel

from . import _dispatcher, _driver, _native
from ._batch import BatchPlan, NativeOptions, check_overlap, parse_options, sequences, warn_of_overlap
from ._blocks import add_to, is_numeric, parts_of, plan_blocks
from ._calls import Call, Calls
from ._errors import let_go_of_buffers
from ._order import Order, handle_of, primary_context, special, streams_of
from ._regions import Kind, classify
from ._streams import default_for, resolve_handle
from ._threads import run_to_end

__all__ = ["Batches"]

# Entries of a batch that are planned before the loop gets its turn: well under a millisecond's work.
_BATCH_STEP = 64
# Of those that are plain so many for one that is not; the native layer takes 512 at a time.
_PLAIN_IN_A_STEP = 8
# However few they were in that time.
_TURN_SECONDS = 3e-4
# Numbers take 1 to 100 ns each. What of them takes longer than half a millisecond is left to a thread, which costs
# some 50 µs.
_HOLD_SECONDS = 5e-4
_MOST_AT_ONCE = 250_000
_MOST_SORTED_ON_LOOP = 4_000


class Batches:
    """The part of a copier that does batches."""

    _quota: _native.Quota
    _calls: Calls
    _native_device: int
    _devices: set[int]
    _check_overlap: bool

    def _check_open(self) -> None:
        raise NotImplementedError

    def _check_device(self, device: int) -> None:
        raise NotImplementedError

    async def _submit(
        self,
        name: str,
        operation: _native.Operation,
        device: int,
        order: Order,
        in_stream: bool,
        owners: list[Any],
        *,
        targets: int = 0,
        batched_only: bool = False,
        call: Call | None = None,
    ) -> None:
        raise NotImplementedError

    async def _copy_batch(self, stream: Any, srcs: Any, dsts: Any, sizes: Any, options: Any, in_stream: bool) -> None:
        """What the public function does."""
        self._check_open()
        # Objects may run anything while they are asked for their memory.
        call = self._calls.begin()
        try:
            numeric, hold_seconds = is_numeric(srcs, dsts), _HOLD_SECONDS
            if options is None and not in_stream:
                begin = self._begin_numbers if numeric else self._begin_objects
                begun = begin(stream, srcs, dsts, sizes)
                if begun is False:
                    hold_seconds = 0.0
                elif begun is not None:
                    call.submitted = True
                    _driver.check(await begun, "copy_batch")
                    return
            _driver.ensure()
            handle = handle_of(stream)
            if numeric:
                await self._batch_of_blocks(call, stream, handle, srcs, dsts, sizes, options, in_stream, hold_seconds)
            else:
                await self._batch_of_objects(call, stream, handle, srcs, dsts, sizes, options, in_stream)
        except BaseException as exc:
            begun = None
            let_go_of_buffers(exc)
            raise
        finally:
            self._calls.end(call)

    async def _batch_of_objects(
        self,
        call: Call,
        stream: Any,
        handle: int | None,
        srcs: Any,
        dsts: Any,
        sizes: Any,
        options: Any,
        in_stream: bool,
    ) -> None:
        if sizes is not None:
            raise TypeError(
                "sizes= goes with Blocks, and with addresses in a buffer of uint64; those of a sequence of arrays are "
                "taken from its sources"
            )
        srcs, dsts = map(list, sequences(srcs, dsts))
        native_options, indices = parse_options(options, len(srcs))
        _check_options(native_options)
        plan = BatchPlan(_native.pointer_attributes)
        operation = _native.Operation(self._quota)
        order: Order | None = None
        first, step, work, turn_ends = 0, 1, 0, perf_counter() + _TURN_SECONDS
        while first < len(srcs):
            if work >= _BATCH_STEP or perf_counter() > turn_ends:
                if order is None and plan.device is not None and not in_stream:
                    order = self._batch_order(handle, plan)
                    order.add(streams_of(plan.named) | special(order.handle, plan.on_device.values()))
                    order.mark(operation)
                await anyio.lowlevel.checkpoint()
                work, turn_ends = 0, perf_counter() + _TURN_SECONDS
            if plan.device is not None and not native_options:
                reached = _native.add_objects(
                    operation, srcs, dsts, first, plan.device, plan.context, plan.src_owners, plan.dst_owners
                )
                if reached != first:
                    work += (reached - first) // _PLAIN_IN_A_STEP + 1
                    first, step = reached, 1
                    continue
            some, device = slice(first, first + step), plan.device
            added = plan.add(first, srcs[some], dsts[some], _native.pointer_attributes_many, indices, handle)
            if device is None and plan.device is not None and not native_options:
                # With the device known, these may be plain as well.
                continue
            for route, entries in added.items():
                operation.add_part(route, entries)
            first += step
            work += step
            step = min(2 * step, _BATCH_STEP)
        if plan.device is None:
            await _dispatcher.current().checkpoint()
            return
        if native_options:
            warn_of_overlap(native_options, _native.is_integrated(plan.device))
            operation.set_attributes(native_options)
        if order is None:
            order = self._batch_order(handle, plan)
        # Those of entries that were planned after the marks had been set.
        order.add(streams_of(plan.named) | special(order.handle, plan.on_device.values()))
        if await _overlaps(operation, len(srcs), None if in_stream else order):
            again = BatchPlan(_native.pointer_attributes)
            for first in range(0, len(srcs), _BATCH_STEP):
                some = slice(first, first + _BATCH_STEP)
                again.add(first, srcs[some], dsts[some], _native.pointer_attributes_many, None, handle)
                await anyio.lowlevel.checkpoint()
            await run_to_end(again.check_overlap)
        if not in_stream:
            order.mark_others(operation)
        owners = [dsts, *plan.dst_owners, srcs, *plan.src_owners, stream]
        device, targets = plan.device, 1 + len(plan.dst_owners)
        del plan
        await self._submit(
            "copy_batch", operation, device, order, in_stream, owners, targets=targets,
            batched_only=bool(native_options), call=call,
        )  # fmt: skip

    def _begin_numbers(self, stream: Any, srcs: Any, dsts: Any, sizes: Any) -> Awaitable[int] | Literal[False] | None:
        """Begins a batch that the short way takes, and returns what gives its code when it is awaited; for others
        ``None``, or ``False`` where looking at the numbers takes long."""
        _driver.ensure()
        dispatcher = _dispatcher.current()
        dispatcher.queue.rouse()
        handle = stream if stream is None or type(stream) is int else resolve_handle(stream)
        src, dst = parts_of(srcs), parts_of(dsts)
        if src is None or dst is None:
            return None
        (src_base, src_numbers), (dst_base, dst_numbers) = src, dst
        operation = _native.submit_numbers(
            self._quota, dispatcher.queue, src_base, src_numbers, dst_base, dst_numbers, sizes, stream, handle,
            self._native_device, self._check_overlap, _MOST_AT_ONCE, _MOST_SORTED_ON_LOOP,
        )  # fmt: skip
        if operation is None or operation is False:
            return operation
        self._devices.add(operation.device)
        return dispatcher.wait(operation)

    def _begin_objects(self, stream: Any, srcs: Any, dsts: Any, sizes: Any) -> Awaitable[int] | None:
        """As :meth:`_begin_numbers`, for a few objects."""
        if sizes is not None or type(srcs) not in (list, tuple) or type(dsts) not in (list, tuple):
            return None
        _driver.ensure()
        dispatcher = _dispatcher.current()
        dispatcher.queue.rouse()
        handle = stream if stream is None or type(stream) is int else resolve_handle(stream)
        # The caller may change its own.
        srcs, dsts = list(srcs), list(dsts)
        operation = _native.submit_objects(
            self._quota, dispatcher.queue, srcs, dsts, stream, handle, self._native_device
        )
        if operation is None:
            return None
        self._devices.add(operation.device)
        return dispatcher.wait(operation)

    async def _batch_of_blocks(
        self,
        call: Call,
        stream: Any,
        handle: int | None,
        srcs: Any,
        dsts: Any,
        sizes: Any,
        options: Any,
        in_stream: bool,
        hold_seconds: float,
    ) -> None:
        plan = plan_blocks(srcs, dsts, sizes, handle)
        native_options, indices = parse_options(options, len(plan.dsts.values))
        _check_options(native_options)
        attributes = _native.pointer_attributes_many([one.address for one in plan.exports]) if plan.exports else []
        regions = list(map(classify, plan.exports, attributes))
        operation = _native.Operation(self._quota)
        added = add_to(operation, plan, indices, seconds=hold_seconds)
        if added.device < 0:
            await _dispatcher.current().checkpoint()
            return
        if native_options:
            warn_of_overlap(native_options, _native.is_integrated(added.device))
            operation.set_attributes(native_options)
        self._check_device(added.device)
        if handle is None:
            handle = default_for(regions)
        on_device = [region for region in regions if region.kind is Kind.DEVICE]
        for device in {region.device for region in on_device}:
            self._check_device(device)
        others = streams_of(regions) | special(handle, on_device)
        order = Order(handle, added.context or primary_context(added.device), others)
        owners, targets = [*plan.owners, stream], plan.targets
        if added.reached < len(plan.dsts.values):
            if not in_stream:
                order.mark(operation)
            plan = plan.copied()
            await run_to_end(partial(add_to, operation, plan, indices, added))
        if (self._check_overlap or plan.dsts.bounds is not None) and await _overlaps(
            operation, len(plan.dsts.values), None if in_stream else order
        ):
            check_overlap(plan.dsts.values, plan.sizes)
        del plan, regions, on_device
        await self._submit(
            "copy_batch", operation, added.device, order, in_stream, owners, targets=targets,
            batched_only=bool(native_options), call=call,
        )  # fmt: skip

    def _batch_order(self, handle: int | None, plan: BatchPlan) -> Order:
        assert plan.device is not None
        assert plan.device_side is not None
        for device, _ in plan.on_device:
            self._check_device(device)
        if handle is None:
            handle = default_for((plan.device_side,))
        return Order(handle, plan.context or primary_context(plan.device), set())


async def _overlaps(operation: _native.Operation, count: int, order: Order | None) -> bool:
    """Whether destinations overlap; the order is that of the call, also where it takes a while to find out."""
    overlaps = operation.overlaps(may_take_long=count <= _MOST_SORTED_ON_LOOP)
    if overlaps is None:
        if order is not None:
            order.mark(operation)
        overlaps = await run_to_end(operation.overlaps)
    return bool(overlaps)


def _check_options(options: list[NativeOptions]) -> None:
    if options and not _native.has_batch():
        raise NotImplementedError(
            "options other than the defaults need cuMemcpyBatchAsync, which this driver does not have (CUDA 12.8)"
        )
