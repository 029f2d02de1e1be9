"""What the host grants this process: processors, memory, page-locked memory."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["limits"]

_CGROUPS = Path("/sys/fs/cgroup")


def limits() -> dict[str, Any]:
    """The limits that decide how many workers there are and how much can be page-locked; ``None`` is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "wsl": "microsoft" in platform.release().lower(),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "cgroup_processors": _cgroup_processors(),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cgroup_memory_nbytes": _cgroup_memory(),
        "memlock_nbytes": None if soft == resource.RLIM_INFINITY else soft,
        "transparent_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "transparent_huge_pages_shared": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "huge_pages_free": _huge_pages_free(),
    }


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _chosen(path: str) -> str | None:
    """The bracketed word of a file such as ``always [madvise] never``."""
    for word in (_read(path) or "").split():
        if word.startswith("["):
            return word.strip("[]")
    return None


def _huge_pages_free() -> int | None:
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1])
    return None


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of its ancestors, whose limits hold as well."""
    for line in (_read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controllers
        else:
            continue
        group = root / path.lstrip("/")
        while True:
            yield group
            # In a container the path is the host's and what is mounted is the group itself: the walk ends there too.
            if group == root:
                break
            group = group.parent


def _cgroup_processors() -> float | None:
    quotas = []
    for group in _groups("cpu"):
        unified = (_read(group / "cpu.max") or "").split()
        words = unified or [_read(group / "cpu.cfs_quota_us") or "", _read(group / "cpu.cfs_period_us") or ""]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _cgroup_memory() -> int | None:
    found = []
    for group in _groups("memory"):
        word = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        # The first version of control groups says "no limit" with the largest page-aligned number.
        if word and word.isdigit() and int(word) < 1 << 60:
            found.append(int(word))
    return min(found, default=None)
