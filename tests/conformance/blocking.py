"""What makes a call wait."""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .gpu import Gpu, TooShort, check, seconds

# Which the emulated driver knows, too.
PTX = (Path(__file__).parents[2] / "_native" / "scatter.ptx").read_bytes() + b"\0"

KIB, MIB = 1 << 10, 1 << 20


def _after_kernel(gpu: Gpu, towards_host: bool, in_order: bool, nbytes: int, call: Callable[[int, Any], object]) -> str:
    """What happens to pageable memory that is copied behind a kernel, judged by whether that has ended."""
    stream, array = gpu.stream(), np.full(nbytes, 1, np.uint8)
    gpu.call("cuMemsetD8", gpu.device, 2 if in_order else 3, nbytes)
    gpu.call("cuCtxSynchronize")
    kernel = gpu.running_kernel(stream)
    if in_order:
        gpu.call("cuMemsetD8Async", gpu.device, 3, nbytes, stream)
    call(array.ctypes.data, stream)
    blocked = kernel.made_wait()
    on_return = set(array[[0, -1]].tolist())
    if not towards_host:
        array[:] = 4
    gpu.call("cuStreamSynchronize", stream)
    if not towards_host:
        gpu.call("cuMemcpyDtoH", array.ctypes.data, gpu.device, nbytes)
    arrived = {True: {3: "later"}, False: {1: "read at the call", 4: "read later"}}[towards_host]
    found = set(array[[0, -1]].tolist())
    outcome = arrived.get(found.pop(), "wrong") if len(found) == 1 else "mixed"
    if blocked:
        right = on_return == {3} if towards_host else outcome == "read at the call"
        return "blocked" if right else f"blocked, {outcome}"
    return "at once" if towards_host and on_return == {3} else outcome


@check
def pageable_copies(gpu: Gpu) -> dict[str, dict[str, str]]:
    sizes = [64 * KIB, 64 * KIB + 4] if gpu.quick else [4 * KIB, 64 * KIB, 64 * KIB + 4, MIB]
    outcomes: dict[str, dict[str, str]] = {}

    def try_it(towards_host: bool, order: int, count: int, nbytes: int) -> str:
        def entry(address: int, start: int, end: int) -> tuple[int, int, int]:
            to, source = (address, gpu.device) if towards_host else (gpu.device, address)
            return to + start, source + start, end - start

        def call(address: int, stream: Any) -> None:
            if not order:
                gpu.call("cuMemcpyAsync", *entry(address, 0, nbytes), stream)
                return
            cuts = [nbytes // count * index for index in range(count)] + [nbytes]
            entries = [entry(address, *ends) for ends in pairwise(cuts)]
            assert gpu.batch(stream, entries, order=order) == 0

        return _after_kernel(gpu, towards_host, order < 2, nbytes, call)

    for towards_host, direction in ((True, "to host"), (False, "to device")):
        outcomes[direction] = {str(nbytes): try_it(towards_host, 0, 1, nbytes) for nbytes in sizes}
        for order in (1, 2, 3):
            for count in [1] if gpu.quick else [1, 16]:
                key = f"batch of {count} {direction}, order {order}"
                chosen = sizes[:1] if gpu.quick else sizes
                outcomes[key] = {str(nbytes): try_it(towards_host, order, count, nbytes) for nbytes in chosen}
    return outcomes


@check
def pinned_copies_block(gpu: Gpu) -> dict[str, bool]:
    blocked = {}
    for towards_host in (True, False):
        stream = gpu.stream()
        kernel = gpu.running_kernel(stream)
        gpu.copy(stream, MIB, towards_host)
        blocked["to host" if towards_host else "to device"] = kernel.made_wait()
        gpu.call("cuStreamSynchronize", stream)
    return blocked


def _enqueues(gpu: Gpu) -> dict[str, Callable[[Any], object]]:
    """What can be put into a stream."""
    event, function = gpu.event(), gpu.function(lambda: None)
    return {
        "event record": lambda stream: gpu.call("cuEventRecord", event, stream),
        "event wait": lambda stream: gpu.call("cuStreamWaitEvent", stream, event, 0),
        "query": lambda stream: gpu.code("cuStreamQuery", stream),
        "flag": lambda stream: gpu.call("cuStreamWriteValue32", stream, gpu.host + 64, 1, 0),
        "copy": gpu.copy,
        "large copy": lambda stream: gpu.copy(stream, MIB),
        "large copy to the device": lambda stream: gpu.copy(stream, MIB, towards_host=False),
        "copy to the device": lambda stream: gpu.copy(stream, towards_host=False),
        "kernel": lambda stream: gpu.kernel(stream, 0.001),
        "host function": lambda stream: gpu.call("cuLaunchHostFunc", stream, function, 0),
    }


class _Filling:
    """A thread that enqueues behind running kernels, one in each of some streams in turn, until a call waits."""

    def __init__(
        self, gpu: Gpu, streams: list[Any], calls: list[Callable[[Any], object]], most: int, milliseconds: int
    ):
        self._gpu, self._streams, self._calls, self._most = gpu, streams, calls, most
        for stream in streams:
            gpu.kernel(stream, milliseconds * gpu.patience)
        self.count = 0
        self._thread = threading.Thread(target=self._fill)
        self._thread.start()
        self.accepted = -1
        while gpu.is_blocked(self._thread, 0.1) and self.accepted != self.count:
            self.accepted = self.count
        self.accepted = self.count

    def _fill(self) -> None:
        self._gpu.call("cuCtxSetCurrent", self._gpu.context)
        while self.count < self._most:
            stream = self._streams[self.count % len(self._streams)]
            for call in self._calls:
                call(stream)
            self.count += 1

    def must_be_blocked(self) -> None:
        if not self._thread.is_alive() or self.count != self.accepted:
            self.end()
            raise TooShort

    def end(self) -> None:
        self._thread.join()
        self._gpu.call("cuCtxSynchronize")


@check
def what_a_stream_takes(gpu: Gpu) -> dict[str, int | str]:
    """How many entries are accepted behind a kernel before a call blocks until that ends."""
    enqueues = _enqueues(gpu)
    streams = [gpu.stream() for _ in range(16)]

    def accepted(names: list[str], most: int, n_streams: int = 1) -> int | str:
        calls = [enqueues[name] for name in names]
        filling = _Filling(gpu, streams[:n_streams], calls, most, 400 if gpu.quick else 600)
        if filling.accepted == most:
            filling.end()
            return "all"
        filling.must_be_blocked()
        filling.end()
        return filling.accepted

    taken = {
        "copies": accepted(["copy"], 3000),
        "pairs of copy and flag": accepted(["copy", "flag"], 1500),
        "pairs of copy and host function": accepted(["copy", "host function"], 300),
        "pairs over eight streams": accepted(["copy", "host function"], 800, 8),
        "event records": accepted(["event record"], 4000 if gpu.quick else 50000),
    }
    if gpu.quick:
        return taken
    sparse = accepted(["copy"] * 16 + ["host function"], 120)
    return taken | {
        "copies over eight streams": accepted(["copy"], 9000, 8),
        "large copies over eight streams": accepted(["large copy"], 9000, 8),
        "copies to the device over sixteen streams": accepted(["copy to the device"], 9000, 16),
        "large copies to the device over sixteen streams": accepted(["large copy to the device"], 9000, 16),
        "kernels": accepted(["kernel"], 3000),
        "kernels over sixteen streams": accepted(["kernel"], 9000, 16),
        "flags": accepted(["flag"], 3000),
        "pairs of kernel and host function": accepted(["kernel", "host function"], 300),
        "pairs of kernel and host function over sixteen streams": accepted(["kernel", "host function"], 800, 16),
        "copies with a host function every 16": sparse if isinstance(sparse, str) else sparse * 16,
        "host functions": accepted(["host function"], 8000),
    }


@check
def what_waits_beside_full_streams(gpu: Gpu) -> dict[str, list[str]]:
    """Calls on idle streams, one after another, while a thread is blocked on one that is full."""
    enqueues = _enqueues(gpu)
    streams, idle = [gpu.stream() for _ in range(8)], {name: gpu.stream() for name in enqueues}

    def waiting(names: list[str], n_streams: int) -> list[str]:
        filling = _Filling(gpu, streams[:n_streams], [enqueues[name] for name in names], 9000, 400)
        returned: list[str] = []

        def enqueue(name: str) -> None:
            gpu.call("cuCtxSetCurrent", gpu.context)
            enqueues[name](idle[name])
            returned.append(name)

        threads = [threading.Thread(target=enqueue, args=(name,)) for name in enqueues]
        for thread in threads:
            thread.start()
            gpu.is_blocked(thread, 0.02)
        seen = set(returned)
        try:
            filling.must_be_blocked()
        finally:
            filling.end()
            for thread in threads:
                thread.join()
        return [name for name in enqueues if name not in seen]

    found = {
        "a stream of copies": waiting(["copy"], 1),
        "eight streams of copies and host functions": waiting(["copy", "host function"], 8),
    }
    if gpu.quick:
        return found
    return found | {
        "a stream of copies and host functions": waiting(["copy", "host function"], 1),
        "three streams of copies": waiting(["copy"], 3),
        "four streams of copies": waiting(["copy"], 4),
        "four streams of large copies to the device": waiting(["large copy to the device"], 4),
        "eight streams of copies to the device": waiting(["copy to the device"], 8),
        "a stream of kernels": waiting(["kernel"], 1),
        "eight streams of kernels": waiting(["kernel"], 8),
        "eight streams of kernels and host functions": waiting(["kernel", "host function"], 8),
        "a stream of flags": waiting(["flag"], 1),
    }


class _Beside:
    """Threads that each repeat one call, and how long it takes while something else goes on."""

    def __init__(self, calls: dict[str, Callable[[], int]], gpu: Gpu) -> None:
        self._stop = threading.Event()
        self._durations: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        self._threads = [threading.Thread(target=self._repeat, args=(gpu, *each)) for each in calls.items()]
        for thread in self._threads:
            thread.start()

    def _repeat(self, gpu: Gpu, name: str, call: Callable[[], int]) -> None:
        gpu.call("cuCtxSetCurrent", gpu.context)
        while not self._stop.is_set():
            start = time.perf_counter()
            code = call()
            self._durations[name].append((start, time.perf_counter()))
            assert code in (0, 600), (name, code)
            time.sleep(0.0005)

    def stalled(self, function: Callable[[], object]) -> list[str]:
        """Which calls took at least half of the time that a function takes, and far more than they usually do."""
        time.sleep(0.05)
        start = time.perf_counter()
        function()
        end = time.perf_counter()
        time.sleep(0.05)
        names = []
        for name, durations in self._durations.items():
            usual = statistics.median(done - begun for begun, done in durations)
            longest = max((done - begun for begun, done in durations if begun < end and done > start), default=0.0)
            if longest > max(0.5 * (end - start), 20 * usual):
                names.append(name)
        return names

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@check
def pinning_stalls(gpu: Gpu) -> dict[str, list[str]]:
    """Calls go through ctypes, which holds no GIL meanwhile, whatever the bindings do."""
    nbytes = (1 << 27) if gpu.quick else 1 << 30
    array, stream, idle, event = np.ones(nbytes, np.uint8), gpu.stream(), gpu.stream(), gpu.event()
    gpu.call("cuEventRecord", event, idle)
    pointer, size, unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    handle, quiet, recorded = pointer(int(stream)), pointer(int(idle)), pointer(int(event))
    status, memory_type = ctypes.c_int(), ctypes.c_int()
    attributes = (ctypes.c_int * 1)(2)
    results = (pointer * 1)(ctypes.addressof(memory_type))
    native = {
        name: gpu.native(name)
        for name in (
            "cuStreamQuery",
            "cuEventQuery",
            "cuStreamIsCapturing",
            "cuPointerGetAttributes",
            "cuEventRecord",
            "cuMemcpyDtoHAsync",
            "cuStreamWriteValue32",
            "cuMemHostAlloc",
            "cuMemFreeHost",
            "cuMemHostRegister",
            "cuMemHostUnregister",
        )
    }
    calls: dict[str, Callable[[], int]] = {
        "cuStreamQuery": lambda: native["cuStreamQuery"](quiet),
        "cuEventQuery": lambda: native["cuEventQuery"](recorded),
        "cuStreamIsCapturing": lambda: native["cuStreamIsCapturing"](quiet, ctypes.byref(status)),
        "cuPointerGetAttributes": lambda: native["cuPointerGetAttributes"](
            unsigned(1), attributes, results, pointer(gpu.device)
        ),
        "cuEventRecord": lambda: native["cuEventRecord"](recorded, handle),
        "cuMemcpyDtoHAsync": lambda: native["cuMemcpyDtoHAsync"](
            pointer(gpu.host), pointer(gpu.device), size(4), handle
        ),
        "cuStreamWriteValue32": lambda: native["cuStreamWriteValue32"](
            handle, pointer(gpu.host + 64), unsigned(1), unsigned(0)
        ),
    }
    memory = pointer()
    pins: dict[str, Callable[[], int]] = {
        "cuMemHostAlloc": lambda: native["cuMemHostAlloc"](ctypes.byref(memory), size(nbytes), unsigned(0)),
        "cuMemFreeHost": lambda: native["cuMemFreeHost"](memory),
        "cuMemHostRegister": lambda: native["cuMemHostRegister"](pointer(array.ctypes.data), size(nbytes), unsigned(0)),
        "cuMemHostUnregister": lambda: native["cuMemHostUnregister"](pointer(array.ctypes.data)),
    }
    codes = []
    if gpu.quick:
        gpu.throttle(pinning_ms_per_gib=1600)
    # A thread that wants the GIL back must not wait for the others' turns as long as pinning takes.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    beside = _Beside(calls, gpu)
    try:
        found = {name: beside.stalled(lambda pin=pin: codes.append(pin())) for name, pin in pins.items()}
    finally:
        beside.close()
        gpu.throttle()
        sys.setswitchinterval(interval)
    assert not any(codes), codes
    return found


@check
def waits_for_a_running_kernel(gpu: Gpu) -> dict[str, bool]:
    stream, small, large = gpu.stream(), 4096, 64 * MIB
    arrays = {size: np.ones(size + 4096, np.uint8) for size in (small, large)}
    waits = {}

    def try_it(name: str, call: Callable[[], object], on: Any = stream) -> None:
        gpu.call("cuCtxSynchronize")
        kernel = gpu.running_kernel(on, 80 if gpu.quick else 200)
        call()
        waits[name] = kernel.made_wait()
        gpu.call("cuCtxSynchronize")

    for size, text in ((small, "4 KiB"), (large, "64 MiB")):
        # Both of a heap block and of whole pages: what shares its pages may be treated differently.
        for where, address in (
            ("", arrays[size].ctypes.data),
            (" of whole pages", (arrays[size].ctypes.data + 4095) // 4096 * 4096),
        ):
            for use in ("", ", again", ", used before", ", kernel in the legacy stream"):
                if gpu.quick and (use or where):
                    continue
                gpu.call("cuMemHostRegister", address, size, 0)
                if "used" in use:
                    gpu.call("cuMemcpyAsync", gpu.device, address, 4096, stream)
                on = 1 if "legacy" in use else stream
                name = f"cuMemHostUnregister of {text}{where}{use}"
                try_it(name, lambda address=address: gpu.call("cuMemHostUnregister", address), on)
        memory = gpu.call("cuMemHostAlloc", size, 0)
        try_it(f"cuMemFreeHost of {text}", lambda memory=memory: gpu.call("cuMemFreeHost", memory))
        device = gpu.call("cuMemAlloc", size)
        try_it(f"cuMemFree of {text}", lambda device=device: gpu.call("cuMemFree", device))
        address = arrays[size].ctypes.data
        try_it(
            f"cuMemHostRegister of {text}",
            lambda size=size, address=address: gpu.call("cuMemHostRegister", address, size, 0),
        )
        gpu.call("cuMemHostUnregister", address)
        made: list[Any] = []
        try_it(
            f"cuMemHostAlloc of {text}",
            lambda size=size, made=made: made.append(gpu.call("cuMemHostAlloc", size, 0)),
        )
        gpu.call("cuMemFreeHost", made[0])
    other, event = gpu.stream(), gpu.event()
    for name, argument in (("cuStreamCreate", 1), ("cuStreamDestroy", other), ("cuEventDestroy", event)):
        try_it(name, lambda name=name, argument=argument: gpu.call(name, argument))
    try_it("cuModuleLoadData", lambda: gpu.call("cuModuleLoadData", PTX))
    return waits


@check
def host_functions_of_a_context_take_turns(gpu: Gpu) -> bool:
    streams = gpu.stream(), gpu.stream()
    start = time.perf_counter()
    for stream in streams:
        gpu.launch(stream, lambda: time.sleep(0.1))
    gpu.call("cuCtxSynchronize")
    return time.perf_counter() - start > 0.19


@check
def host_functions_of_two_contexts_take_turns(gpu: Gpu) -> bool:
    context = gpu.second_context()
    here = gpu.stream()
    gpu.call("cuCtxPushCurrent", context)
    there = gpu.stream()
    gpu.call("cuCtxPopCurrent")
    # Each waits for the other, which works only if both run at once.
    both, met = threading.Barrier(2), []

    def meet() -> None:
        try:
            both.wait(0.5)
            met.append(True)
        except threading.BrokenBarrierError:
            pass

    for stream in (here, there):
        gpu.launch(stream, meet)
    gpu.call("cuStreamSynchronize", here)
    gpu.call("cuCtxPushCurrent", context)
    gpu.call("cuStreamSynchronize", there)
    gpu.call("cuCtxPopCurrent")
    gpu.call("cuCtxDestroy", context)
    return not met


@check
def copies_wait_for_host_functions_of_other_streams(gpu: Gpu) -> bool:
    one, two, finish = gpu.stream(), gpu.stream(), threading.Event()
    gpu.launch(one, lambda: finish.wait(1))
    gpu.copy(two)
    duration = seconds(lambda: gpu.call("cuStreamSynchronize", two))
    finish.set()
    gpu.call("cuStreamSynchronize", one)
    return duration > 0.5
