"""Large copies and batches: rates beside the link's, and what they do to the loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from ... import copy_batch, copy_to_device, copy_to_host
from .._heartbeat import Heartbeat
from ._machine import Machine
from ._registry import Figure, case

__all__: list[str] = []


async def _measure(
    machine: Machine, copy: Callable[[], Awaitable[object]], nbytes: int, *, to_host: bool
) -> list[Figure]:
    link = await machine.link(to_host=to_host)
    idle = await machine.idle_gap()
    async with Heartbeat() as beat:
        begin = time.perf_counter()
        await copy()
        seconds = time.perf_counter() - begin
    return [
        Figure("rate", nbytes / seconds / 1e9, "GB/s"),
        Figure("the link's rate", link / 1e9, "GB/s"),
        Figure("of the link's", nbytes / seconds / link, "x"),
        Figure("longest gap of the loop", beat.longest * 1e3, "ms"),
        Figure("the same, idle", idle * 1e3, "ms"),
    ]


@case("bulk to host, page-locked")
async def to_pinned(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pinned
    return await _measure(
        machine, lambda: copy_to_host(device, host, stream=machine.stream), machine.bulk_nbytes, to_host=True
    )


@case("bulk to host, pageable")
async def to_pageable(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pageable
    return await _measure(
        machine, lambda: copy_to_host(device, host, stream=machine.stream), machine.bulk_nbytes, to_host=True
    )


@case("bulk to device, page-locked")
async def from_pinned(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pinned
    return await _measure(
        machine, lambda: copy_to_device(host, device, stream=machine.stream), machine.bulk_nbytes, to_host=False
    )


@case("bulk to device, pageable")
async def from_pageable(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pageable
    return await _measure(
        machine, lambda: copy_to_device(host, device, stream=machine.stream), machine.bulk_nbytes, to_host=False
    )


@case("batch of 16 KiB blocks to host")
async def batch_to_host(machine: Machine) -> list[Figure]:
    device, host = machine.blocks
    size = machine.batch_entry_nbytes
    return await _measure(
        machine,
        lambda: copy_batch(machine.stream, device, host, sizes=size),
        machine.batch_entries * size,
        to_host=True,
    )


@case("batch of 16 KiB blocks to device")
async def batch_to_device(machine: Machine) -> list[Figure]:
    device, host = machine.blocks
    size = machine.batch_entry_nbytes
    return await _measure(
        machine,
        lambda: copy_batch(machine.stream, host, device, sizes=size),
        machine.batch_entries * size,
        to_host=False,
    )
