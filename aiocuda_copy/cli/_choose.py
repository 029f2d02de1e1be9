"""Which driver a command uses."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["EMULATED_NOTICE", "choose_driver"]

EMULATED_NOTICE = """\
THIS IS THE EMULATED DRIVER: there is no GPU behind it. It shows that the code works; its figures mean nothing."""

# In a process of its own: a driver that was loaded once, even one that finds no device, keeps the emulated one out.
_PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
raise SystemExit(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value)
"""


def choose_driver(wanted: str) -> bool:
    """Sets the process up for a driver: "real", "emulated" or "auto". Returns whether it is the emulated one."""
    if wanted == "auto" and os.environ.get("AIOCUDA_COPY_DRIVER"):
        wanted = os.environ["AIOCUDA_COPY_DRIVER"]
    if wanted == "auto":
        probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False)
        wanted = "emulated" if probe.returncode else "real"
    if wanted == "real":
        os.environ.pop("AIOCUDA_COPY_DRIVER", None)
        return False
    from ..testing import use_emulated_driver

    use_emulated_driver()
    return True
