"""Shows the progress of long copies, with tqdm and with rich: one line for each.

    python examples/progress.py [mib]

AIOCUDA_COPY_DRIVER=emulated runs it without a GPU, on copies that are made slow.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys

import numpy as np

from aiocuda_copy import copy_to_device, copy_to_host, testing
from aiocuda_copy.testing import DeviceArray


async def with_tqdm(device: DeviceArray, host: np.ndarray) -> None:
    from tqdm import tqdm

    with tqdm(total=device.nbytes, desc="to host, tqdm", unit="B", unit_scale=True) as bar:
        await copy_to_host(device, host, progress=lambda done, total: bar.update(done - bar.n))


async def with_rich(device: DeviceArray, host: np.ndarray) -> None:
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    with Progress("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn()) as bars:
        bar = bars.add_task("to device, rich", total=device.nbytes)
        await copy_to_device(host, device, progress=lambda done, total: bars.update(bar, completed=done))


async def main(mib: int) -> None:
    testing.driver_from_environment()
    if testing.emulated():
        testing.use_emulated_driver().throttle(gigabytes_per_second=0.2)
    ways = {"tqdm": with_tqdm, "rich": with_rich}
    for name in [name for name in ways if importlib.util.find_spec(name) is None]:
        print(f"{name} is not installed: pip install 'aiocuda-copy[progress]'")
        del ways[name]
    device = DeviceArray((mib << 20,), np.uint8)
    pattern = np.resize(np.arange(251, dtype=np.uint8), device.nbytes)
    host = pattern.copy()
    await copy_to_device(host, device)
    for way in ways.values():
        await way(device, host)
    assert np.array_equal(await copy_to_host(device), pattern)
    print(f"{mib} MiB there and back: the same")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 64))
