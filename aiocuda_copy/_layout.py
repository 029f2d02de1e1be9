"""The geometry of copies: strides to the rectangles that the driver can copy. Pure arithmetic.

A region is read in C order as a run of bytes that is cut into equal slices, which are cut into equal rows. Two regions
of a copy are refined until both are cut alike, so that a strided side and a contiguous one of whatever shape, or two
that are strided differently, become one list of rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

__all__ = ["MAX_PITCH", "Layout", "Rectangles", "compact", "extent", "layout2d", "pair"]

# CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far: the driver refuses rows that are further apart.
MAX_PITCH = 2**31 - 1

_HOW_TO = (
    "make it contiguous first, with numpy.ascontiguousarray(array) or tensor.contiguous(), which is a copy: where it "
    "was the destination, assign it back"
)


class Extents(Protocol):
    """What the geometry wants to know of a region."""

    @property
    def nbytes(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...] | None: ...
    @property
    def strides(self) -> tuple[int, ...] | None: ...


class Layout(NamedTuple):
    """One region as ``depth`` slices of ``height`` rows of ``width`` bytes."""

    width: int
    height: int = 1
    depth: int = 1
    pitch: int = 0
    slice_pitch: int = 0

    @property
    def contiguous(self) -> bool:
        return self.height == 1 and self.depth == 1


class Rectangles(NamedTuple):
    """What two regions have in common, in bytes.

    Pitches are 0 where they have no meaning: that of rows where ``height`` is 1, that of slices where ``depth`` is 1.
    """

    width: int
    height: int = 1
    depth: int = 1
    src_pitch: int = 0
    dst_pitch: int = 0
    src_slice: int = 0
    dst_slice: int = 0

    @property
    def contiguous(self) -> bool:
        """Whether one linear copy of ``width`` bytes does it."""
        return self.height == 1 and self.depth == 1

    def rows(self) -> Iterator[tuple[int, int]]:
        """The offsets of every row in source and destination, in C order."""
        for z in range(self.depth):
            for y in range(self.height):
                yield z * self.src_slice + y * self.src_pitch, z * self.dst_slice + y * self.dst_pitch


def extent(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int, nbytes: int) -> int:
    """The number of bytes from the first to the last one of a region."""
    if strides is None or nbytes == 0:
        return nbytes
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + itemsize


def compact(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int, describe: str
) -> tuple[int, ...] | None:
    """Checks strides (in bytes); returns ``None`` for C-contiguous.

    The strides of axes of length 1 say nothing, and neither do those of an empty array: frameworks leave anything
    there.

    Raises
    ------
    ValueError
        For negative, broadcast, permuted or overlapping strides.
    """
    if strides is None:
        return None
    if len(strides) != len(shape):
        raise ValueError(f"{describe} has {len(shape)} dimensions, but {len(strides)} strides")
    if itemsize == 0 or 0 in shape:
        return None
    expected = itemsize
    contiguous = True
    span = 0
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if stride < 0:
            raise ValueError(f"{describe} has a negative stride (strides {strides}); {_HOW_TO}")
        if stride == 0:
            raise ValueError(f"{describe} is broadcast, it has a stride of 0 (strides {strides}); {_HOW_TO}")
        if stride < span + itemsize:
            raise ValueError(
                f"{describe} has permuted or overlapping axes (shape {shape}, strides {strides}), and copies are in C "
                f"order; {_HOW_TO}"
            )
        contiguous = contiguous and stride == expected
        expected *= n
        span += (n - 1) * stride
    return None if contiguous else strides


def _levels(region: Extents) -> list[tuple[int, int]]:
    """(count, stride) from the innermost level outwards; the first one counts bytes. Mergeable levels are merged."""
    if region.strides is None or region.shape is None:
        return [(region.nbytes, 1)]
    levels = [(region.itemsize, 1)]
    for n, stride in zip(reversed(region.shape), reversed(region.strides), strict=True):
        if n == 1:
            continue
        count, inner = levels[-1]
        if stride == count * inner:
            levels[-1] = (count * n, inner)
        else:
            levels.append((n, stride))
    return levels


def pair(src: Extents, dst: Extents) -> Rectangles:
    """Cuts the source and the destination of a copy alike.

    Raises
    ------
    ValueError
        When sizes differ, or when what the two have in common is more than slices of rows of bytes.
    """
    if src.nbytes != dst.nbytes:
        raise ValueError(
            f"sizes must match: the source has {src.nbytes} bytes{_shape_of(src)}, the destination {dst.nbytes}"
            f"{_shape_of(dst)}"
        )
    if src.strides is None and dst.strides is None:
        return Rectangles(src.nbytes)
    levels = _refine(_levels(src), _levels(dst))
    if levels is None or len(levels) > 3:
        if src.strides is None or dst.strides is None:
            name, region = ("destination", dst) if src.strides is None else ("source", src)
            raise ValueError(
                f"the {name}{_strides_of(region)} is strided in more ways than a 3-D copy can express; {_HOW_TO}"
            )
        raise ValueError(
            f"the source{_strides_of(src)} and the destination{_strides_of(dst)} have too little in common for a 3-D "
            f"copy; make one of them contiguous, with numpy.ascontiguousarray(array) or tensor.contiguous()"
        )
    levels += [(1, 0, 0)] * (3 - len(levels))
    (width, _, _), (height, src_pitch, dst_pitch), (depth, src_slice, dst_slice) = levels
    if max(src_pitch, dst_pitch) > MAX_PITCH:
        raise ValueError(
            f"rows {max(src_pitch, dst_pitch)} bytes apart are too far for a strided copy (at most {MAX_PITCH}); copy "
            f"row by row, for example with copy_batch"
        )
    return Rectangles(width, height, depth, src_pitch, dst_pitch, src_slice, dst_slice)


def _refine(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int, int]] | None:
    """The coarsest cut that both sides share, as (count, stride of a, stride of b); ``None`` where there is none."""
    a, b = a[::-1], b[::-1]
    common: list[tuple[int, int, int]] = []
    while a and b:
        (count_a, stride_a), (count_b, stride_b) = a.pop(), b.pop()
        count = min(count_a, count_b)
        for rest, whole, stride in ((a, count_a, stride_a), (b, count_b, stride_b)):
            if whole % count:
                return None
            if whole > count:
                rest.append((whole // count, stride * count))
        if common and stride_a == common[-1][0] * common[-1][1] and stride_b == common[-1][0] * common[-1][2]:
            common[-1] = (common[-1][0] * count, common[-1][1], common[-1][2])
        else:
            common.append((count, stride_a, stride_b))
    return common


def layout2d(region: Extents) -> Layout:
    """One region as slices of rows of bytes.

    Raises
    ------
    ValueError
        When it is strided in more ways than a 3-D copy can express.
    """
    both = pair(region, region)
    return Layout(both.width, both.height, both.depth, both.src_pitch, both.src_slice)


def _shape_of(region: Extents) -> str:
    return "" if region.shape is None else f" (shape {region.shape}, {region.itemsize} bytes an item)"


def _strides_of(region: Extents) -> str:
    return "" if region.strides is None else f" (shape {region.shape}, strides {region.strides})"
