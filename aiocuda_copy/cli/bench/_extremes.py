"""What a copy costs beyond its time: the loop's, the processor's, and memory; and very long copies."""

from __future__ import annotations

import asyncio
import time

import numpy as np
from numpy.typing import NDArray

from ... import Copier, copy_to_host
from ...testing import DeviceArray
from .. import _raw
from .._heartbeat import Heartbeat
from ._machine import Machine
from ._measure import GAP, RATE, steps
from ._registry import LINK, Figure, Skipped, case

__all__ = [
    "ENGINE",
    "GROWTH",
    "HELD",
    "LONG",
    "MEDIUM_BESIDE_LONG",
    "PROCESSOR",
    "STEP",
    "SUBMIT_BULK",
    "TWO_DEVICES",
]

SUBMIT_BULK = "submission of a pageable bulk copy"
GROWTH = "bulk to host, new array, the pool grows"
LONG = "a copy sixteen times as long, pageable"
ENGINE = "the engine while a copy waits behind a kernel"
TWO_DEVICES = "bulk to host, pageable, two devices at once"

STEP = "on the loop's thread, until it waits"
MEDIUM_BESIDE_LONG = "until 16 MiB submitted meanwhile are there"
HELD = "staging memory held at most"
PROCESSOR = "processor time"


_Side = tuple[_raw.Stream, DeviceArray, NDArray[np.uint8], NDArray[np.uint8]]


@case(SUBMIT_BULK)
async def submit_bulk(machine: Machine) -> list[Figure]:
    device, host = machine.device, machine.pageable
    first, all_steps = [], []
    for _ in range(4):
        times: list[float] = []
        await asyncio.sleep(0)
        await steps(copy_to_host(device, host, stream=machine.stream), times)
        first.append(times[0])
        all_steps.append(sum(times))
    return [
        Figure(STEP, np.array(first), "µs"),
        Figure("on the loop's thread, all of it", np.array(all_steps), "µs"),
    ]


@case(GROWTH)
async def growth(machine: Machine) -> list[Figure]:
    # A limit gives the copier a pool of its own, which is empty.
    async with Copier(pinned_limit_nbytes=2 * machine.bulk_nbytes) as copier:
        async with Heartbeat() as beat:
            begin = time.perf_counter()
            array = await copier.copy_to_host(machine.device, stream=machine.stream)
            seconds = time.perf_counter() - begin
        del array
    return [Figure(GAP, beat.longest * 1e3, "ms"), Figure("growth and copy", seconds * 1e3, "ms")]


@case(GROWTH, by=LINK)
async def idle(machine: Machine) -> list[Figure]:
    return [Figure(GAP, await machine.idle_gap(0.3) * 1e3, "ms")]


@case(LONG, warm=False)
async def long_copy(machine: Machine) -> list[Figure]:
    """One batch whose destinations are one array, again and again: nobody reads what arrives."""
    nbytes, rounds = machine.bulk_nbytes, machine.long_nbytes // machine.bulk_nbytes
    sources = np.full(rounds, machine.device.ptr, np.uint64)
    targets = np.full(rounds, machine.pageable.ctypes.data, np.uint64)
    medium_nbytes = nbytes // 64
    medium = DeviceArray((medium_nbytes,), np.uint8)
    target = np.ones(medium_nbytes, np.uint8)
    held = 0
    times: list[float] = []
    async with Copier() as copier:
        async with Heartbeat() as beat:
            begin = time.perf_counter()
            task = asyncio.create_task(copier.copy_batch(machine.other_stream, sources, targets, sizes=nbytes))
            await asyncio.sleep(0.02 if not machine.emulated else 0.001)
            while not task.done():
                begun = time.perf_counter()
                await copier.copy_to_host(medium, target, stream=machine.stream)
                if task.done() and times:
                    break
                times.append((time.perf_counter() - begun) * 1e3)
                held = max(held, copier.stats().slots_held_nbytes)
                await asyncio.sleep(0.01)
            await task
            seconds = time.perf_counter() - begin
        held = max(held, copier.stats().slots_held_nbytes)
    return [
        Figure(RATE, machine.long_nbytes / seconds / 1e9, "GB/s"),
        Figure(GAP, beat.longest * 1e3, "ms"),
        Figure(MEDIUM_BESIDE_LONG, np.array(times), "ms"),
        Figure(HELD, held / (1 << 20), "MiB"),
    ]


@case(LONG, by=LINK)
async def link_beside_long(machine: Machine) -> list[Figure]:
    rate, gap = await machine.link(to_host=True), await machine.idle_gap(0.3)
    return [Figure(RATE, rate / 1e9, "GB/s"), Figure(GAP, gap * 1e3, "ms")]


@case(ENGINE, warm=False, at_most=1)
async def engine_while_waiting(machine: Machine) -> list[Figure]:
    # The engine is to have been started, and what it did last is to be over.
    await copy_to_host(machine.small, machine.small_pinned, stream=machine.stream)
    await asyncio.sleep(0.05)
    machine.spin(machine.long_kernel_seconds)
    before, begin = machine.engine_seconds(), time.perf_counter()
    await copy_to_host(machine.device[:4096], machine.pageable[:4096], stream=machine.stream)
    after, seconds = machine.engine_seconds(), time.perf_counter() - begin
    if before is None or after is None:
        raise Skipped("no thread of this process is called aiocuda-engine")
    return [Figure(PROCESSOR, (after - before) / seconds * 100, "% of a core")]


@case(TWO_DEVICES)
async def two_devices(machine: Machine) -> list[Figure]:
    sides = _two(machine)
    async with Heartbeat() as beat:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for stream, device, host, _ in sides:
                group.create_task(copy_to_host(device, host, stream=stream))
        seconds = time.perf_counter() - begin
    nbytes = len(sides) * machine.bulk_nbytes
    return [Figure(RATE, nbytes / seconds / 1e9, "GB/s"), Figure(GAP, beat.longest * 1e3, "ms")]


@case(TWO_DEVICES, by=LINK)
async def two_links(machine: Machine) -> list[Figure]:
    """The two links one after the other, their rates added up."""
    total = 0.0
    for stream, device, _, pinned in _two(machine):
        total += await asyncio.to_thread(
            _raw.copy_at_link_speed, stream, pinned.ctypes.data, device.ptr, machine.bulk_nbytes, to_host=True
        )
    machine.stream.make_current()
    return [Figure(RATE, total / 1e9, "GB/s"), Figure(GAP, await machine.idle_gap() * 1e3, "ms")]


def _two(machine: Machine) -> list[_Side]:
    if machine.devices < 2:
        raise Skipped("there is one device")
    return [
        (machine.stream, machine.device, machine.pageable, machine.pinned),
        (machine.second_stream, machine.second_device, machine.second_pageable, machine.pinned),
    ]
