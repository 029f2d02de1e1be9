"""Host memory that is page-locked in part, or in several registrations: the driver refuses a copy that spans two."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from kinds import one_loop, pattern

from aiocuda_copy import Copier, copy_batch, copy_to_device, copy_to_host, pinned
from aiocuda_copy.testing import DeviceArray

pytestmark = one_loop

# Of an array in tenths: which are page-locked, each stretch by itself.
STRETCHES: dict[str, list[tuple[int, int]]] = {
    "two registrations": [(0, 5), (5, 10)],
    "many registrations": [(k, k + 1) for k in range(10)],
    "first half": [(0, 5)],
    "second half": [(5, 10)],
    "a hole": [(0, 4), (6, 10)],
    "the middle": [(3, 7)],
    "nested": [(0, 10), (2, 5)],
}


@pytest.mark.parametrize("nbytes", [1000, 70_000, 9_000_010])
@pytest.mark.parametrize("name", STRETCHES)
async def test_both_ways(name: str, nbytes: int) -> None:
    host = pattern(nbytes)
    device = DeviceArray(nbytes)
    with ExitStack() as stack:
        for begin, end in STRETCHES[name]:
            stack.enter_context(pinned(host[begin * nbytes // 10 : end * nbytes // 10]))
        await copy_to_device(host, device)
        assert np.array_equal(device.to_numpy(), pattern(nbytes))
        host.fill(0)
        await copy_to_host(device, host)
        assert np.array_equal(host, pattern(nbytes))
        host.fill(0)
        await copy_batch(0, [device[: nbytes // 3], device[nbytes // 3 :]], [host[: nbytes // 3], host[nbytes // 3 :]])
        assert np.array_equal(host, pattern(nbytes))


@pytest.mark.parametrize("name", STRETCHES)
async def test_strided(name: str) -> None:
    host, nbytes = pattern(700 * 1000).reshape(700, 1000), 700_000
    device = DeviceArray((350, 900))
    flat = host.reshape(-1)
    with ExitStack() as stack:
        for begin, end in STRETCHES[name]:
            stack.enter_context(pinned(flat[begin * nbytes // 10 : end * nbytes // 10]))
        await copy_to_device(host[::2, 50:950], device)
        assert np.array_equal(device.to_numpy(), pattern(nbytes).reshape(700, 1000)[::2, 50:950])
        host[::2, 50:950] = 0
        await copy_to_host(device, host[::2, 50:950])
        assert np.array_equal(host, pattern(nbytes).reshape(700, 1000))


@pytest.mark.parametrize(("name", "route"), [("two registrations", "direct"), ("a hole", "staged")])
async def test_the_path(name: str, route: str) -> None:
    nbytes = 200_000
    host, device = np.zeros(nbytes, np.uint8), DeviceArray(nbytes)
    with ExitStack() as stack:
        for begin, end in STRETCHES[name]:
            stack.enter_context(pinned(host[begin * nbytes // 10 : end * nbytes // 10]))
        async with Copier() as copier:
            await copier.copy_to_host(device, host)
            stats = copier.stats()
            assert {"direct": stats.nbytes_direct, "staged": stats.nbytes_staged}[route] == nbytes
            if route == "direct":
                await copier.copy_to_host(device, host, in_stream=True)
            else:
                with pytest.raises(ValueError, match="in_stream=True"):
                    await copier.copy_to_host(device, host, in_stream=True)


async def test_memory_shared_with_a_registration_behind_it(request: Any) -> None:
    # The registration begins inside the array, on a page that is not the array's first.
    host = pattern(3 * 4096)
    device = DeviceArray(host.size)
    with pinned(host[5000:]):
        await copy_to_device(host, device)
        assert np.array_equal(device.to_numpy(), pattern(host.size))
        host.fill(0)
        await copy_to_host(device, host)
    assert np.array_equal(host, pattern(host.size))
