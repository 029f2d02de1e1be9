"""``info``: what this machine has, and which paths copies will take on it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .. import __version__, _driver
from .._errors import CudaError
from ._batch_plan import lines as plan_lines
from ._batch_plan import parse_batch, plan
from ._choose import EMULATED_NOTICE
from ._host import limits

__all__ = ["collect", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Prints the report; the exit status is 1 where there is no usable driver, 2 for what is no batch."""
    try:
        batch = None if arguments.batch is None else parse_batch(arguments.batch)
    except ValueError as exc:
        print(exc, file=sys.stderr)
        return 2
    report = collect(emulated=arguments.emulated)
    if batch is not None and not report["error"]:
        try:
            report["batch"] = plan(batch)
        except (CudaError, MemoryError) as exc:
            print(f"there is no room for the batch: {exc}", file=sys.stderr)
            return 1
    if arguments.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        _print(report)
    return 1 if report["error"] else 0


def collect(*, emulated: bool) -> dict[str, Any]:
    """The report, ready for JSON."""
    report: dict[str, Any] = {
        "aiocuda_copy": __version__,
        "emulated": emulated,
        "cuda": None,
        "devices": [],
        "host": limits(),
        "error": None,
    }
    try:
        version = _driver.version()
        report["cuda"] = f"{version // 1000}.{version % 1000 // 10}"
        from . import _raw

        report["devices"] = [_device(device, emulated) for device in range(_raw.device_count())]
        report["paths"] = _paths(version, report)
    except CudaError as exc:
        report["error"] = str(exc)
    return report


def _device(device: int, emulated: bool) -> dict[str, Any]:
    from . import _raw

    def attribute(name: str) -> int | None:
        try:
            return _raw.attribute(name, device)
        except (CudaError, RuntimeError, AttributeError):  # an older driver, or bindings that lack the name
            return None

    return {
        "name": _raw.device_name(device),
        "memory_nbytes": _raw.device_memory(device),
        "compute_capability": f"{attribute('COMPUTE_CAPABILITY_MAJOR')}.{attribute('COMPUTE_CAPABILITY_MINOR')}",
        "copy_engines": attribute("ASYNC_ENGINE_COUNT"),
        "multiprocessors": attribute("MULTIPROCESSOR_COUNT"),
        "integrated": bool(attribute("INTEGRATED")),
        "reads_pageable_memory": bool(attribute("PAGEABLE_MEMORY_ACCESS")),
        "link": None if emulated else _link(*(attribute(f"PCI_{part}_ID") for part in ("DOMAIN", "BUS", "DEVICE"))),
    }


def _link(domain: int | None, bus: int | None, device: int | None) -> dict[str, Any] | None:
    """The device's PCI Express link at its best, as the kernel sees it; a virtual machine may hide it."""
    folder = Path(f"/sys/bus/pci/devices/{domain or 0:04x}:{bus or 0:02x}:{device or 0:02x}.0")
    generations = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
    try:
        speed = (folder / "max_link_speed").read_text().split()[0]
        width = int((folder / "max_link_width").read_text())
    except (OSError, ValueError, IndexError):
        return None
    return {"generation": generations.get(speed), "width": width} if 0 < width <= 32 else None


def _paths(version: int, report: dict[str, Any]) -> dict[str, str]:
    direct = any(device["reads_pageable_memory"] or device["integrated"] for device in report["devices"])
    return {
        "small": "inside the call on an idle stream, through page-locked slots otherwise",
        "page-locked": "by the copy engine, piece by piece",
        "pageable": "through page-locked slots that worker threads fill and empty"
        + ("; this device could read pageable memory itself" if direct else ""),
        "batch": "a kernel for small entries, "
        + ("cuMemcpyBatchAsync" if version >= 12080 else "single copies (the driver has no cuMemcpyBatchAsync)")
        + " for large ones",
    }


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "no limit"
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes // 1024} KiB"


def _print(report: dict[str, Any]) -> None:
    host = report["host"]
    driver = "emulated driver" if report["emulated"] else "driver"
    lines = [
        ("aiocuda_copy", report["aiocuda_copy"]),
        ("system", f"{host['system']}{' (WSL)' if host['wsl'] else ''}, Python {host['python']}"),
        ("CUDA", f"{report['cuda']} ({driver})" if report["cuda"] else f"none: {report['error']}"),
    ]
    for number, device in enumerate(report["devices"]):
        link = device["link"]
        link = f"PCIe {link['generation'] or '?'}.0 x{link['width']}" if link else "link unknown"
        lines.append(
            (
                f"device {number}",
                f"{device['name']}, {_size(device['memory_nbytes'])}, compute capability "
                f"{device['compute_capability']}, {link}, {device['copy_engines']} copy engines",
            )
        )
    quota = host["cgroup_processors"]
    lines += [
        (
            "processors",
            f"{host['processors']}, of which this process may use {host['affinity']}"
            + (f", for the time of {quota:g}" if quota else ""),
        ),
        ("memory", f"{_size(host['memory_nbytes'])}, control group: {_size(host['cgroup_memory_nbytes'])}"),
        ("page-locked", f"RLIMIT_MEMLOCK: {_size(host['memlock_nbytes'])}"),
        (
            "huge pages",
            f"transparent: {host['transparent_huge_pages']}, shared: {host['transparent_huge_pages_shared']}, "
            f"reserved and free: {host['huge_pages_free']}",
        ),
    ]
    lines += [(f"path: {name}", text) for name, text in report.get("paths", {}).items()]
    lines += plan_lines(report["batch"]) if "batch" in report else []
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        print(f"{name:<{width}}  {text}")
    if report["emulated"]:
        print(f"\n{EMULATED_NOTICE}")
