"""Copies a device buffer into a NumPy array in stream order, in chunks, and awaits the end of it.

    python examples/host_copy.py [nbytes]

The building blocks are cuda.core's buffers and streams, and this package's host functions. Each of two pinned slots has
a stream. Per chunk, three things are enqueued at once and nothing is waited for: the device's copy into the slot, then
the host function that copies the slot into the array; the next chunk for that slot comes after both, by stream order.
While the CPU empties one slot, the device fills the other. At the end a last host function writes to an eventfd, and
that is the only thing that the event loop waits for.

`aiocuda_copy.copy_to_host` does the same with several threads, cancellation and faults seen to; use it where the copy
is all you want. This is the way to put host work of your own into a stream.

AIOCUDA_COPY_DRIVER=emulated runs it without a GPU.
"""

from __future__ import annotations

import asyncio
import os
import sys

import numpy as np

from aiocuda_copy import (
    HOST_COPY_FN,
    HOST_SIGNAL_FN,
    launch_host_func,
    pack_host_copy_args,
    pack_host_signal_args,
    testing,
)

testing.driver_from_environment()  # before the first driver call of anyone, cuda.core included

from cuda.core import Buffer, Device, LegacyPinnedMemoryResource, Stream  # noqa: E402

# The driver runs the host functions of a context one after another: while one of them copies a chunk, no other runs.
CHUNK_NBYTES = 4 << 20
WATCH_SECONDS = 1.0


class Signal:
    """An eventfd that a stream writes and the event loop waits for."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def enqueue(self, stream: Stream) -> None:
        launch_host_func(stream, HOST_SIGNAL_FN, pack_host_signal_args(self.fd))

    async def wait(self, stream: Stream) -> None:
        """Waits for the signal. A host function never runs after a device fault, so the stream is looked at as well."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def on_readable() -> None:
            os.eventfd_read(self.fd)
            arrived.set()

        end = stream.record()
        loop.add_reader(self.fd, on_readable)
        try:
            while not arrived.is_set():
                try:
                    await asyncio.wait_for(arrived.wait(), WATCH_SECONDS)
                except TimeoutError:
                    _ = end.is_done  # raises the device's error
        finally:
            loop.remove_reader(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def part(buffer: Buffer, offset: int, nbytes: int) -> Buffer:
    return Buffer.from_handle(int(buffer.handle) + offset, nbytes, owner=buffer)


async def copy_to_numpy(device: Device, src: Buffer, dst: np.ndarray, *, after: Stream) -> None:
    """Copies ``src`` into ``dst``, after all work that is in the stream ``after``."""
    dst_bytes = dst.reshape(-1).view(np.uint8)
    streams = [device.create_stream() for _ in range(2)]
    pinned = LegacyPinnedMemoryResource()
    slots = [pinned.allocate(CHUNK_NBYTES) for _ in streams]
    signal = Signal()
    try:
        for stream in streams:
            stream.wait(after)
        for index, offset in enumerate(range(0, src.size, CHUNK_NBYTES)):
            stream, slot = streams[index % 2], slots[index % 2]
            nbytes = min(CHUNK_NBYTES, src.size - offset)
            part(src, offset, nbytes).copy_to(part(slot, 0, nbytes), stream=stream)
            # The record is copied by the launch; only the memory that it names has to stay.
            launch_host_func(
                stream, HOST_COPY_FN, pack_host_copy_args(dst_bytes[offset : offset + nbytes], slot, nbytes)
            )
        streams[0].wait(streams[1])
        signal.enqueue(streams[0])
        await signal.wait(streams[0])
    except BaseException:
        # What has been enqueued still uses the slots, the array and the descriptor.
        for stream in streams:
            stream.sync()
        raise
    finally:
        signal.close()
        for slot in slots:
            slot.close()
        for stream in streams:
            stream.close()


async def main(nbytes: int) -> None:
    device = Device()
    device.set_current()
    stream = device.create_stream()
    pattern = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    pinned = LegacyPinnedMemoryResource().allocate(nbytes)
    np.from_dlpack(pinned).view(np.uint8)[:] = pattern
    src = device.allocate(nbytes, stream=stream)
    src.copy_from(pinned, stream=stream)

    dst = np.zeros(nbytes, np.uint8)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticker = asyncio.create_task(tick())
    await copy_to_numpy(device, src, dst, after=stream)
    ticker.cancel()

    assert np.array_equal(dst, pattern), "the copy differs from its source"
    print(
        f"{device.name}: copied {nbytes} bytes in chunks of {CHUNK_NBYTES}; the event loop ran {ticks} times meanwhile"
    )
    src.close(stream)
    stream.sync()
    pinned.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else (32 << 20) + 12345))
