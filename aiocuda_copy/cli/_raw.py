"""The driver's bare calls that the command line needs beside the library: attributes, a stream, a copy, a kernel."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from cuda.bindings import driver

from .._errors import CudaError

__all__ = ["Stream", "attribute", "copy_at_link_speed", "device_count", "device_memory", "device_name", "load_spin"]

# Spins for a number of nanoseconds, so that a stream is busy for as long as a measurement wants. PTX is compiled by the
# driver, for whatever device there is.
_SPIN = b"""
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin(.param .u64 duration)
{
    .reg .pred %again;
    .reg .b64 %duration, %begin, %now, %passed;
    ld.param.u64 %duration, [duration];
    mov.u64 %begin, %globaltimer;
loop:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %again, %passed, %duration;
    @%again bra loop;
    ret;
}
\0"""


def _call(name: str, *arguments: Any) -> Any:
    result, *values = getattr(driver, name)(*arguments)
    if int(result):
        raise CudaError(int(result), getattr(result, "name", str(result)), name)
    return values[0] if len(values) == 1 else values


def device_count() -> int:
    return int(_call("cuDeviceGetCount"))


def device_name(device: int) -> str:
    return bytes(_call("cuDeviceGetName", 256, device)).split(b"\0")[0].decode()


def device_memory(device: int) -> int:
    return int(_call("cuDeviceTotalMem", device))


def attribute(name: str, device: int) -> int:
    """An attribute by the part of its name that follows ``CU_DEVICE_ATTRIBUTE_``."""
    which = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_call("cuDeviceGetAttribute", which, device))


class Stream:
    """A stream of one device's primary context, not ordered with the legacy default stream."""

    def __init__(self, device: int = 0) -> None:
        self._context = _call("cuDevicePrimaryCtxRetain", device)
        self.make_current()
        self.handle = int(_call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def make_current(self) -> None:
        _call("cuCtxSetCurrent", self._context)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        _call("cuStreamSynchronize", self.handle)

    def spin(self, function: Any, seconds: float) -> None:
        """Enqueues the kernel that :func:`load_spin` loaded."""
        parameters = ((int(seconds * 1e9),), (ctypes.c_uint64,))
        _call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, self.handle, parameters, 0)


def load_spin() -> Any:
    """Loads the kernel. Loading waits for running kernels, so it comes before anything that is measured."""
    module = _call("cuModuleLoadData", _SPIN)
    return _call("cuModuleGetFunction", module, b"spin")


def copy_at_link_speed(stream: Stream, host: int, device: int, nbytes: int, *, to_host: bool) -> float:
    """One bare copy of page-locked memory by the driver, and nothing else; returns its bytes per second. Blocks."""
    stream.make_current()
    begin = time.perf_counter()
    if to_host:
        _call("cuMemcpyDtoHAsync", host, device, nbytes, stream.handle)
    else:
        _call("cuMemcpyHtoDAsync", device, host, nbytes, stream.handle)
    stream.synchronize()
    return nbytes / (time.perf_counter() - begin)
