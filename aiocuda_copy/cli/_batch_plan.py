"""What becomes of a batch: the plan that ``copy_batch`` would make, without the copies."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import Blocks, _driver, _native, copy_batch, pinned_empty
from .._blocks import add_to, plan_blocks
from .._plan import Route
from ..testing import DeviceArray

__all__ = ["SIDES", "Batch", "lines", "parse_batch", "plan"]

SIDES = ("device", "pinned", "pageable")
_ADDRESSES = 1 << 47
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
_ROUTES = {
    Route.TO_HOST_DIRECT: "to page-locked memory",
    Route.TO_HOST_STAGED: "to pageable memory, through slots that worker threads empty",
    Route.TO_DEVICE_DIRECT: "from page-locked memory",
    Route.TO_DEVICE_STAGED: "from pageable memory, through slots that worker threads fill",
    Route.DEVICE_TO_DEVICE: "inside the device",
}


@dataclass(frozen=True)
class Batch:
    """Entries of one size, and the kinds of memory on both sides."""

    count: int
    nbytes: int
    source: str
    destination: str


def parse_batch(text: str) -> Batch:
    """A batch such as ``10000x16KiB:device:pinned``; ``ValueError`` says what is wrong with another text."""
    match = re.fullmatch(r"([0-9]{1,18})x([0-9]{1,18})(KiB|MiB|)(?::(\w+):(\w+))?", text)
    if match is None:
        raise ValueError(
            f"{text!r} is no batch; write COUNTxSIZE[:FROM:TO], such as 10000x16KiB or 10000x16KiB:pinned:device"
        )
    count, size, unit = int(match[1]), int(match[2]), match[3]
    source, destination = match[4] or "device", match[5] or "pinned"
    for side in (source, destination):
        if side not in SIDES:
            raise ValueError(f"{side!r} is no kind of memory; {', '.join(SIDES)} are")
    if "device" not in (source, destination):
        raise ValueError("one side must be the device: copies from host to host need no GPU")
    if count * size * _UNITS[unit] >= _ADDRESSES:
        raise ValueError(f"{text} is more than there are addresses for")
    if not count or not size:
        raise ValueError("a batch has at least one entry of at least one byte")
    return Batch(count, size * _UNITS[unit], source, destination)


def plan(batch: Batch) -> dict[str, Any]:
    """The plan, ready for JSON. Takes memory for both sides, as the batch itself would need."""
    _driver.ensure()
    _load_kernel()
    offsets = np.arange(batch.count, dtype=np.int64) * batch.nbytes
    srcs, dsts = (
        Blocks(_memory(side, batch.count * batch.nbytes), offsets) for side in (batch.source, batch.destination)
    )
    operation = _native.Operation(_native.Quota(slots=1, slot_nbytes=4 << 20, workers=1, host_function_hints=False))
    added = add_to(operation, plan_blocks(srcs, dsts, batch.nbytes), None)
    parts = [
        {
            "route": Route(route).name.lower(),
            "entries": entries,
            "nbytes": nbytes,
            "road": "kernel" if by_kernel else "copy engine",
            "bundled": bundled,
            "piece_nbytes": piece_nbytes,
            "pieces": -(-nbytes // piece_nbytes),
        }
        for route, entries, nbytes, by_kernel, bundled, piece_nbytes in operation.plan(added.device)
    ]
    return {**asdict(batch), "kernel": _native.engine_scatter(added.device)[0], "parts": parts}


def lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """The same for people: names and sentences."""
    found = [("batch", f"{plan['count']} entries of {plan['nbytes']} bytes; the kernel is {plan['kernel']}")]
    for part in plan["parts"]:
        way = _ROUTES[Route[part["route"].upper()]]
        piece = f"{part['pieces']} pieces of at most {part['piece_nbytes'] >> 10} KiB"
        if part["bundled"]:
            piece += ", each of which crosses the link in one copy"
        found.append((f"by the {part['road']}", f"{part['entries']} entries {way}, in about {piece}"))
    return found


def _memory(side: str, nbytes: int) -> Any:
    if side == "device":
        return DeviceArray(nbytes, np.uint8)
    return pinned_empty(nbytes) if side == "pinned" else np.empty(nbytes, np.uint8)


def _load_kernel() -> None:
    """Has the kernel loaded, as the first batch that is for it does."""
    device, host = DeviceArray(128, np.uint8), pinned_empty(128)
    halves = np.array([0, 64])

    async def first_batch() -> None:
        await copy_batch(None, Blocks(device, halves), Blocks(host, halves), sizes=64)

    asyncio.run(first_batch())
    while _native.engine_scatter(device.device)[0] == "loading":
        time.sleep(0.001)
