"""The driver's bare calls that the command line needs beside the library: attributes, a stream, a copy, a kernel."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from cuda.bindings import driver

from .._errors import CudaError

__all__ = [
    "DeviceClock",
    "Kernels",
    "Stream",
    "attribute",
    "copy_at_link_speed",
    "device_count",
    "device_memory",
    "device_name",
]

# PTX is compiled by the driver, for whatever device there is.
#
# spin      keeps each of its blocks busy for a number of nanoseconds.
# spin_then_stamp  does so and writes the device's clock to the fourth word at an address as the last thing it does.
# answer    writes the device's clock to the second word, and the number of the question to the third, each time the
#           host has written the next number to the first. It gives up after some time, so that nothing hangs.
# read      reads a number of 16-byte words, all of its threads together, and does something with all of them.
_KERNELS = b"""
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin(.param .u64 duration)
{
    .reg .pred %again;
    .reg .b64 %duration, %begin, %now, %passed;
    ld.param.u64 %duration, [duration];
    mov.u64 %begin, %globaltimer;
L_loop:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %again, %passed, %duration;
    @%again bra L_loop;
    ret;
}
.visible .entry spin_then_stamp(.param .u64 duration, .param .u64 words)
{
    .reg .pred %again;
    .reg .b64 %duration, %begin, %now, %passed, %words;
    ld.param.u64 %duration, [duration];
    ld.param.u64 %words, [words];
    cvta.to.global.u64 %words, %words;
    mov.u64 %begin, %globaltimer;
L_loop:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %again, %passed, %duration;
    @%again bra L_loop;
    st.volatile.global.u64 [%words+24], %now;
    ret;
}
.visible .entry answer(.param .u64 questions, .param .u64 patience, .param .u64 words)
{
    .reg .pred %yes;
    .reg .b64 %questions, %patience, %words, %begin, %now, %passed, %number, %asked;
    ld.param.u64 %questions, [questions];
    ld.param.u64 %patience, [patience];
    ld.param.u64 %words, [words];
    cvta.to.global.u64 %words, %words;
    mov.u64 %begin, %globaltimer;
    mov.u64 %number, 1;
L_next:
    setp.gt.u64 %yes, %number, %questions;
    @%yes bra L_end;
L_listen:
    ld.volatile.global.u64 %asked, [%words];
    mov.u64 %now, %globaltimer;
    setp.ge.u64 %yes, %asked, %number;
    @%yes bra L_answer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %yes, %passed, %patience;
    @%yes bra L_listen;
    bra L_end;
L_answer:
    st.volatile.global.u64 [%words+8], %now;
    membar.sys;
    st.volatile.global.u64 [%words+16], %number;
    add.u64 %number, %number, 1;
    bra L_next;
L_end:
    ret;
}
.visible .entry read(.param .u64 words, .param .u64 count)
{
    .reg .pred %done;
    .reg .b32 %thread, %threads, %block, %blocks, %a, %b, %c, %d, %sum;
    .reg .b64 %words, %count, %index, %step, %address;
    ld.param.u64 %words, [words];
    ld.param.u64 %count, [count];
    cvta.to.global.u64 %words, %words;
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %thread, %block, %threads, %thread;
    mul.lo.u32 %threads, %threads, %blocks;
    cvt.u64.u32 %index, %thread;
    cvt.u64.u32 %step, %threads;
    mov.u32 %sum, 0;
L_next:
    setp.ge.u64 %done, %index, %count;
    @%done bra L_sum;
    shl.b64 %address, %index, 4;
    add.u64 %address, %words, %address;
    ld.global.v4.u32 {%a, %b, %c, %d}, [%address];
    xor.b32 %a, %a, %b;
    xor.b32 %c, %c, %d;
    xor.b32 %a, %a, %c;
    xor.b32 %sum, %sum, %a;
    add.u64 %index, %index, %step;
    bra L_next;
L_sum:
    setp.ne.u32 %done, %sum, 0x9e3779b9;
    @%done bra L_end;
    st.global.u32 [%words], %sum;
L_end:
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

    def busy(self) -> bool:
        (result,) = driver.cuStreamQuery(self.handle)
        return bool(result == driver.CUresult.CUDA_ERROR_NOT_READY)

    def launch(self, kernel: Any, *parameters: int, blocks: int = 1, threads: int = 1) -> None:
        """Enqueues one of :class:`Kernels`, whose parameters are all 64-bit integers."""
        packed = (parameters, (ctypes.c_uint64,) * len(parameters))
        _call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, self.handle, packed, 0)


class Kernels:
    """The kernels, for the current context. Loading waits for running ones, so it comes before what is measured."""

    def __init__(self) -> None:
        self._module = _call("cuModuleLoadData", _KERNELS)
        self.spin = _call("cuModuleGetFunction", self._module, b"spin")
        self.spin_then_stamp = _call("cuModuleGetFunction", self._module, b"spin_then_stamp")
        self.answer = _call("cuModuleGetFunction", self._module, b"answer")
        self.read = _call("cuModuleGetFunction", self._module, b"read")


_QUESTIONS = 200
_PATIENCE = 2_000_000_000


class DeviceClock:
    """Tells when, on the host's clock, a kernel wrote the device's clock as the last thing it did.

    The two clocks are compared by questions and answers through page-locked memory, before and after what is measured;
    the quickest answer counts. Half its time, about a microsecond, is the error.
    """

    def __init__(self, kernels: Kernels, stream: Stream) -> None:
        self._kernels, self._stream = kernels, stream
        portable_and_mapped = 3
        address = int(_call("cuMemHostAlloc", 4096, portable_and_mapped))
        self._words = (ctypes.c_uint64 * 4).from_address(address)
        self._on_device = int(_call("cuMemHostGetDevicePointer", address, 0))

    def spin_then_stamp(self, stream: Stream, seconds: float) -> None:
        stream.launch(self._kernels.spin_then_stamp, int(seconds * 1e9), self._on_device)

    def stamp(self) -> int:
        """What the last such kernel wrote, on the device's clock."""
        return int(self._words[3])

    def compare(self) -> tuple[int, int, int]:
        """The host's time, the device's at the same moment, and by how much that may be off, in nanoseconds."""
        words = self._words
        words[0] = words[2] = 0
        self._stream.launch(self._kernels.answer, _QUESTIONS, _PATIENCE, self._on_device)
        best = (0, 0, _PATIENCE)
        for number in range(1, _QUESTIONS + 1):
            asked = time.perf_counter_ns()
            words[0] = number
            while words[2] != number:
                if time.perf_counter_ns() - asked > _PATIENCE:
                    raise RuntimeError("the device does not answer when it is asked for its clock")
            error = (time.perf_counter_ns() - asked) // 2
            if error < best[2]:
                best = (asked + error, int(words[1]), error)
        self._stream.synchronize()
        return best


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
