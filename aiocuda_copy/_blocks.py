"""Batches that are buffers of numbers, not sequences of objects: they cost no Python work per entry."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _driver, _native
from ._errors import let_go_of_buffers
from ._exports import Export, export

__all__ = ["Added", "Blocks", "BlocksPlan", "add_to", "is_numeric", "parts_of", "plan_blocks"]

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
        The base is a list of arrays, or the offsets are no one-dimensional buffer of 64-bit integers.
    """

    __slots__ = ("base", "offsets")

    def __init__(self, base: Any, offsets: Any) -> None:
        if isinstance(base, list | tuple):
            raise TypeError(
                f"Blocks are parts of one array, which offsets point into, and base is a {type(base).__qualname__}; "
                f"pass a sequence of arrays to copy_batch as it is, without Blocks"
            )
        self.base = base
        try:
            self.offsets = _integers("offsets", offsets, signed=True)
        except BaseException as exc:
            let_go_of_buffers(exc)
            raise

    def __len__(self) -> int:
        return len(self.offsets)

    def __repr__(self) -> str:
        return f"Blocks({type(self.base).__qualname__}, {len(self)} offsets)"


class Side(NamedTuple):
    """Addresses, or offsets into memory of which address and size are known."""

    values: Addresses
    bounds: tuple[int, int] | None


class BlocksPlan(NamedTuple):
    """Two sides as numbers, with their sizes: one for all, or one for each."""

    dsts: Side
    srcs: Side
    sizes: Addresses
    # The first ones, so many, are the destination's.
    owners: tuple[Any, ...]
    targets: int
    # The bases, which may name a stream or a framework.
    exports: tuple[Export, ...]

    def copied(self) -> BlocksPlan:
        """The numbers alone, in arrays of its own: the caller may go on, and a thread's frames may keep it."""
        dsts, srcs = (side._replace(values=side.values.copy()) for side in (self.dsts, self.srcs))
        return self._replace(dsts=dsts, srcs=srcs, sizes=self.sizes.copy(), owners=(), exports=())


def is_numeric(srcs: Any, dsts: Any) -> bool:
    """Whether a batch is of this form: both sides are ``Blocks`` or buffers of addresses."""
    return type(srcs) is Blocks or any(isinstance(side, Blocks) or _is_addresses(side) for side in (srcs, dsts))


def parts_of(side: Any) -> tuple[Any, Any] | None:
    """The base, of which addresses have none, and the numbers; ``None`` for what is neither Blocks nor addresses."""
    if isinstance(side, Blocks):
        return side.base, side.offsets
    return (None, side) if isinstance(side, np.ndarray | memoryview) else None


def _is_addresses(side: Any) -> bool:
    return isinstance(side, np.ndarray | memoryview) and getattr(side, "ndim", 0) == 1 and _format(side) == "u8"


def _format(side: Any) -> str:
    if isinstance(side, memoryview):
        return {"L": "u8", "Q": "u8", "l": "i8", "q": "i8"}.get(side.format.lstrip("@="), "")
    return str(side.dtype.str[1:])


_MAKES_INTEGERS = "numpy.ravel({}).astype('uint64') makes one"


def _integers(name: str, values: Any, *, signed: bool = False) -> NDArray[Any]:
    array = np.asarray(values) if isinstance(values, np.ndarray | memoryview) else _from_buffer(name, values)
    allowed = ("u8", "i8") if signed else ("u8",)
    if array.ndim != 1 or array.dtype.str[1:] not in allowed or not array.dtype.isnative:
        kinds = "int64 or uint64" if signed else "uint64"
        raise TypeError(
            f"{name} must be a one-dimensional buffer of {kinds}, not {array.ndim}-dimensional {array.dtype}; "
            f"{_MAKES_INTEGERS.format(name)}"
        )
    return np.ascontiguousarray(array)


def _from_buffer(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(memoryview(values))
    except TypeError:
        hint = f"; {_MAKES_INTEGERS.format(name)}" if isinstance(values, list | tuple | range) else ""
        raise TypeError(f"{name} must be a buffer of 64-bit integers, not {type(values).__qualname__}{hint}") from None


def plan_blocks(srcs: Any, dsts: Any, sizes: Any, stream: int | None = None) -> BlocksPlan:
    """Checks both sides and their sizes, as a whole. The stream is the one that the batch is ordered in.

    Raises
    ------
    TypeError
        For anything but ``Blocks`` and buffers of ``uint64`` addresses, or without sizes.
    ValueError
        For unequal lengths and negative sizes, naming the entry. Whether the bases contain their blocks is found out
        when the entries are added.
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
    sides = []
    held: list[list[Any]] = [[srcs], [dsts]]
    for side, role in ((srcs, "source"), (dsts, "destination")):
        if not isinstance(side, Blocks):
            sides.append(Side(np.ascontiguousarray(np.asarray(side), dtype=np.uint64), None))
            continue
        base = export(side.base, role=role, stream=stream)  # type: ignore[arg-type]
        if base.strides is not None:
            raise ValueError(f"the base of the {role} Blocks must be C-contiguous")
        exports.append(base)
        held[role == "destination"].append(base.owner)
        # Negative offsets become huge ones, which no base contains.
        sides.append(Side(side.offsets.view(np.uint64), (base.address, base.nbytes)))
    return BlocksPlan(sides[1], sides[0], sized, (*held[1], *held[0]), len(held[1]), tuple(exports))


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


_PROBLEMS = {
    1: "has a null address",
    2: "is a copy from host to host, which needs no GPU",
    3: "crosses the end of the allocation that its source is in",
    4: "crosses the end of the allocation that its destination is in",
    5: "is on another device than the entries before it; make a batch for each device",
}
_DRIVER_PROBLEM = 6
_OUTSIDE = {7: "source", 8: "destination"}


class Added(NamedTuple):
    """Which entry comes next, and what device those before it are on: -1 where all of them were empty."""

    reached: int
    device: int
    context: int


def add_to(
    operation: _native.Operation,
    plan: BlocksPlan,
    options: list[int] | None,
    so_far: Added = Added(0, -1, 0),  # noqa: B008 it is immutable
    seconds: float = 3600,
) -> Added:
    """Adds the entries that are not empty to an operation, as many as the time allows. Makes no call that waits.

    Raises
    ------
    ValueError
        Naming the entry that is not within its base or an allocation, or from host to host.
    """
    if not len(plan.dsts.values):
        return so_far
    problem, index, device, context = operation.add_addresses(
        plan.dsts.values,
        plan.srcs.values,
        plan.sizes,
        np.array([0] if options is None else options, dtype=np.uint32),
        plan.dsts.bounds,
        plan.srcs.bounds,
        first=so_far.reached,
        device=so_far.device,
        seconds=seconds,
    )
    if problem == _DRIVER_PROBLEM:
        _driver.check(index, "cuPointerGetAttributes")
    if problem in _OUTSIDE:
        raise _outside(plan, index, _OUTSIDE[problem])
    if problem:
        raise ValueError(f"entry {index} of the batch {_PROBLEMS[problem]}")
    return Added(index, device, so_far.context or context)


def _outside(plan: BlocksPlan, index: int, role: str) -> ValueError:
    side = plan.srcs if role == "source" else plan.dsts
    assert side.bounds is not None
    offset, nbytes = int(side.values.view(np.int64)[index]), int(plan.sizes[0 if len(plan.sizes) == 1 else index])
    return ValueError(
        f"the {role} of entry {index} of the batch, {nbytes} bytes at offset {offset}, is not within its base of "
        f"{side.bounds[1]} bytes"
    )
