"""What an object says of its memory (``_exports.py``) and what the driver says of it, joined to a region.

No driver call, and no event loop.
"""

from __future__ import annotations

import enum
from typing import Any, Literal, NamedTuple

import numpy as np

from ._exports import Export, name_of

__all__ = ["Kind", "Region", "classify"]

_MEMORY_HOST, _MEMORY_DEVICE = 1, 2


class Kind(enum.IntEnum):
    """Where memory is, as far as copying is concerned."""

    DEVICE = 0
    PINNED = 1
    PAGEABLE = 2
    MANAGED = 3


class Region(NamedTuple):
    """A region of memory as objects and driver agree on it."""

    address: int
    nbytes: int
    extent: int
    # The ordinal of the device that has, or has pinned, the memory; -1 for pageable memory.
    device: int
    kind: Kind
    context: int
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    itemsize: int
    dtype: np.dtype[Any] | None
    type_name: str | None
    owner: object
    readonly: bool
    stream: int | None
    framework: Literal["torch", "cupy"] | None
    # The allocation or registration that holds the address; 0 and 0 for pageable memory.
    range_start: int
    range_nbytes: int


def classify(export: Export, attributes: tuple[int, int, bool, int, int, int]) -> Region:
    """Joins what the object says with what the driver says.

    Parameters
    ----------
    export
        From :func:`~._exports.export`.
    attributes
        What ``_native.pointer_attributes(export.address)`` gives.

    Raises
    ------
    ValueError
        When the two disagree on the side, or the object claims more than its allocation has.
    """
    context, memory_type, managed, ordinal, start, range_nbytes = attributes
    address, nbytes = export.address, export.nbytes
    if nbytes == 0:
        # Nothing is touched, and the address, often 0, may be anybody's.
        # A Buffer that both sides may touch fits on either.
        kind = {"device": Kind.DEVICE, "host": Kind.PAGEABLE, "unknown": Kind.MANAGED}[export.side]
        context = start = range_nbytes = 0
        ordinal = -1 if export.device is None else export.device
    elif memory_type == 0:
        # Managed memory is on neither side, but DLPack has given it a stream.
        if export.side == "device" or export.stream is not None:
            raise ValueError(
                f"{_owner_name(export)} claims device memory at {address:#x}, which the driver does not know: freed, "
                f"or of another process?"
            )
        kind, ordinal = Kind.PAGEABLE, -1
    elif managed:
        kind = Kind.MANAGED
    elif memory_type == _MEMORY_HOST:
        if export.side == "device":
            raise ValueError(
                f"{_owner_name(export)} claims device memory at {address:#x}, but the driver says that it is "
                f"page-locked host memory; pass the host array that it maps"
            )
        kind = Kind.PINNED
    elif memory_type == _MEMORY_DEVICE:
        if export.side == "host":
            raise ValueError(
                f"{_owner_name(export)} claims host memory at {address:#x}, but the driver says that it is device "
                f"memory"
            )
        kind = Kind.DEVICE
    else:
        raise ValueError(f"{_owner_name(export)} is memory of a type that cannot be copied ({memory_type})")
    # Host memory may go on in the next registration; an allocation of the device's ends where it ends.
    if (
        range_nbytes
        and (kind is Kind.DEVICE or kind is Kind.MANAGED)
        and (address < start or address + export.extent > start + range_nbytes)
    ):
        raise ValueError(
            f"{_owner_name(export)} claims {export.extent} bytes at {address:#x}, but its allocation ends after "
            f"{start + range_nbytes - address}"
        )
    return Region(
        address,
        nbytes,
        export.extent,
        ordinal,
        kind,
        context,
        export.shape,
        export.strides,
        export.itemsize,
        export.dtype,
        export.type_name,
        export.owner,
        export.readonly,
        export.stream,
        export.framework,
        start,
        range_nbytes,
    )


def _owner_name(export: Export) -> str:
    owner = export.owner
    return name_of(owner[0] if isinstance(owner, tuple) else owner)
