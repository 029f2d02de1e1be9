"""Strided sides are copied right, or refused with a word of what to do (numba/numba#3334, cupy/cupy#5721)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kinds import one_loop, pattern

from aiocuda_copy import Copier, copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy.testing import DeviceArray

pytestmark = one_loop

Cut = Callable[[Any], Any]

# From a cube of 20 x 30 x 40 integers.
CUTS: dict[str, Cut] = {
    "every other row": lambda a: a[0, ::2],
    "every other item": lambda a: a[0, 0, ::2],
    "columns": lambda a: a[3, :, 5:17],
    "rows": lambda a: a[3, 4:9],
    "box": lambda a: a[2:11, 3:17, 5:9],
    "thin slices": lambda a: a[:, :2],
    "one column": lambda a: a[:, :, 7],
    "every third slice": lambda a: a[::3],
    "every other row of every third slice": lambda a: a[::3, ::2],
    "one item of each slice": lambda a: a[:, 4, 5],
    "axes of length 1": lambda a: a[4:5, ::2, 3:4],
    "all of it": lambda a: a,
    "nothing": lambda a: a[:, 3:3, ::2],
}


def cube() -> np.ndarray:
    return pattern(20 * 30 * 40 * 4).view("i4").reshape(20, 30, 40)


def host_cube(pinned: bool) -> np.ndarray:
    host = pinned_empty((20, 30, 40), "i4") if pinned else np.empty((20, 30, 40), "i4")
    host[:] = cube()
    return host


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", CUTS)
async def test_a_strided_device_side(name: str, pinned: bool) -> None:
    cut = CUTS[name]
    device = DeviceArray.from_numpy(cube())
    expected = cut(cube())
    host = pinned_empty(expected.shape, "i4") if pinned else np.empty(expected.shape, "i4")
    await copy_to_host(cut(device), host)
    assert np.array_equal(host, expected)

    await copy_to_device(np.ascontiguousarray(-expected), cut(device))
    after = cube()
    cut(after)[:] = -expected
    assert np.array_equal(device.to_numpy(), after)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", CUTS)
async def test_a_strided_host_side(name: str, pinned: bool) -> None:
    cut = CUTS[name]
    host = host_cube(pinned)
    expected = cut(cube())
    device = DeviceArray(expected.shape, "i4")
    await copy_to_device(cut(host), device)
    assert np.array_equal(device.to_numpy(), expected)

    await copy_to_host(DeviceArray.from_numpy(-expected), cut(host))
    after = cube()
    cut(after)[:] = -expected
    assert np.array_equal(host, after)


@pytest.mark.parametrize("name", CUTS)
async def test_both_sides_strided_alike(name: str) -> None:
    cut = CUTS[name]
    for pinned in (False, True):
        host = host_cube(pinned)
        device = DeviceArray.from_numpy(-cube())
        await copy_to_device(cut(host), cut(device))
        after = -cube()
        cut(after)[:] = cut(cube())
        assert np.array_equal(device.to_numpy(), after)


@pytest.mark.parametrize("name", CUTS)
async def test_a_new_array_of_a_strided_source(name: str) -> None:
    cut = CUTS[name]
    found = await copy_to_host(cut(DeviceArray.from_numpy(cube())))
    assert found.flags.c_contiguous
    assert np.array_equal(found, cut(cube()))


async def test_between_device_arrays() -> None:
    source, destination = DeviceArray.from_numpy(cube()), DeviceArray.from_numpy(-cube())
    await copy_to_device(source[2:11, 3:17, 5:9], destination[3:12, 1:15, 20:24])
    after = -cube()
    after[3:12, 1:15, 20:24] = cube()[2:11, 3:17, 5:9]
    assert np.array_equal(destination.to_numpy(), after)


async def test_a_strided_memoryview() -> None:
    host = bytearray(pattern(1000))
    device = DeviceArray(500)
    await copy_to_device(memoryview(host)[::2], device)
    assert np.array_equal(device.to_numpy(), pattern(1000)[::2])
    await copy_to_host(device, memoryview(host)[1::2])
    assert bytes(host[1::2]) == pattern(1000)[::2].tobytes()


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
async def test_rows_wider_than_a_slot(pinned: bool) -> None:
    data = pattern(7 * 10_001).reshape(7, 10_001)
    async with Copier(slots=2, slot_nbytes=4096) as copier:
        device = DeviceArray.from_numpy(data)
        host = (pinned_empty if pinned else np.empty)((7, 9_999), np.uint8)
        await copier.copy_to_host(device[:, 1:-1], host)
        assert np.array_equal(host, data[:, 1:-1])
        await copier.copy_to_device(host, device[:, 2:])
    after = data.copy()
    after[:, 2:] = data[:, 1:-1]
    assert np.array_equal(device.to_numpy(), after)


async def test_large_boxes() -> None:
    data = pattern(40 * 300 * 1001).reshape(40, 300, 1001)
    device = DeviceArray.from_numpy(data)
    for host in (np.empty((40, 299, 999), np.uint8), pinned_empty((40, 299, 999))):
        await copy_to_host(device[:, 1:, 1:-1], host)
        assert np.array_equal(host, data[:, 1:, 1:-1])


REFUSED: dict[str, tuple[Cut, str]] = {
    "transposed": (lambda a: a.T, "permuted"),
    "transposed rows": (lambda a: a[3].T, "permuted"),
    "backwards": (lambda a: a[::-1], "negative stride"),
    "backwards rows": (lambda a: a[0, :, ::-1], "negative stride"),
    "four levels": (lambda a: a[::2, ::3, ::2], "more ways than a 3-D copy"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_copied_is_refused(name: str) -> None:
    cut, message = REFUSED[name]
    device, host = DeviceArray.from_numpy(cube()), cube()
    flat_device, flat_host = DeviceArray(cut(host).nbytes), np.zeros(cut(host).nbytes, np.uint8)
    async with Copier() as copier:
        for copy in (
            copier.copy_to_host(cut(device), flat_host),
            copier.copy_to_host(cut(device)),
            copier.copy_to_host(flat_device, cut(host)),
            copier.copy_to_device(cut(host), flat_device),
            copier.copy_to_device(flat_host, cut(device)),
        ):
            with pytest.raises(ValueError, match=rf"{message}.*contiguous"):
                await copy
        assert copier.stats().submitted == 0


async def test_broadcast_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match=r"broadcast.*ascontiguousarray"):
        await copy_to_device(np.broadcast_to(np.arange(4, dtype="u1"), (3, 4)), DeviceArray(12))
    array = np.lib.stride_tricks.as_strided(np.zeros(20, np.uint8), (4, 8), (4, 1))
    with pytest.raises(ValueError, match=r"overlapping axes.*ascontiguousarray"):
        await copy_to_host(DeviceArray(32), array)


class Empty:
    """Claims an empty array with whatever strides and address."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "strides": strides, "typestr": "<f4", "data": (address, False), "version": 3
        }  # fmt: skip


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0, 2)])
@pytest.mark.parametrize("step", [None, 0, -8, 3, 1 << 40])
async def test_empty_arrays_with_odd_strides(shape: tuple[int, ...], step: int | None) -> None:
    # numba/numba#8482
    strides = None if step is None else tuple(step for _ in shape)
    for address in (0, 0xDEAD0000):
        empty = Empty(shape, strides, address)
        found = await copy_to_host(empty)
        assert (found.shape, found.dtype) == (shape, np.dtype("f4"))
        destination = np.zeros((4, 4))[:0]
        assert await copy_to_host(empty, destination) is destination
        assert await copy_to_device(np.zeros((4, 4))[::-1, :0], empty) is empty
