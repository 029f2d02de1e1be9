"""Random shapes, strides, sizes and slots, through the real engine, against NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kinds import one_loop, pattern

from aiocuda_copy import Copier, copy_batch, copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy._layout import Rectangles, compact, extent, pair
from aiocuda_copy._plan import Route, plan_copy
from aiocuda_copy._regions import Kind, Region
from aiocuda_copy.testing import DeviceArray

# Each example goes through the engine and back.
thorough = settings(
    max_examples=60 if settings().max_examples <= 100 else settings().max_examples,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

Cut = tuple[tuple[int, ...], tuple[slice, ...]]


@st.composite
def cuts(draw: st.DrawFn, most_axes: int = 4) -> Cut:
    """A shape, and slices of it that go forwards."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=most_axes)))
    slices = []
    for n in shape:
        begin = draw(st.integers(0, n - 1))
        slices.append(slice(begin, draw(st.integers(begin, n)), draw(st.sampled_from([1, 1, 1, 2, 3]))))
    return shape, tuple(slices)


def array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    return pattern(math.prod(shape) * np.dtype(dtype).itemsize, seed).view(dtype).reshape(shape)


def expressible(*arrays: np.ndarray) -> bool:
    """Whether the library says so; that it is right is checked by the copy, that it is not timid in test_regions."""
    regions = [region(one) for one in arrays]
    try:
        pair(regions[0], regions[-1])
    except ValueError:
        return False
    return True


def region(one: np.ndarray, address: int = 1 << 40, kind: Kind = Kind.DEVICE, pinned: int | None = None) -> Region:
    strides = compact(one.shape, one.strides, one.itemsize, "it")
    length = extent(one.shape, strides, one.itemsize, one.nbytes)
    return Region(
        address, one.nbytes, length, 0, kind, 1, one.shape, strides, one.itemsize, one.dtype, None, None, False, None,
        None, address, length if pinned is None else pinned,
    )  # fmt: skip


@given(cut=cuts(), dtype=st.sampled_from(["u1", "i4", "V3"]), pinned=st.booleans(), seed=st.integers(0, 1000))
@thorough
@one_loop
async def test_a_strided_side(cut: Cut, dtype: str, pinned: bool, seed: int) -> None:
    shape, slices = cut
    data = array(shape, dtype, seed)
    part = data[slices]
    device = DeviceArray.from_numpy(data)
    flat = pinned_empty(part.shape, dtype) if pinned else np.zeros(part.shape, dtype)
    if not expressible(part, flat):
        with pytest.raises(ValueError, match="contiguous"):
            await copy_to_host(device[slices], flat)
        return
    await copy_to_host(device[slices], flat)
    assert flat.tobytes() == part.tobytes()

    # Back into another place, and nothing beside it.
    other = array(shape, dtype, seed + 1)
    target = DeviceArray.from_numpy(other)
    await copy_to_device(flat, target[slices])
    other[slices] = part
    assert target.to_numpy().tobytes() == other.tobytes()
    # The host side strided, into and out of a flat device array.
    host = array(shape, dtype, seed + 2)
    expected = host.copy()
    expected[slices] = part
    small = DeviceArray.from_numpy(part) if part.size else DeviceArray(part.shape, dtype)
    await copy_to_host(small, host[slices])
    assert host.tobytes() == expected.tobytes()
    await copy_to_device(expected[slices], small)
    assert small.to_numpy().tobytes() == part.tobytes()


@given(cut=cuts(3), pads=st.tuples(*[st.integers(0, 3)] * 3), seed=st.integers(0, 1000), slots=st.sampled_from([1, 2]))
@thorough
@one_loop
async def test_both_sides_strided_in_their_own_ways(cut: Cut, pads: tuple[int, ...], seed: int, slots: int) -> None:
    shape, slices = cut
    data = array(shape, "i4", seed)
    part = data[slices]
    host = array(tuple(n + pad for n, pad in zip(part.shape, pads, strict=False)), "i4", seed + 1)
    inner = tuple(slice(0, n) for n in part.shape)
    device = DeviceArray.from_numpy(data)
    async with Copier(slots=slots, slot_nbytes=4096, inline=False) as copier:
        if not expressible(part, host[inner]):
            with pytest.raises(ValueError, match="contiguous"):
                await copier.copy_to_host(device[slices], host[inner])
            return
        expected = host.copy()
        expected[inner] = part
        await copier.copy_to_host(device[slices], host[inner])
        assert host.tobytes() == expected.tobytes()
        target = DeviceArray.from_numpy(-data)
        await copier.copy_to_device(host[inner], target[slices])
        after = -data
        after[slices] = part
        assert target.to_numpy().tobytes() == after.tobytes()
        between = DeviceArray.from_numpy(host)
        await copier.copy_to_device(target[slices], between[inner])
        assert between.to_numpy().tobytes() == expected.tobytes()


# Rows and slots that do not fit each other.

rows = st.tuples(st.integers(1, 40), st.integers(1, 9000), st.integers(0, 700))


@given(rows=rows, pinned=st.booleans(), slots=st.sampled_from([1, 2, 3]), seed=st.integers(0, 1000))
@example(rows=(40, 4096, 1), pinned=False, slots=1, seed=1)
@example(rows=(40, 4097, 1), pinned=False, slots=2, seed=1)
@example(rows=(40, 4095, 1), pinned=False, slots=2, seed=1)
@example(rows=(40, 1024, 7), pinned=True, slots=2, seed=1)
@thorough
@one_loop
async def test_tiny_slots(rows: tuple[int, int, int], pinned: bool, slots: int, seed: int) -> None:
    height, width, pad = rows
    data = array((height, width + pad), "u1", seed)
    device = DeviceArray.from_numpy(data)
    host = (pinned_empty if pinned else np.empty)((height, width), np.uint8)
    async with Copier(slots=slots, slot_nbytes=4096) as copier:
        await copier.copy_to_host(device[:, pad:], host)
        assert np.array_equal(host, data[:, pad:])
        target = np.zeros_like(data)
        await copier.copy_to_host(device[:, :width], target[:, pad:])
        assert np.array_equal(target[:, pad:], data[:, :width])
        assert not target[:, :pad].any()
        back = DeviceArray.from_numpy(np.zeros_like(data))
        await copier.copy_to_device(host, back[:, :width])
        assert np.array_equal(back.to_numpy()[:, :width], data[:, pad:])
        assert not back.to_numpy()[:, width:].any()
        await copier.copy_to_device(target, back)
        assert np.array_equal(back.to_numpy(), target)


@given(
    sizes=st.lists(st.integers(0, 12_000), min_size=1, max_size=30),
    gaps=st.integers(0, 65),
    pinned=st.booleans(),
    seed=st.integers(0, 1000),
)
@thorough
@one_loop
async def test_batches_in_tiny_slots(sizes: list[int], gaps: int, pinned: bool, seed: int) -> None:
    begins = np.concatenate([[0], np.cumsum(np.array(sizes) + gaps)]).astype(int)
    total = int(begins[-1])
    data = pattern(total, seed)
    device, host = DeviceArray.from_numpy(data), (pinned_empty if pinned else np.empty)(total, np.uint8)
    host[:] = 0
    parts = [slice(begin, begin + n) for begin, n in zip(begins, sizes, strict=False)]
    expected = np.zeros(total, np.uint8)
    for part in parts:
        expected[part] = data[part]
    async with Copier(slots=2, slot_nbytes=4096) as copier:
        await copier.copy_batch(0, [device[part] for part in parts], [host[part] for part in parts])
        assert np.array_equal(host, expected)
        back = DeviceArray.from_numpy(np.zeros(total, np.uint8))
        await copier.copy_batch(0, [host[part] for part in parts], [back[part] for part in parts])
        assert np.array_equal(back.to_numpy(), expected)


@given(cuts_=st.lists(cuts(3), min_size=1, max_size=6), pinned=st.booleans(), seed=st.integers(0, 1000))
@thorough
@one_loop
async def test_batches_of_strided_entries(cuts_: list[Cut], pinned: bool, seed: int) -> None:
    arrays = [array(shape, "i2", seed + k) for k, (shape, _) in enumerate(cuts_)]
    parts = [one[slices] for one, (_, slices) in zip(arrays, cuts_, strict=True)]
    flats = [(pinned_empty if pinned else np.zeros)(part.shape, "i2") for part in parts]
    fit = [k for k, part in enumerate(parts) if expressible(part, flats[k])]
    devices = [DeviceArray.from_numpy(arrays[k])[cuts_[k][1]] for k in fit]
    await copy_batch(0, devices, [flats[k] for k in fit])
    for k in fit:
        assert flats[k].tobytes() == parts[k].tobytes()


# The plan itself.


def lookup_of(stretches: list[tuple[int, int]]) -> Any:
    def lookup(address: int) -> tuple[int, int, bool, int, int, int]:
        for start, nbytes in stretches:
            if start <= address < start + nbytes:
                return 1, 1, False, 0, start, nbytes
        return 0, 0, False, 0, 0, 0

    return lookup


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=8), offset=st.integers(0, 4999), data=st.data())
def test_page_locked_ranges_are_cut_at_registrations(lengths: list[int], offset: int, data: st.DataObject) -> None:
    base = 1 << 40
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    stretches = [(base + start, length) for start, length in zip(starts, lengths, strict=False)]
    offset = min(offset, lengths[0] - 1)
    nbytes = data.draw(st.integers(1, starts[-1] - offset + 100))
    src = region(np.empty(nbytes, np.uint8), base + offset, Kind.PINNED)._replace(
        range_start=base, range_nbytes=lengths[0]
    )
    dst = region(np.empty(nbytes, np.uint8), 1 << 45)
    plan = plan_copy(src, dst, "to_device", lookup_of(stretches))
    if offset + nbytes > starts[-1]:
        assert plan.route is Route.TO_DEVICE_STAGED
        assert len(plan.entries) == 1
        return
    assert plan.route is Route.TO_DEVICE_DIRECT
    at = base + offset
    for to, begin, width, height, depth, *_ in plan.entries:
        assert (begin, to, height, depth) == (at, (1 << 45) + at - base - offset, 1, 1)
        [start, length] = next(one for one in stretches if one[0] <= begin < one[0] + one[1])
        assert begin + width <= start + length
        at += width
    assert at == base + offset + nbytes


@given(cut=cuts(3), seed=st.integers(0, 10))
def test_rectangles_name_every_byte_once_in_order(cut: Cut, seed: int) -> None:
    shape, slices = cut
    data = array(shape, "u1", seed)
    part = data[slices]
    if not part.size or not expressible(part, part):
        return
    rectangles = pair(region(part), region(np.ascontiguousarray(part)))
    assert isinstance(rectangles, Rectangles)
    begin = part.__array_interface__["data"][0] - data.__array_interface__["data"][0]
    flat = data.reshape(-1)
    found = b"".join(flat[begin + at : begin + at + rectangles.width].tobytes() for at, _ in rectangles.rows())
    assert found == part.tobytes()
    assert [to for _, to in rectangles.rows()] == list(range(0, part.nbytes, rectangles.width))
