"""Whether small copies may finish inside the call at all in this process."""

from __future__ import annotations

import os

__all__ = ["inline_is_sensible"]


def inline_is_sensible() -> bool:
    """False where a copy takes far longer than the microseconds that a call may spin for.

    That is so when every launch is made to wait (``CUDA_LAUNCH_BLOCKING``), under a debugger, and under tools that are
    injected into the driver, such as compute-sanitizer.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return False
    if any(os.environ.get(name) for name in ("CUDA_INJECTION64_PATH", "NV_SANITIZER_INJECTION_PORT_BASE")):
        return False
    return not _traced()


def _traced() -> bool:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status)
    except OSError:
        return False
