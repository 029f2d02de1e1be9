"""Large copies: rates beside the link's, and what they do to the loop."""

from __future__ import annotations

import numpy as np

from ... import copy_to_device, copy_to_host
from ._machine import Machine
from ._measure import GAP, RATE, bulk
from ._registry import LINK, Figure, case

__all__ = [
    "FROM_PAGEABLE",
    "FROM_PINNED",
    "TO_FRESH",
    "TO_MEDIUM",
    "TO_NEW",
    "TO_PAGEABLE",
    "TO_PINNED",
    "link_to_device",
    "link_to_host",
]

TO_PAGEABLE = "bulk to host, pageable"
TO_FRESH = "bulk to host, fresh memory"
TO_NEW = "bulk to host, new array"
TO_PINNED = "bulk to host, page-locked"
TO_MEDIUM = "bulk to host, pageable, 64 MiB"
FROM_PAGEABLE = "bulk to device, pageable"
FROM_PINNED = "bulk to device, page-locked"


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


async def link_to_host(machine: Machine) -> list[Figure]:
    """The link's rate, and the gap of an idle loop: what the others of the workload are compared with."""
    rate, idle = await machine.link(to_host=True), await machine.idle_gap()
    return [Figure(RATE, rate / 1e9, "GB/s"), Figure(GAP, idle * 1e3, "ms")]


async def link_to_device(machine: Machine) -> list[Figure]:
    """The same, the other way."""
    rate, idle = await machine.link(to_host=False), await machine.idle_gap()
    return [Figure(RATE, rate / 1e9, "GB/s"), Figure(GAP, idle * 1e3, "ms")]


for _workload in (TO_PAGEABLE, TO_FRESH, TO_NEW, TO_PINNED, TO_MEDIUM):
    case(_workload, by=LINK)(link_to_host)
for _workload in (FROM_PAGEABLE, FROM_PINNED):
    case(_workload, by=LINK)(link_to_device)
