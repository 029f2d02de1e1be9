"""Large copies and batches: rates beside the link's, and what they do to the loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import copy_batch, copy_to_device, copy_to_host
from ._machine import Machine
from ._measure import GAP, RATE, bulk
from ._registry import LINK, Figure, case

__all__ = [
    "ARRAYS_TO_DEVICE",
    "ARRAYS_TO_HOST",
    "BLOCKS_TO_DEVICE",
    "BLOCKS_TO_HOST",
    "FROM_PAGEABLE",
    "FROM_PINNED",
    "TO_FRESH",
    "TO_MEDIUM",
    "TO_NEW",
    "TO_PAGEABLE",
    "TO_PINNED",
]

TO_PAGEABLE = "bulk to host, pageable"
TO_FRESH = "bulk to host, fresh memory"
TO_NEW = "bulk to host, new array"
TO_PINNED = "bulk to host, page-locked"
TO_MEDIUM = "bulk to host, pageable, 64 MiB"
FROM_PAGEABLE = "bulk to device, pageable"
FROM_PINNED = "bulk to device, page-locked"
BLOCKS_TO_HOST = "batch to host, 16 KiB blocks of one array"
BLOCKS_TO_DEVICE = "batch to device, 16 KiB blocks of one array"
ARRAYS_TO_HOST = "batch to host, arrays of 16 KiB"
ARRAYS_TO_DEVICE = "batch to device, arrays of 16 KiB"


@case(TO_PAGEABLE)
async def to_pageable(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pageable
    return await bulk(lambda: copy_to_host(device, host, stream=machine.stream), machine.bulk_nbytes)


@case(TO_FRESH)
async def to_fresh(machine: Machine) -> list[Figure]:
    device, host = machine.device, np.empty(machine.bulk_nbytes, np.uint8)
    return await bulk(lambda: copy_to_host(device, host, stream=machine.stream), machine.bulk_nbytes)


@case(TO_NEW)
async def to_new(machine: Machine) -> list[Figure]:
    return await bulk(lambda: copy_to_host(machine.device, stream=machine.stream), machine.bulk_nbytes)


@case(TO_PINNED)
async def to_pinned(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pinned
    return await bulk(lambda: copy_to_host(device, host, stream=machine.stream), machine.bulk_nbytes)


@case(TO_MEDIUM)
async def to_medium(machine: Machine) -> list[Figure]:
    nbytes = machine.medium_nbytes
    device, host = machine.device[:nbytes], machine.pageable[:nbytes]
    return await bulk(lambda: copy_to_host(device, host, stream=machine.stream), nbytes)


@case(FROM_PAGEABLE)
async def from_pageable(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pageable
    return await bulk(lambda: copy_to_device(host, device, stream=machine.stream), machine.bulk_nbytes)


@case(FROM_PINNED)
async def from_pinned(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pinned
    return await bulk(lambda: copy_to_device(host, device, stream=machine.stream), machine.bulk_nbytes)


async def _batch(machine: Machine, srcs: Any, dsts: Any, sizes: int | None = None) -> list[Figure]:
    nbytes = machine.batch_entries * machine.batch_entry_nbytes
    return await bulk(lambda: copy_batch(machine.stream, srcs, dsts, sizes=sizes), nbytes)


@case(BLOCKS_TO_HOST)
async def blocks_to_host(machine: Machine) -> list[Figure]:
    device, host = machine.blocks
    return await _batch(machine, device, host, machine.batch_entry_nbytes)


@case(BLOCKS_TO_DEVICE)
async def blocks_to_device(machine: Machine) -> list[Figure]:
    device, host = machine.blocks
    return await _batch(machine, host, device, machine.batch_entry_nbytes)


@case(ARRAYS_TO_HOST)
async def arrays_to_host(machine: Machine) -> list[Figure]:
    device, host = machine.block_arrays
    return await _batch(machine, device, host)


@case(ARRAYS_TO_DEVICE)
async def arrays_to_device(machine: Machine) -> list[Figure]:
    device, host = machine.block_arrays
    return await _batch(machine, host, device)


async def link_to_host(machine: Machine) -> list[Figure]:
    """The link's rate, and the gap of an idle loop: what the others of the workload are compared with."""
    rate, idle = await machine.link(to_host=True), await machine.idle_gap()
    return [Figure(RATE, rate / 1e9, "GB/s"), Figure(GAP, idle * 1e3, "ms")]


async def link_to_device(machine: Machine) -> list[Figure]:
    """The same, the other way."""
    rate, idle = await machine.link(to_host=False), await machine.idle_gap()
    return [Figure(RATE, rate / 1e9, "GB/s"), Figure(GAP, idle * 1e3, "ms")]


for _workload in (TO_PAGEABLE, TO_FRESH, TO_NEW, TO_PINNED, TO_MEDIUM, BLOCKS_TO_HOST, ARRAYS_TO_HOST):
    case(_workload, by=LINK)(link_to_host)
for _workload in (FROM_PAGEABLE, FROM_PINNED, BLOCKS_TO_DEVICE, ARRAYS_TO_DEVICE):
    case(_workload, by=LINK)(link_to_device)
