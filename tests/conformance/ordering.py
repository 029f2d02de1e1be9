"""What comes after what, and what a query says about it."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from .gpu import LEGACY, PER_THREAD, Gpu, check


@check
def flags_of_value_writes(gpu: Gpu) -> dict[str, Any]:
    stream, flag = gpu.stream(), ctypes.c_uint32.from_address(gpu.host + 64)
    codes = set()
    for value in range(1, 101 if gpu.quick else 301):
        gpu.copy(stream)
        gpu.call("cuStreamWriteValue32", stream, gpu.host + 64, value, 0)
        while flag.value != value:
            pass
        codes.add(gpu.code("cuStreamQuery", stream))
        while code := gpu.code("cuStreamQuery", stream):
            assert code == 600
    return {"may be seen before the stream is done": 600 in codes, "other codes": sorted(codes - {0, 600})}


@check
def value_writes_come_after_the_copy_before(gpu: Gpu) -> bool:
    stream, nbytes = gpu.stream(), 1 << 18
    first, last = gpu.host + 4096, gpu.host + 4096 + nbytes - 4
    flag = ctypes.c_uint32.from_address(gpu.host)
    flag.value = 0
    for value in range(1, 51 if gpu.quick else 1001):
        gpu.call("cuMemsetD32Async", gpu.device, value, nbytes // 4, stream)
        gpu.call("cuMemcpyAsync", gpu.host + 4096, gpu.device, nbytes, stream)
        gpu.call("cuStreamWriteValue32", stream, gpu.host, value, 0)
        while flag.value != value:
            pass
        if any(ctypes.c_uint32.from_address(address).value != value for address in (last, first)):
            return False
    return True


@check
def legacy_stream_waits_for(gpu: Gpu) -> dict[str, bool]:
    waits = {}
    for name, flags in (("blocking", 0), ("non-blocking", 1)):
        kernel = gpu.running_kernel(gpu.stream(flags), 400)
        gpu.copy(LEGACY)
        gpu.call("cuStreamSynchronize", LEGACY)
        waits[name] = kernel.ended
        gpu.call("cuCtxSynchronize")
    kernel = gpu.running_kernel(gpu.stream(0))
    gpu.call("cuStreamSynchronize", LEGACY)
    waits["blocking, with nothing in the legacy stream"] = kernel.made_wait()
    gpu.call("cuCtxSynchronize")
    return waits


@check
def event_of_an_idle_stream(gpu: Gpu) -> dict[str, list[int]]:
    """What an event says at once that is recorded, without a time, in a stream that has nothing to do."""
    seen = {}
    for name, stream in {"legacy": LEGACY, "blocking": gpu.stream(0), "non-blocking": gpu.stream(1)}.items():
        codes, event = set(), gpu.event()
        for _ in range(50):
            gpu.kernel(stream, 0.01)
            gpu.copy(stream)
            gpu.call("cuStreamSynchronize", stream)
            gpu.call("cuEventRecord", event, stream)
            codes.add(gpu.code("cuEventQuery", event))
        seen[name] = sorted(codes)
    return seen


@check
def default_streams(gpu: Gpu) -> dict[str, dict[str, int]]:
    """While one stream is busy: what others say, and what an event says that is recorded in them."""
    streams = {
        "legacy": LEGACY,
        "per-thread": PER_THREAD,
        "blocking": gpu.stream(0),
        "non-blocking": gpu.stream(1),
    }
    seen = {}
    for busy, stream in streams.items():
        codes = {}
        kernel = gpu.running_kernel(stream)
        for name, other in streams.items():
            codes[f"query of {name}"] = gpu.code("cuStreamQuery", other)
        events = {name: gpu.event() for name in streams}
        # The legacy stream comes last: what is recorded in it is waited for by those that follow.
        for name in ("blocking", "non-blocking", "per-thread", "legacy"):
            gpu.call("cuEventRecord", events[name], streams[name])
        time.sleep(0.02)
        for name, event in events.items():
            codes[f"event in {name}"] = gpu.code("cuEventQuery", event)
        kernel.must_go_on()
        gpu.call("cuCtxSynchronize")
        seen[f"{busy} busy"] = codes
    return seen


@check
def small_copy_waits_for_all_bulk_of_its_direction(gpu: Gpu) -> dict[str, bool]:
    nbytes, pieces = (4 if gpu.quick else 16) << 20, 16
    device, host = int(gpu.call("cuMemAlloc", nbytes)), int(gpu.call("cuMemHostAlloc", nbytes, 0))

    def waited(to: int, source: int) -> bool:
        bulk, tiny = gpu.stream(), gpu.stream()
        begun, first, last = gpu.event(), gpu.call("cuEventCreate", 0), gpu.call("cuEventCreate", 0)
        gpu.kernel(bulk, 50)
        for piece in range(pieces):
            gpu.call("cuMemcpyAsync", to, source, nbytes, bulk)
            if piece == 0:
                gpu.call("cuEventRecord", begun, bulk)
        # Else either could be the first when both may begin.
        gpu.call("cuStreamWaitEvent", tiny, begun, 0)
        gpu.call("cuEventRecord", last, bulk)
        gpu.copy(tiny, towards_host=to == host)
        gpu.call("cuEventRecord", first, tiny)
        gpu.call("cuCtxSynchronize")
        return float(gpu.call("cuEventElapsedTime", first, last)) <= 0.5

    # Where other processes use the device as well, their turn may come between the two copies: one attempt in which the
    # small copy did not wait says that it need not.
    result = {
        name: all(waited(to, source) for _ in range(5))
        for name, to, source in (("to host", host, device), ("to device", device, host))
    }
    gpu.call("cuMemFree", device)
    gpu.call("cuMemFreeHost", host)
    return result
