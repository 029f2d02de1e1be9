"""Copies a cuda.core buffer to host memory and back by `await`, while the event loop goes on.

    python examples/copy_to_host.py [nbytes]

AIOCUDA_COPY_DRIVER=emulated runs it without a GPU.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import aiocuda_copy
from aiocuda_copy import testing

testing.driver_from_environment()  # before the first driver call of anyone, cuda.core included

from cuda.core import Device  # noqa: E402


async def main(nbytes: int) -> None:
    device = Device()
    device.set_current()
    stream = device.create_stream()
    buffer = device.allocate(nbytes, stream=stream)
    pattern = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    await aiocuda_copy.copy_to_device(pattern, buffer, stream=stream)

    # Into an array of one's own, whose size must be the buffer's.
    array = np.zeros(nbytes, np.uint8)
    await aiocuda_copy.copy_to_host(buffer, array, stream=stream)
    assert np.array_equal(array, pattern)

    # Into a new one, in page-locked memory that is used again when the array is gone.
    fresh = await aiocuda_copy.copy_to_host(buffer, stream=stream)
    assert np.array_equal(fresh, pattern)

    # With a time limit: a copy that is cancelled no longer touches either side when the await has returned.
    try:
        async with asyncio.timeout(10):
            await aiocuda_copy.copy_to_host(buffer, array, stream=stream)
    except TimeoutError:
        print("the copy took longer than 10 s")

    buffer.close(stream)
    stream.sync()
    print(f"{nbytes} bytes there and back on {device.name}: the same")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000_000))
