"""What a run says about itself: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["commit", "describe", "versions"]

_DISTRIBUTIONS = (
    "aiocuda-copy",
    "cuda-bindings",
    "cuda-core",
    "numpy",
    "anyio",
    "uvloop",
    "torch",
    "cupy",
    "jax",
    "numba-cuda",
)


def versions() -> dict[str, str]:
    """Of Python and of the packages that take part, as far as they are installed."""
    found = {"python": platform.python_version()}
    # CuPy's wheels are named after the CUDA version.
    for distribution in (*_DISTRIBUTIONS, "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit that is measured, where the package lies in a checkout."""
    root = Path(__file__).resolve().parents[3]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not (root / ".git").exists():
            return None
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def describe(report: dict[str, Any]) -> str:
    """The machine in one line."""
    host, device = report["host"], report["devices"][0]
    return f"{device['name']}, CUDA {report['cuda']}, {host['affinity']} processors, {host['system']}"
