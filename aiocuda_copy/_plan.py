"""From two regions to what the engine is asked for. Pure: no driver, no loop.

===================  ==========================  ===========================================================
source               destination                 route
===================  ==========================  ===========================================================
device, managed      page-locked                 the device writes the memory itself, piece by piece
device, managed      pageable, managed           the device writes slots, workers copy them out
page-locked          device, managed             the device reads the memory itself, piece by piece
pageable             device, managed             workers fill slots, the device reads those
device, managed      device                      between the devices
===================  ==========================  ===========================================================

Contiguous copies of at most 32 KiB take small slots whatever the kind of host memory; the engine sees to that.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Literal, NamedTuple

from ._layout import Rectangles, pair
from ._regions import Kind, Region

__all__ = ["Direction", "Plan", "Route", "plan_copy"]

Direction = Literal["to_host", "to_device", "any"]
# (destination, source, width, height, depth, source pitch and slice, destination pitch and slice, attributes)
EntryTuple = tuple[int, int, int, int, int, int, int, int, int, int]
Attributes = tuple[int, int, bool, int, int, int]

_ON_DEVICE = (Kind.DEVICE, Kind.MANAGED)


class Route(enum.IntEnum):
    """How the bytes travel. The values are those of ``operation.h``."""

    TO_HOST_DIRECT = 0
    TO_HOST_STAGED = 1
    TO_DEVICE_DIRECT = 2
    TO_DEVICE_STAGED = 3
    DEVICE_TO_DEVICE = 4

    @property
    def staged(self) -> bool:
        """Whether the bytes go through slots, because the device cannot, or must not, touch the host side."""
        return self in (Route.TO_HOST_STAGED, Route.TO_DEVICE_STAGED)


class Plan(NamedTuple):
    """One copy, ready for the engine."""

    # The ordinal of the device whose engine does it, and the context that the driver's special stream handles mean.
    device: int
    context: int
    route: Route
    nbytes: int
    entries: list[EntryTuple]


def plan_copy(
    src: Region,
    dst: Region,
    direction: Direction,
    lookup: Callable[[int], Attributes],
    attributes: int = 0,
) -> Plan:
    """Plans the copy from one region to another.

    Parameters
    ----------
    src, dst
        The two sides.
    direction
        What the caller asked for; ``"any"`` for an entry of a batch.
    lookup
        Gives what the driver knows of an address; asked only where page-locked memory spans registrations.
    attributes
        The index of the entry's attributes in its batch.

    Raises
    ------
    ValueError
        The regions are on the wrong sides, of different sizes, or strided in ways that cannot be expressed.
    """
    rectangles = pair(src, dst)
    route, device_side, host_side = _route(src, dst, direction)
    if rectangles.width == 0 or rectangles.height == 0 or rectangles.depth == 0 or src.nbytes == 0:
        return Plan(device_side.device, device_side.context, route, 0, [])
    if not route.staged and host_side is not None:
        pieces = _registrations(host_side, lookup)
        if pieces is None or (len(pieces) > 1 and not rectangles.contiguous):
            route = Route.TO_HOST_STAGED if route is Route.TO_HOST_DIRECT else Route.TO_DEVICE_STAGED
        elif len(pieces) > 1:
            entries = [
                (dst.address + begin, src.address + begin, nbytes, 1, 1, 0, 0, 0, 0, attributes)
                for begin, nbytes in pieces
            ]
            return Plan(device_side.device, device_side.context, route, src.nbytes, entries)
    if direction == "to_device" and rectangles.contiguous and 0 < abs(src.address - dst.address) < src.nbytes:
        raise ValueError(
            f"the source, {src.nbytes} bytes at {src.address:#x}, and the destination, at {dst.address:#x}, overlap, "
            f"and the driver says nothing of the order in which bytes are copied; copy by way of a third array"
        )
    entry = _entry(src.address, dst.address, rectangles, attributes)
    return Plan(device_side.device, device_side.context, route, src.nbytes, [entry])


def _entry(src: int, dst: int, r: Rectangles, attributes: int) -> EntryTuple:
    return (dst, src, r.width, r.height, r.depth, r.src_pitch, r.src_slice, r.dst_pitch, r.dst_slice, attributes)


def _route(src: Region, dst: Region, direction: Direction) -> tuple[Route, Region, Region | None]:
    """The route, the side on the device (the destination, between devices), and the one on the host."""
    if direction == "to_host" or (direction == "any" and dst.kind in (Kind.PINNED, Kind.PAGEABLE)):
        if dst.kind is Kind.DEVICE:
            raise ValueError("the destination is device memory; use copy_to_device")
        if src.kind not in _ON_DEVICE:
            raise ValueError(f"the source is {_described(src)} and so is not on a device; {_HOST_TO_HOST}")
        direct = dst.kind is Kind.PINNED
        return (Route.TO_HOST_DIRECT if direct else Route.TO_HOST_STAGED), src, dst
    if dst.kind not in _ON_DEVICE:
        if src.kind in _ON_DEVICE:
            raise ValueError(f"the destination is {_described(dst)}; use copy_to_host")
        raise ValueError(f"the destination is {_described(dst)} and so is not on a device; {_HOST_TO_HOST}")
    if src.kind in _ON_DEVICE:
        return Route.DEVICE_TO_DEVICE, dst, None
    direct = src.kind is Kind.PINNED
    return (Route.TO_DEVICE_DIRECT if direct else Route.TO_DEVICE_STAGED), dst, src


_HOST_TO_HOST = "a copy between host arrays needs no GPU, use numpy.copyto"


def _described(region: Region) -> str:
    return "page-locked host memory" if region.kind is Kind.PINNED else "host memory"


def _registrations(region: Region, lookup: Callable[[int], Attributes]) -> list[tuple[int, int]] | None:
    """Offset and size of what lies in each registration; ``None`` when some of the region is not page-locked.

    The driver refuses a copy that spans two registrations (hardware.md).
    """
    end = region.address + region.extent
    covered = region.range_start + region.range_nbytes
    if covered >= end:
        return [(0, region.extent)]
    pieces = [(0, covered - region.address)]
    while covered < end:
        _, memory_type, managed, _, start, nbytes = lookup(covered)
        if memory_type != 1 or managed or nbytes == 0:
            return None
        next_end = min(end, start + nbytes)
        pieces.append((covered - region.address, next_end - covered))
        covered = next_end
    return pieces
