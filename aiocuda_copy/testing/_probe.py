"""Whether there is a real GPU."""

from __future__ import annotations

import subprocess
import sys

_PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
raise SystemExit(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value)
"""


def real_device_exists() -> bool:
    """Whether the real driver finds a device.

    Asks in a process of its own: a driver that was loaded once, even one that finds no device, keeps the emulated one
    out.
    """
    return subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False).returncode == 0
