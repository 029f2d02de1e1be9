"""A loader: batches of ordinary memory go to the device while the ones before them are being computed with."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import prefetch, synchronize
from .._heartbeat import Heartbeat
from ._bulk import link_to_device
from ._machine import Machine
from ._measure import GAP
from ._registry import LINK, Figure, case

__all__ = ["BATCH", "COMPUTE_SECONDS", "LARGER", "LOADER", "host_batches", "per_batch"]

LOADER = "loader, 32 MiB batches from pageable memory, 1 ms of work each"
LARGER = "the larger of compute and transfer"
BATCH = "each batch"

COMPUTE_SECONDS = 1e-3


def host_batches(machine: Machine) -> Iterator[NDArray[np.uint8]]:
    """Pieces of touched pageable memory, over and over again."""
    pieces = machine.pageable.reshape(-1, machine.loader_batch_nbytes)
    for index in range(machine.loader_batches):
        yield pieces[index % len(pieces)]


async def per_batch(machine: Machine, once: Callable[[], Awaitable[Any]]) -> list[Figure]:
    """Milliseconds that each batch took of a run over all, and what the loop did meanwhile."""
    async with Heartbeat() as beat:
        begin = time.perf_counter()
        await once()
        seconds = time.perf_counter() - begin
    return [
        Figure(BATCH, seconds / machine.loader_batches * 1e3, "ms"),
        Figure(GAP, beat.longest * 1e3, "ms"),
    ]


@case(LOADER)
async def own_prefetch(machine: Machine) -> list[Figure]:
    async def run() -> None:
        async with prefetch(host_batches(machine), stream=machine.stream) as batches:
            async for _ in batches:
                machine.spin(COMPUTE_SECONDS)
        await synchronize(machine.stream)

    return await per_batch(machine, run)


@case(LOADER, by=LARGER)
async def larger(machine: Machine) -> list[Figure]:
    """What a perfect overlap would take."""

    async def compute() -> None:
        for _ in range(machine.loader_batches):
            machine.spin(COMPUTE_SECONDS)
        await synchronize(machine.stream)

    computing = (await per_batch(machine, compute))[0]
    transfer = machine.loader_batch_nbytes / await machine.link(to_host=False)
    return [Figure(BATCH, max(float(computing.value), transfer * 1e3), "ms")]


case(LOADER, by=LINK)(link_to_device)
