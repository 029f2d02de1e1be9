"""Batches that are buffers of numbers, not sequences of objects: they cost no Python work per entry."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _driver, _native
from ._plan import Route
from ._regions import Export, export

__all__ = ["Blocks", "BlocksPlan", "is_numeric", "plan_blocks"]

Addresses = NDArray[np.uint64]


class Blocks:
    """Blocks of one array, for :func:`copy_batch`.

    Parameters
    ----------
    base : array or Buffer
        C-contiguous, on a device or in host memory. The batch holds it until it has ended.
    offsets : buffer of int64 or uint64
        Where each block begins, in bytes from the start of ``base``.

    Raises
    ------
    TypeError
        The offsets are no one-dimensional buffer of 64-bit integers.
    """

    __slots__ = ("base", "offsets")

    def __init__(self, base: Any, offsets: Any) -> None:
        self.base = base
        self.offsets = _integers("offsets", offsets, signed=True)

    def __len__(self) -> int:
        return len(self.offsets)

    def __repr__(self) -> str:
        return f"Blocks({type(self.base).__qualname__}, {len(self)} offsets)"


class BlocksPlan(NamedTuple):
    """Two sides as addresses, with their sizes: one for all, or one for each."""

    dsts: Addresses
    srcs: Addresses
    sizes: Addresses
    owners: tuple[Any, ...]
    # The bases, which may name a stream or a framework.
    exports: tuple[Export, ...]
    # Whether the sides are Blocks, and so within memory of theirs from end to end.
    dsts_bounded: bool
    srcs_bounded: bool


def is_numeric(srcs: Any, dsts: Any) -> bool:
    """Whether a batch is of this form: both sides are ``Blocks`` or buffers of addresses."""
    return any(isinstance(side, Blocks) or _is_addresses(side) for side in (srcs, dsts))


def _is_addresses(side: Any) -> bool:
    return isinstance(side, np.ndarray | memoryview) and getattr(side, "ndim", 0) == 1 and _format(side) == "u8"


def _format(side: Any) -> str:
    if isinstance(side, memoryview):
        return {"L": "u8", "Q": "u8", "l": "i8", "q": "i8"}.get(side.format.lstrip("@="), "")
    return str(side.dtype.str[1:])


def _integers(name: str, values: Any, *, signed: bool = False) -> NDArray[Any]:
    array = np.asarray(values) if isinstance(values, np.ndarray | memoryview) else _from_buffer(name, values)
    allowed = ("u8", "i8") if signed else ("u8",)
    if array.ndim != 1 or array.dtype.str[1:] not in allowed or not array.dtype.isnative:
        kinds = "int64 or uint64" if signed else "uint64"
        raise TypeError(
            f"{name} must be a one-dimensional buffer of {kinds}, not {array.ndim}-dimensional {array.dtype}; "
            f"numpy.asarray({name}, dtype='uint64') makes one"
        )
    return np.ascontiguousarray(array)


def _from_buffer(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(memoryview(values))
    except TypeError:
        raise TypeError(f"{name} must be a buffer of 64-bit integers, not {type(values).__qualname__}") from None


def plan_blocks(srcs: Any, dsts: Any, sizes: Any, stream: int | None = None) -> BlocksPlan:
    """Checks both sides and their sizes, as a whole. The stream is the one that the batch is ordered in.

    Raises
    ------
    TypeError
        For anything but ``Blocks`` and buffers of ``uint64`` addresses, or without sizes.
    ValueError
        For unequal lengths, and for a block that its base does not contain, naming the entry.
    """
    for name, side in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(side, Blocks) and not _is_addresses(side):
            raise TypeError(
                f"{name} must be Blocks or a uint64 buffer of addresses, as the other side is, not "
                f"{type(side).__qualname__}"
            )
    count = len(srcs)
    if count != len(dsts):
        raise ValueError(
            f"srcs and dsts must be of the same length, but there are {count} sources and {len(dsts)} destinations: "
            f"entry {min(count, len(dsts))} has no counterpart"
        )
    sized = _sizes(sizes, count)
    exports = []
    addresses = []
    for side, role in ((srcs, "source"), (dsts, "destination")):
        if not isinstance(side, Blocks):
            addresses.append(np.ascontiguousarray(np.asarray(side), dtype=np.uint64))
            continue
        base = export(side.base, role=role, stream=stream)  # type: ignore[arg-type]
        if base.strides is not None:
            raise ValueError(f"the base of the {role} Blocks must be C-contiguous")
        exports.append(base)
        addresses.append(_addresses_of(side, base, sized, role))
    owners = (srcs, dsts, *(one.owner for one in exports))
    bounded = (isinstance(dsts, Blocks), isinstance(srcs, Blocks))
    return BlocksPlan(addresses[1], addresses[0], sized, owners, tuple(exports), *bounded)


def _sizes(sizes: Any, count: int) -> Addresses:
    if sizes is None:
        raise TypeError("Blocks and addresses need sizes=: a number of bytes for all, or a buffer with one for each")
    if isinstance(sizes, int | np.integer) and not isinstance(sizes, bool):
        if not 0 <= sizes < 2**64:
            raise ValueError(f"sizes must be between 0 and 2**64 - 1, but it is {sizes}")
        return np.array([sizes], dtype=np.uint64)
    array = _integers("sizes", sizes, signed=True)
    if len(array) != count:
        raise ValueError(
            f"there are {len(array)} sizes for {count} copies: entry {min(len(array), count)} has no counterpart"
        )
    if array.dtype.kind == "i" and len(array) and array.min() < 0:
        raise ValueError(f"the size of entry {int(np.argmin(array))} of the batch is negative: {int(array.min())}")
    return array.astype(np.uint64, copy=False)


def _addresses_of(blocks: Blocks, base: Export, sizes: Addresses, role: str) -> Addresses:
    offsets = blocks.offsets
    bad = np.zeros(0, dtype=np.intp)
    if offsets.dtype.kind == "i" and len(offsets) and offsets.min() < 0:
        bad = np.flatnonzero(offsets < 0)
    unsigned = offsets.astype(np.uint64, copy=False)
    if not bad.size and len(unsigned):
        limit = np.uint64(base.nbytes)
        # Without the sum, which could wrap.
        bad = np.flatnonzero((unsigned > limit) | (sizes > limit - np.minimum(unsigned, limit)))
    if bad.size:
        at = int(bad[0])
        raise ValueError(
            f"the {role} of entry {at} of the batch, {int(sizes[0 if len(sizes) == 1 else at])} bytes at offset "
            f"{int(offsets[at])}, is not within its base of {base.nbytes} bytes"
        )
    return unsigned + np.uint64(base.address)


_PROBLEMS = {
    1: "has a null address",
    2: "is a copy from host to host, which needs no GPU",
    3: "crosses the end of the allocation that its source is in",
    4: "crosses the end of the allocation that its destination is in",
    5: "is on another device than the entries before it; make a batch for each device",
}
_DRIVER_PROBLEM = 6


class Added(NamedTuple):
    """What the entries of a batch came to."""

    device: int
    context: int
    nbytes: int
    staged: bool


def add_to(operation: _native.Operation, plan: BlocksPlan, options: list[int] | None = None) -> Added:
    """Adds the entries that are not empty to an operation. Makes no call that waits; about 0.1 µs an entry.

    Raises
    ------
    ValueError
        Naming the entry that is not within an allocation, or from host to host.
    """
    problem, index, device, context, nbytes, routes = operation.add_addresses(
        plan.dsts,
        plan.srcs,
        plan.sizes,
        np.array([0] if options is None else options, dtype=np.uint32),
        plan.dsts_bounded,
        plan.srcs_bounded,
    )
    if problem == _DRIVER_PROBLEM:
        _driver.check(index, "cuPointerGetAttributes")
    if problem:
        raise ValueError(f"entry {index} of the batch {_PROBLEMS[problem]}")
    staged = any(routes >> route & 1 for route in Route if route.staged)
    return Added(device, context, nbytes, staged)
