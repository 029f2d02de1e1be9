"""What the library is to reach, and the verdicts of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._batches import (
    ADDRESSES,
    ADDRESSES_TO_HOST,
    ADDRESSES_TO_PAGEABLE,
    ANY_SIZES_TO_HOST,
    BLOCKS_TO_DEVICE,
    BLOCKS_TO_HOST,
    BUFFERS_TO_HOST,
    CROPS_TO_HOST,
    LARGE_ON_DEVICE,
    SMALL_ON_DEVICE,
    SMALL_TO_DEVICE,
    SMALL_TO_HOST,
    TIME,
)
from ._beside import BESIDE_CHIP, BESIDE_PINNED, BESIDE_RATE, BESIDE_STAGED
from ._bulk import FROM_PAGEABLE, FROM_PINNED, TO_FRESH, TO_MEDIUM, TO_NEW, TO_PAGEABLE, TO_PINNED
from ._extremes import (
    ENGINE,
    GROWTH,
    HELD,
    LONG,
    MEDIUM_BESIDE_LONG,
    PROCESSOR,
    STEP,
    SUBMIT_BULK,
    TWO_DEVICES,
)
from ._frameworks import BUFFER, CUPY, FRAMEWORKS, TENSOR
from ._latency import AFTER, AFTER_KERNEL, ALONE, CROWD, PARKED, SUBMISSION
from ._loader import BATCH, LARGER, LOADER
from ._measure import AWAIT, EACH, GAP, RATE
from ._offload import (
    BACK,
    CHECKPOINT,
    FROM_FILE,
    OFFLOAD,
    OFFLOAD_BESIDE_READER,
    OFFLOAD_SMALL,
    OUT,
    SLOWED,
    SLOWER,
    TO_FILE,
)
from ._registry import BARE, LINK, OWN
from ._results import Results, Row
from ._server import BLOCKING, HEALTH, SERVER
from ._torch import BESIDE_TORCH, ITEM, QUERY, THREAD

__all__ = ["TARGETS", "Target", "Verdict", "judge"]


@dataclass(frozen=True)
class Target:
    """A statistic of one row, maybe as a multiple of that of another row or as what it is above it."""

    name: str
    workload: str
    metric: str
    statistic: str = "median"
    by: str = OWN
    # Who else, and by which metric; that of the row itself where none is named.
    times: str | None = None
    above: str | None = None
    of_metric: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def other(self) -> str | None:
        return self.times or self.above

    def text(self, unit: str) -> str:
        """The target as people read it."""
        if self.at_least is not None:
            bound = f"at least {self.at_least:g}"
        else:
            bound = "recorded," if self.at_most is None else f"at most {self.at_most:g}"
        if self.times:
            return f"{bound} x {self.times}"
        bound = f"{bound} {unit}".rstrip()
        if self.above:
            return f"{bound} above {'an idle loop' if self.above == LINK else self.above}'s"
        return bound


@dataclass(frozen=True)
class Verdict:
    """What became of a target."""

    target: Target
    measured: float | None
    unit: str
    verdict: str
    # Where it is not judged, or where the number has a story.
    note: str
    # The same figure of each peer, and its ratio to ours.
    peers: dict[str, dict[str, float]]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.target.name,
            "workload": self.target.workload,
            "by": self.target.by,
            "metric": self.target.metric,
            "statistic": self.target.statistic,
            "target": self.target.text(self.unit),
            "at_least": self.target.at_least,
            "at_most": self.target.at_most,
            "relative_to": self.target.other,
            "measured": self.measured,
            "unit": "x" if self.target.times else self.unit,
            "verdict": self.verdict,
            "note": self.note,
            "peers": self.peers,
        }

    def cells(self) -> list[str]:
        unit = "x" if self.target.times else self.unit
        measured = "" if self.measured is None else f"{self.measured:.3g} {unit}"
        return [self.target.name, self.target.text(self.unit), measured, self.verdict, self._best(), self.note]

    def _best(self) -> str:
        """The peer that does best, beside us."""
        if not self.peers:
            return ""
        larger = self.target.at_least is not None
        name = (max if larger else min)(self.peers, key=lambda peer: self.peers[peer]["value"])
        found = self.peers[name]
        return f"{found['value']:.3g} {self.unit}, {found['of_ours']:.3g} x ours: {name}"


def judge(
    results: Results, missing: dict[str, str], *, emulated: bool, wanted: Callable[[str], bool] = lambda _: True
) -> list[Verdict]:
    """A verdict on each target whose workload is wanted; ``missing`` says why a peer could not be measured."""
    why = missing.get("torch", "it needs --peers torch")
    return [_judge(target, results, why, emulated) for target in TARGETS if wanted(target.workload)]


def _judge(target: Target, results: Results, why_missing: str, emulated: bool) -> Verdict:
    row = results.get(target.workload, target.by, target.metric)
    unit = row.unit if row else ""
    other: Row | None = None
    if target.other:
        other = results.get(target.workload, target.other, target.of_metric or target.metric)
    if row is None or (target.other and other is None):
        who = target.by if row is None else target.other or ""
        reasons = [results.failed.get((target.workload, who)), results.skipped.get((target.workload, who))]
        if "torch" in who or target.workload == BESIDE_TORCH:
            reasons.append(why_missing)
        why = next((reason for reason in reasons if reason), f"nothing was measured of {who}")
        return Verdict(target, None, unit, "not measured", why, {})
    measured: float | None = row.statistic(target.statistic)
    if other is not None and target.times:
        measured = row.quotient(other, target.statistic)
    elif other is not None:
        measured = row.statistic(target.statistic) - other.statistic(target.statistic)
    if measured is None:
        return Verdict(target, None, unit, "not measured", f"{target.other} took nothing", {})
    if target.at_least is None and target.at_most is None:
        verdict = "recorded"
    elif emulated:
        verdict = "not judged"
    elif target.at_least is not None:
        verdict = "met" if measured >= target.at_least else "missed"
    else:
        verdict = "met" if measured <= (target.at_most or 0.0) else "missed"
    return Verdict(target, measured, unit, verdict, "; ".join(row.notes), _peers(target, row, results))


def _peers(target: Target, row: Row, results: Results) -> dict[str, dict[str, float]]:
    if not _is_own(target.by):
        return {}
    return {
        found.by: {
            "value": found.statistic(target.statistic),
            "of_ours": found.quotient(row, target.statistic) or 0.0,
        }
        for found in results.rows()
        if found.workload == target.workload and found.metric == target.metric and not _is_own(found.by)
    }


def _is_own(by: str) -> bool:
    return by.startswith(OWN) or by in (LINK, BARE, SLOWER, LARGER)


def _gap(name: str, workload: str, most: float = 1.0) -> Target:
    return Target(f"{name}: the loop's longest gap", workload, GAP, "longest", above=LINK, at_most=most)


def _late(name: str, workload: str, median: float, late: float, **more: Any) -> list[Target]:
    return [
        Target(f"{name}, median", workload, AWAIT, at_most=median, **more),
        Target(f"{name}, 99th percentile", workload, AWAIT, "99th percentile", at_most=late, **more),
    ]


_BULK = (
    ("1 GiB to warm pageable memory", TO_PAGEABLE, 0.93),
    ("1 GiB to fresh memory", TO_FRESH, 0.45),
    ("1 GiB to a new array", TO_NEW, 0.94),
    ("1 GiB to page-locked memory", TO_PINNED, 0.94),
    ("1 GiB from warm pageable memory", FROM_PAGEABLE, 0.88),
    ("64 MiB to warm pageable memory", TO_MEDIUM, 0.75),
    ("two devices at once, to warm pageable memory", TWO_DEVICES, 0.85),
)

# Of the link, which does 55.2 GB/s where these were set.
_BATCHES = (
    ("10,000 blocks of 16 KiB to page-locked memory", BLOCKS_TO_HOST, 0.905),
    ("10,000 addresses of 16 KiB to page-locked memory", ADDRESSES_TO_HOST, 0.905),
    ("10,000 blocks of 4 KiB to page-locked memory", SMALL_TO_HOST, 0.815),
    ("10,000 blocks of 16 KiB from page-locked memory", BLOCKS_TO_DEVICE, 0.87),
    ("10,000 blocks of 4 KiB from page-locked memory", SMALL_TO_DEVICE, 0.797),
    ("10,000 addresses of 16 KiB to pageable memory", ADDRESSES_TO_PAGEABLE, 0.688),
    ("5,000 blocks of any size up to 256 KiB", ANY_SIZES_TO_HOST, 0.8),
    ("256 rectangles of 224 x 224 x 3", CROPS_TO_HOST, 0.7),
)

TARGETS: tuple[Target, ...] = (
    *(Target(name, workload, RATE, times=LINK, at_least=least) for name, workload, least in _BULK),
    *(Target(name, workload, RATE, times=LINK, at_least=least) for name, workload, least in _BATCHES),
    Target("200,000 addresses of 4 KiB on the device", SMALL_ON_DEVICE, RATE, at_least=900.0),
    Target("10,000 addresses of 64 KiB on the device", LARGE_ON_DEVICE, RATE, at_least=1400.0),
    Target("10,000 Buffers of 16 KiB, as addresses and more", BUFFERS_TO_HOST, TIME, above=ADDRESSES, at_most=4.0),
    Target("await of 4 bytes", ALONE, AWAIT, times=ITEM, at_most=0.9),
    Target("await of 4 bytes, inline=False", ALONE, AWAIT, by=PARKED, times=THREAD, at_most=0.35),
    Target("4 bytes behind a kernel of 2 ms", AFTER_KERNEL, AFTER, times=THREAD, at_most=0.33),
    Target("1,000 awaits at once, each", CROWD, EACH, times=BARE, at_most=1.6),
    Target("4 bytes from a torch tensor", FRAMEWORKS, AWAIT, by=TENSOR, above=BUFFER, at_most=3.0),
    Target("4 bytes from a CuPy array", FRAMEWORKS, AWAIT, by=CUPY, above=BUFFER, at_most=3.0),
    *(_gap(name, workload) for name, workload, _ in _BULK),
    *(_gap(name, workload) for name, workload, _ in _BATCHES),
    _gap("200,000 addresses of 4 KiB on the device", SMALL_ON_DEVICE),
    _gap("10,000 addresses of 64 KiB on the device", LARGE_ON_DEVICE),
    _gap("10,000 Buffers of 16 KiB", BUFFERS_TO_HOST, 5.0),
    _gap("1 GiB from page-locked memory", FROM_PINNED),
    _gap("16 GiB to warm pageable memory", LONG),
    _gap("the pool grows by 1 GiB", GROWTH, 30.0),
    Target("submission of 1 GiB, pageable", SUBMIT_BULK, STEP, at_most=50.0),
    *_late("4 bytes beside our staged copies", BESIDE_STAGED, 45.0, 200.0),
    *_late("4 bytes beside our page-locked copies", BESIDE_PINNED, 45.0, 200.0),
    *_late("4 bytes beside torch's page-locked copies", BESIDE_TORCH, 45.0, 200.0),
    *_late("4 bytes beside a kernel that fills the chip", BESIDE_CHIP, 1.0, 1.0, times=THREAD),
    *_late("torch's 4 bytes beside our staged copies", BESIDE_STAGED, 130.0, 300.0, by=QUERY),
    *_late("torch's 4 bytes beside our page-locked copies", BESIDE_PINNED, 130.0, 300.0, by=QUERY),
    Target(
        "our staged copies' rate meanwhile",
        BESIDE_STAGED,
        BESIDE_RATE,
        by=QUERY,
        times=LINK,
        of_metric=RATE,
        at_least=0.92,
    ),
    Target(
        "our page-locked copies' rate meanwhile",
        BESIDE_PINNED,
        BESIDE_RATE,
        by=QUERY,
        times=LINK,
        of_metric=RATE,
        at_least=0.94,
    ),
    Target("a loader's batch beside 1 ms of work", LOADER, BATCH, times=LARGER, at_most=1.05),
    _gap("a loader", LOADER),
    Target("16 MiB while 16 GiB are under way", LONG, MEDIUM_BESIDE_LONG, "longest", at_most=5.0),
    Target("host memory held for 16 GiB", LONG, HELD, "longest", at_most=256.0),
    Target("the engine's processor time behind a kernel", ENGINE, PROCESSOR, at_most=2.0),
    Target("key-value pages out, others come back meanwhile", OFFLOAD, OUT, times=LINK, at_least=0.8),
    Target("key-value pages back, others go out meanwhile", OFFLOAD, BACK, times=LINK, at_least=0.8),
    Target("by how much that slows decoding", OFFLOAD, SLOWED, at_most=5.0),
    Target("pages of 64 KiB out, others come back meanwhile", OFFLOAD_SMALL, OUT, times=LINK),
    Target("pages of 64 KiB back, others go out meanwhile", OFFLOAD_SMALL, BACK, times=LINK),
    Target("by how much that slows decoding", OFFLOAD_SMALL, SLOWED),
    Target("pages out beside a kernel that only reads", OFFLOAD_BESIDE_READER, OUT, times=LINK),
    Target("pages back beside a kernel that only reads", OFFLOAD_BESIDE_READER, BACK, times=LINK),
    Target("by how much that slows the kernel", OFFLOAD_BESIDE_READER, SLOWED),
    Target("a checkpoint to a RAM disk", CHECKPOINT, TO_FILE, times=SLOWER, at_least=0.8),
    Target("a checkpoint from a RAM disk", CHECKPOINT, FROM_FILE, times=SLOWER, at_least=0.8),
    Target("a server's answer beside 64 results", SERVER, HEALTH, "99th percentile", at_most=5.0),
    Target(
        "the same, beside copies that block the loop",
        SERVER,
        HEALTH,
        "99th percentile",
        times=BLOCKING,
        at_most=0.05,
    ),
    Target("a completed await", ALONE, AWAIT, times=BARE),
    Target("a completed await, inline=False", ALONE, AWAIT, by=PARKED, times=BARE),
    Target("a submission", SUBMISSION, "its first step", times=BARE),
)
