"""Many copies of all sizes and both directions, cancelled at any moment, from several loops at once, for a while."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time

import numpy as np
import pytest

from aiocuda_copy import copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy.testing import DeviceArray

pytestmark = pytest.mark.stress

SECONDS = float(os.environ.get("STRESS_SECONDS", "60"))
SIZES = (1, 4, 4096, 65_537, 1 << 20, (9 << 20) + 3)
GUARD = 64


async def there_and_back(chance: random.Random) -> None:
    """Copies an array to the device and back, and looks at every byte and at the bytes next to the destination."""
    nbytes = chance.choice(SIZES)
    source = np.frombuffer(chance.randbytes(nbytes), np.uint8)
    device = DeviceArray((nbytes,), np.uint8)
    room = np.full(nbytes + 2 * GUARD, 0xA5, np.uint8)
    if chance.random() < 0.5:
        room = pinned_empty(room.shape, np.uint8)
        room.fill(0xA5)
    target = room[GUARD:-GUARD]

    await copy_to_device(source, device)
    copy = asyncio.create_task(copy_to_host(device, target))
    if chance.random() < 0.4:
        await asyncio.sleep(chance.choice((0, 0, 0.0001, 0.001, 0.01)))
        copy.cancel()
    try:
        await copy
    except asyncio.CancelledError:
        # From here on the memory is the caller's: nobody else may write to it.
        target.fill(0x5A)
        await asyncio.sleep(0.005)
        assert (target == 0x5A).all()
    else:
        assert np.array_equal(source, target)
    assert (room[:GUARD] == 0xA5).all()
    assert (room[-GUARD:] == 0xA5).all()


async def soak(seed: int) -> None:
    chance = random.Random(seed)
    end = time.monotonic() + SECONDS

    async def worker() -> None:
        while time.monotonic() < end:
            await there_and_back(chance)

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(worker())


def test_there_and_back_from_several_loops() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    failures: list[BaseException] = []

    def loop(number: int) -> None:
        try:
            asyncio.run(soak(seed + number))
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 60)
        assert not thread.is_alive(), f"a loop hangs; seed {seed}"
    assert not failures, failures
