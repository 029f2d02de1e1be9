"""Many copies at once in an anyio task group, on asyncio or trio; one that fails cancels the others.

    python examples/task_group.py [asyncio|trio]

AIOCUDA_COPY_DRIVER=emulated runs it without a GPU.
"""

from __future__ import annotations

import sys

import anyio
import numpy as np

from aiocuda_copy import Copier, testing

COUNT, NBYTES = 64, 1 << 20


async def fetch(copier: Copier, source: testing.DeviceArray, results: list[np.ndarray | None], index: int) -> None:
    results[index] = await copier.copy_to_host(source)


async def main() -> None:
    arrays = [np.full(NBYTES, index, np.uint8) for index in range(COUNT)]
    sources = [testing.DeviceArray.from_numpy(array) for array in arrays]
    results: list[np.ndarray | None] = [None] * COUNT

    async with Copier() as copier:
        async with anyio.create_task_group() as group:
            for index, source in enumerate(sources):
                group.start_soon(fetch, copier, source, results, index)
        assert all(np.array_equal(array, result) for array, result in zip(arrays, results, strict=True))
        print(f"{COUNT} copies of {NBYTES} bytes in one task group: all the same")

        # A wrong argument in one task: the group cancels its siblings, whose copies stop, and nothing stays in flight.
        too_small = np.zeros(1, np.uint8)
        try:
            async with anyio.create_task_group() as group:
                for source in sources:
                    group.start_soon(copier.copy_to_host, source, np.empty(NBYTES, np.uint8))
                group.start_soon(copier.copy_to_host, sources[0], too_small)
        except* ValueError as errors:
            print(f"one copy was refused, the rest cancelled: {errors.exceptions[0]}")
    # The copier has been closed, which waits for what it had in flight.
    assert copier.stats().in_flight == 0


if __name__ == "__main__":
    anyio.run(main, backend=sys.argv[1] if len(sys.argv) > 1 else "asyncio")
