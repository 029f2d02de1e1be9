"""``demo``: copies real arrays both ways, compares every byte, and shows what the loop did meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._choose import EMULATED_NOTICE
from ._heartbeat import Heartbeat
from ._table import table
from .info import collect

__all__ = ["run"]

_KIB, _MIB = 1 << 10, 1 << 20

Copies = Callable[[], Awaitable[object]]


def run(arguments: argparse.Namespace) -> int:
    """Prints a table; the exit status is 1 where a byte differs."""
    emulated = arguments.emulated
    report = collect(emulated=emulated)
    if report["error"]:
        print(report["error"], file=sys.stderr)
        return 1
    print(f"{report['devices'][0]['name']}, CUDA {report['cuda']}")
    if emulated:
        print(EMULATED_NOTICE)
    print()
    steps = asyncio.run(_demo((arguments.mib or (32 if emulated else 256)) * _MIB))
    print(table(["what", "bytes", "path", "rate", "longest gap of the loop", "compared"], [s.cells() for s in steps]))
    if not all(step.same for step in steps):
        print("\nBYTES DIFFER", file=sys.stderr)
        return 1
    print(
        f"\nEvery byte is the same. Each line is of the second time. An idle loop that is woken every millisecond has "
        f"gaps of {steps[0].idle:.1f} ms."
    )
    return 0


class _Step:
    """One row: a number of copies that are awaited together, beside a heartbeat."""

    idle = 0.0

    def __init__(self, what: str, nbytes: int, count: int = 1) -> None:
        self.what, self.nbytes, self.count = what, nbytes, count
        self.same = False

    async def measure(self, copier: Any, copies: Copies) -> None:
        # The first time threads start, slots are pinned and the kernel is compiled.
        await copies()
        before = copier.stats()
        async with Heartbeat() as beat:
            begin = time.perf_counter()
            await copies()
            self.seconds = time.perf_counter() - begin
        self.gap = beat.longest
        self.path = _paths_between(before, copier.stats())

    def cells(self) -> list[str]:
        rate = f"{self.nbytes / self.seconds / 1e9:.1f} GB/s"
        if self.count > 1:
            rate += f", {self.seconds / self.count * 1e6:.1f} µs each"
        same = "same" if self.same else "DIFFERENT"
        return [self.what, f"{self.nbytes:,}", self.path, rate, f"{self.gap * 1e3:.1f} ms", same]


def _paths_between(before: Any, after: Any) -> str:
    names = [field.name for field in fields(after) if field.name.startswith("nbytes_")]
    taken = [name.removeprefix("nbytes_") for name in names if getattr(after, name) > getattr(before, name)]
    return ", ".join(taken).replace("_", " ")


async def _demo(nbytes: int) -> list[_Step]:
    from .. import Blocks, Copier
    from ..testing import DeviceArray

    random = np.random.default_rng()

    def noise(size: int) -> NDArray[np.uint8]:
        return random.integers(0, 256, size, np.uint8)

    async with Heartbeat() as beat:
        await asyncio.sleep(0.2)
    idle = beat.longest * 1e3

    async with Copier() as copier:
        steps = []

        async def both_ways(
            what: str, size: int, there: Copies, back: Copies, same: Callable[[], bool], count: int = 1
        ) -> None:
            for direction, copies in (("to the device", there), ("to the host", back)):
                step = _Step(f"{what} {direction}", size, count)
                step.idle = idle
                await step.measure(copier, copies)
                steps.append(step)
            # What has come back is what was sent: that judges both ways at once.
            steps[-2].same = steps[-1].same = same()

        source, target = noise(nbytes), np.zeros(nbytes, np.uint8)
        device = DeviceArray((nbytes,), np.uint8)
        await both_ways(
            "one array",
            nbytes,
            lambda: copier.copy_to_device(source, device),
            lambda: copier.copy_to_host(device, target),
            lambda: np.array_equal(source, target),
        )

        count, size = 1_000, 4 * _KIB
        sources, targets = noise(count * size).reshape(count, size), np.zeros((count, size), np.uint8)
        devices = [DeviceArray((size,), np.uint8) for _ in range(count)]
        await both_ways(
            f"{count:,} arrays at once",
            count * size,
            lambda: asyncio.gather(*map(copier.copy_to_device, sources, devices)),
            lambda: asyncio.gather(*map(copier.copy_to_host, devices, targets)),
            lambda: np.array_equal(sources, targets),
            count,
        )

        size = 16 * _KIB
        packed, unpacked = noise(count * size).reshape(count, size), np.zeros((count, size), np.uint8)
        in_order = np.arange(count, dtype=np.int64) * size
        blocks = Blocks(DeviceArray((count, size), np.uint8), random.permutation(in_order))
        await both_ways(
            f"a batch of {count:,} blocks",
            count * size,
            lambda: copier.copy_batch(None, Blocks(packed, in_order), blocks, sizes=size),
            lambda: copier.copy_batch(None, blocks, Blocks(unpacked, in_order), sizes=size),
            lambda: np.array_equal(packed, unpacked),
            count,
        )
    return steps
