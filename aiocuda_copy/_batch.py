"""What a batch asks for: its entries, checked and sorted by route, and its options. Pure: no driver, no loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._exports import Export, export
from ._plan import Attributes, EntryTuple, Route, plan_copy
from ._regions import Kind, Region, classify

__all__ = ["BatchPlan", "NativeOptions", "check_overlap", "parse_options", "sequences", "warn_of_overlap"]

# Python objects whose buffers are one thing each, and which also are sequences.
_SINGLE = (bytes, bytearray, memoryview, str, np.ndarray)

# (access order, source hint's type and ordinal, destination hint's type and ordinal, flags), as in CUmemcpyAttributes.
NativeOptions = tuple[int, int, int, int, int, int]

_STREAM_ORDER: NativeOptions = (1, 0, 0, 0, 0, 0)
_ACCESS_ORDERS = {"stream": 1, "during_api_call": 2, "any": 3}
# CU_MEM_LOCATION_TYPE_*
_DEVICE, _HOST, _HOST_NUMA, _HOST_NUMA_CURRENT = 1, 2, 3, 4
_OVERLAP_MODES = {"default": 0, "prefer_overlap_with_compute": 1}


def sequences(srcs: Any, dsts: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The two sides as sequences of the same length.

    Raises
    ------
    TypeError
        When a side is one buffer, or nothing that has a length.
    ValueError
        When the lengths differ.
    """
    for name, side in (("srcs", srcs), ("dsts", dsts)):
        if isinstance(side, _SINGLE) or not isinstance(side, Sequence):
            hint = f"list({name}) makes one; " if isinstance(side, Iterator) else ""
            raise TypeError(
                f"{name} must be a sequence of arrays or Buffers, not {type(side).__qualname__}; {hint}for a single "
                f"buffer use copy_to_host or copy_to_device"
            )
    if len(srcs) != len(dsts):
        index = min(len(srcs), len(dsts))
        raise ValueError(
            f"srcs and dsts must be of the same length, but there are {len(srcs)} sources and {len(dsts)} "
            f"destinations: entry {index} has no {'source' if len(srcs) == index else 'destination'}"
        )
    return srcs, dsts


def parse_options(options: Any, count: int) -> tuple[list[NativeOptions], list[int] | None]:
    """The distinct options of a batch, and for each entry which of them it has.

    Returns no options where all are the driver's defaults, and no list where one option is for all.

    Raises
    ------
    TypeError
        For what is no ``cuda.core.utils.CopyOptions``.
    ValueError
        When a sequence of options does not match the entries.
    """
    if options is None:
        return [], None
    if not isinstance(options, Sequence) or isinstance(options, str):
        native = _native_options(options)
        return ([] if native == _STREAM_ORDER else [native]), None
    options = list(options)
    if len(options) != count:
        raise ValueError(f"there are {len(options)} options for {count} copies; pass one for all, or one for each")
    # Mostly a few are meant, again and again: of 50,000 each costs the loop a microsecond.
    objects = {id(one): one for one in options}
    distinct: dict[NativeOptions, int] = {}
    index = {key: distinct.setdefault(_native_options(one), len(distinct)) for key, one in objects.items()}
    indices = [index[id(one)] for one in options]
    if list(distinct) == [_STREAM_ORDER] or not distinct:
        return [], None
    return list(distinct), indices


def _native_options(options: Any) -> NativeOptions:
    if options is None:
        return _STREAM_ORDER
    try:
        order = _ACCESS_ORDERS[str(getattr(options.src_access_order, "value", options.src_access_order))]
        overlap = _OVERLAP_MODES[str(getattr(options.overlap_mode, "value", options.overlap_mode))]
        source, destination = options.src_location_hint, options.dst_location_hint
    except (AttributeError, KeyError):
        raise TypeError(
            f"options must be cuda.core.utils.CopyOptions, one or a sequence of them, not {options!r}"
        ) from None
    return (order, *_location(source), *_location(destination), overlap)


def _location(hint: Any) -> tuple[int, int]:
    if hint is None:
        return 0, 0
    if hasattr(hint, "device_id"):
        return _DEVICE, int(hint.device_id)
    if getattr(hint, "is_numa_current", False):
        return _HOST_NUMA_CURRENT, 0
    numa = getattr(hint, "numa_id", None)
    return (_HOST, 0) if numa is None else (_HOST_NUMA, int(numa))


def warn_of_overlap(options: list[NativeOptions], integrated: bool) -> None:
    """cuda.core's warning: the hint has no effect on a discrete GPU."""
    if not integrated and any(native[5] for native in options):
        warnings.warn(
            "overlap_mode='prefer_overlap_with_compute' has an effect on integrated GPUs only",
            UserWarning,
            stacklevel=4,
        )


class BatchPlan:
    """What the entries of a batch have in common, step by step so that a long one does not hold the loop."""

    def __init__(self, lookup: Callable[[int], Attributes]) -> None:
        self._lookup = lookup
        self.src_owners: list[Any] = []
        self.dst_owners: list[Any] = []
        # Of those whose arrays name a stream, and of those on a device, one for each (device, context).
        self.named: list[Region] = []
        self.on_device: dict[tuple[int, int], Region] = {}
        self.device: int | None = None
        self.context = 0
        # The first region that has a say in which stream stream=None means.
        self.device_side: Region | None = None
        self._destinations: list[tuple[int, int, int]] = []

    def add(
        self,
        first: int,
        sources: Sequence[Any],
        destinations: Sequence[Any],
        attributes_of: Callable[[list[int]], list[Attributes]],
        option_indices: list[int] | None,
        stream: int | None,
    ) -> dict[Route, list[EntryTuple]]:
        """Plans some of the entries, the first of which has this index in the batch. Returns what it added.

        Raises
        ------
        TypeError, ValueError
            As the single copies do; the message names the entry's index.
        """
        exports: list[Export] = []
        index = first
        try:
            for index, (src, dst) in enumerate(zip(sources, destinations, strict=True), first):  # noqa: B007 in the message
                exports.append(export(src, role="source", stream=stream))
                exports.append(export(dst, role="destination", stream=stream))
            attributes = attributes_of([one.address for one in exports])
            added: dict[Route, list[EntryTuple]] = {}
            for k in range(0, len(exports), 2):
                index = first + k // 2
                src_region = classify(exports[k], attributes[k])
                dst_region = classify(exports[k + 1], attributes[k + 1])
                self._add_one(
                    index, src_region, dst_region, 0 if option_indices is None else option_indices[index], added
                )
        except (TypeError, ValueError, RuntimeError) as exc:
            if type(exc) not in (TypeError, ValueError, RuntimeError):
                exc.add_note(f"entry {index} of the batch")
                raise
            raise type(exc)(f"entry {index} of the batch: {exc}") from exc
        return added

    def _add_one(
        self, index: int, src: Region, dst: Region, options: int, added: dict[Route, list[EntryTuple]]
    ) -> None:
        plan = plan_copy(src, dst, "any", self._lookup, options)
        if plan.nbytes == 0:
            return
        if self.device is None:
            self.device, self.context = plan.device, plan.context
            self.device_side = src if src.kind in (Kind.DEVICE, Kind.MANAGED) else dst
        elif self.device != plan.device:
            raise ValueError(
                f"its device is {plan.device}, but that of the entries before it {self.device}; make a batch for each "
                f"device"
            )
        added.setdefault(plan.route, []).extend(plan.entries)
        self.src_owners.append(src.owner)
        self.dst_owners.append(dst.owner)
        self.named += [region for region in (src, dst) if region.stream is not None]
        if plan.route in (Route.TO_HOST_DIRECT, Route.TO_HOST_STAGED):
            on_device = [src]
        else:
            on_device = [src, dst] if plan.route is Route.DEVICE_TO_DEVICE else [dst]
        for region in on_device:
            self.on_device.setdefault((region.device, region.context), region)
        self._destinations.append((dst.address, dst.extent if dst.strides is None else 0, index))

    def check_overlap(self) -> None:
        """See :func:`check_overlap`; strided destinations may interleave, and are not looked at."""
        table = np.array(self._destinations, dtype=np.uint64).reshape(-1, 3)
        table = table[table[:, 1] > 0]
        check_overlap(table[:, 0], table[:, 1], table[:, 2])


def check_overlap(
    addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], indices: NDArray[Any] | None = None
) -> None:
    """Refuses destinations that overlap: the driver leaves the order of copies within a batch undefined.

    Cheap when the destinations ascend.

    Raises
    ------
    ValueError
        Naming two entries.
    """
    if len(addresses) < 2:
        return
    sizes = np.broadcast_to(sizes, addresses.shape)
    order = None
    if (addresses[1:] < addresses[:-1]).any():
        order = np.argsort(addresses, kind="stable")
        addresses, sizes = addresses[order], sizes[order]
    ends = np.maximum.accumulate(addresses + sizes)
    clashes = np.flatnonzero((addresses[1:] < ends[:-1]) & (sizes[1:] > 0))
    if not clashes.size:
        return
    at = int(clashes[0])
    pair = [int(np.argmax((addresses + sizes)[: at + 1])), at + 1]
    for names in (order, indices):
        if names is not None:
            pair = [int(names[k]) for k in pair]
    raise ValueError(
        f"the destinations of entries {min(pair)} and {max(pair)} of the batch overlap, and the order of copies within "
        f"a batch is undefined"
    )
