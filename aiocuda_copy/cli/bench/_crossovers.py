"""Where the kernel ends: batches of one size by the kernel and by the copy engine, whichever the plan would choose."""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from ... import Blocks, copy_batch, pinned_empty
from ...testing import DeviceArray
from ._machine import Machine
from ._registry import OWN, Figure, case

__all__ = ["TO_DEVICE", "TO_HOST"]

TO_HOST = "batch to host, by either road"
TO_DEVICE = "batch to device, by either road"
_SIZES_KIB = (4, 16, 32, 64, 128, 256)


async def _rates(machine: Machine, *, to_host: bool, by_kernel: bool) -> list[Figure]:
    from cuda.core.utils import CopyOptions

    nbytes = machine.bulk_nbytes // 8
    device, host = DeviceArray(nbytes, np.uint8), np.asarray(pinned_empty(nbytes))
    # Options other than the defaults are the copy engine's; a few entries that are short make all the kernel's.
    options = None if by_kernel else CopyOptions(src_access_order="any")
    figures = []
    for kib in _SIZES_KIB:
        size = kib << 10
        count = nbytes // size
        scattered = np.random.default_rng(kib).permutation(count) * size
        blocks = Blocks(device, scattered), Blocks(host, np.arange(count) * size)
        sizes = np.full(count, size)
        if by_kernel and kib >= 64:
            sizes[::32] = 4096
        times = []
        for _ in range(machine.batch_rounds):
            begin = time.perf_counter()
            await copy_batch(machine.stream, *(blocks if to_host else blocks[::-1]), sizes=sizes, options=options)
            times.append(time.perf_counter() - begin)
        figures.append(Figure(f"{kib} KiB", int(sizes.sum()) / np.array(times) / 1e9, "GB/s"))
    return figures


for _workload, _to_host in ((TO_HOST, True), (TO_DEVICE, False)):
    for _by, _by_kernel in (("the kernel", True), ("the copy engine", False)):
        _run = partial(_rates, to_host=_to_host, by_kernel=_by_kernel)
        case(_workload, by=f"{OWN}, {_by}", at_most=2)(_run)
