"""Which driver a choice means, and whether there is a real GPU."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

_PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
raise SystemExit(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value)
"""


CHOICES = ("auto", "real", "emulated")


def resolve(choice: str) -> str:
    """Which driver a choice means: "auto" is the real one if it finds a device, else the emulated one."""
    if choice == "auto":
        return "real" if real_device_exists() else "emulated"
    return choice


def from_environment() -> str | None:
    """The driver that ``AIOCUDA_COPY_DRIVER`` means, if it is set.

    Raises
    ------
    ValueError
        If it names none.
    """
    choice = os.environ.get("AIOCUDA_COPY_DRIVER")
    if not choice:
        return None
    if choice not in CHOICES:
        raise ValueError(f"AIOCUDA_COPY_DRIVER must be one of {', '.join(CHOICES)}, not {choice!r}")
    return resolve(choice)


@functools.cache
def real_device_exists() -> bool:
    """Whether the real driver finds a device.

    Asks in a process of its own: a driver that was loaded once, even one that finds no device, keeps the emulated one
    out.
    """
    return subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False).returncode == 0
