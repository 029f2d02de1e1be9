"""What the driver does, observed: one list of checks for a real GPU and for the emulated one.

``python tests/conformance.py [--driver=emulated|real] [CHECK ...]`` prints one JSON object a line, so that the outputs
of the two drivers can be diffed. As a test it compares what it sees with `EXPECTED`: what an H200 with driver 580 did
where that was measured, else what the driver's documentation says. Where the two drivers differ, the emulator is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# Spins for a number of nanoseconds; writes to address 0 if that number is 0.
KERNEL = b"""
.version 6.4
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 nanoseconds)
{
  .reg .u64 %length, %start, %now, %null;
  .reg .pred %more;
  ld.param.u64 %length, [nanoseconds];
  setp.ne.u64 %more, %length, 0;
  @%more bra BEGIN;
  mov.u64 %null, 0;
  st.global.u64 [%null], %length;
BEGIN:
  mov.u64 %start, %globaltimer;
LOOP:
  mov.u64 %now, %globaltimer;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %more, %now, %length;
  @%more bra LOOP;
  ret;
}
\x00"""


class Gpu:
    """Device 0 of whichever driver this process has, with its primary context current."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        from aiocuda_copy import testing

        self.api = driver
        self.emulator = testing.current_emulator()
        self.kept: list[Any] = []
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxSetCurrent", self.context)
        if self.emulator is None:
            module = self.call("cuModuleLoadData", KERNEL)
            self.spin = self.call("cuModuleGetFunction", module, b"spin")
            self.kernel(0, 0.001)
            self.call("cuCtxSynchronize")
        else:
            self.emulator.throttle(gigabytes_per_second=50, pinning_ms_per_gib=200)
        self.device = int(self.call("cuMemAlloc", 1 << 20))
        self.host = int(self.call("cuMemHostAlloc", 1 << 20, 0))

    def code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.api, name)(*arguments)[0])

    def call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.api, name)(*arguments)
        assert int(code) == 0, f"{name}: {code!r}"
        return values[0] if values else None

    def stream(self, flags: int = 1) -> Any:
        return self.call("cuStreamCreate", flags)

    def event(self) -> Any:
        return self.call("cuEventCreate", 2)

    def kernel(self, stream: Any, milliseconds: float) -> None:
        if self.emulator is not None:
            self.emulator.kernel(int(stream), milliseconds)
            return
        length = ctypes.c_uint64(int(milliseconds * 1e6))
        arguments = ((length,), (ctypes.c_uint64,))
        self.call("cuLaunchKernel", self.spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)

    def fault(self, stream: Any) -> None:
        if self.emulator is None:
            self.kernel(stream, 0)
        else:
            self.emulator.fail_operation("kernel", code=700)
            self.kernel(stream, 0)

    def function(self, function: Callable[[], object]) -> Any:
        native = HOST_FUNCTION(lambda _: function())
        self.kept.append(native)
        return self.api.CUhostFn(ctypes.cast(native, ctypes.c_void_p).value)

    def launch(self, stream: Any, function: Callable[[], object]) -> None:
        self.call("cuLaunchHostFunc", stream, self.function(function), 0)

    def copy(self, stream: Any, nbytes: int = 4, towards_host: bool = True) -> None:
        to, source = (self.host, self.device) if towards_host else (self.device, self.host)
        self.call("cuMemcpyAsync", to, source, nbytes, stream)

    def batch(self, stream: Any, entries: list[tuple[int, int, int]], runs: int = 1, order: int = 1) -> int:
        attributes = self.api.CUmemcpyAttributes()
        attributes.srcAccessOrder = self.api.CUmemcpySrcAccessOrder(order)
        pointer = self.api.CUdeviceptr
        to, source = [pointer(entry[0]) for entry in entries], [pointer(entry[1]) for entry in entries]
        sizes = [entry[2] for entry in entries]
        return self.code(
            "cuMemcpyBatchAsync", to, source, sizes, len(sizes), [attributes] * runs, [0] * runs, runs, stream
        )

    def second_context(self) -> Any:
        try:
            context = self.call("cuCtxCreate", None, 0, 0)
        except TypeError:  # cuda.bindings 12
            context = self.call("cuCtxCreate", 0, 0)
        self.call("cuCtxPopCurrent")
        return context


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def on_thread(gpu: Gpu, function: Callable[[], Any]) -> Any:
    """The result of a function on a thread of its own with the same context current."""
    results: list[Any] = []

    def body() -> None:
        gpu.call("cuCtxSetCurrent", gpu.context)
        results.append(function())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return results[0]


def accepted(gpu: Gpu, stream: Any, entries: list[Callable[[], object]], kernels: tuple[Any, ...] = ()) -> int | str:
    """How many entries a stream takes behind a kernel before a call blocks until that ends."""
    for each in kernels or (stream,):
        gpu.kernel(each, 1500)
    count = 0

    def body() -> None:
        nonlocal count
        gpu.call("cuCtxSetCurrent", gpu.context)
        for entry in entries:
            entry()
            count += 1

    thread = threading.Thread(target=body)
    thread.start()
    while True:
        before = count
        thread.join(0.25)
        if count == before:
            break
    result: int | str = count if thread.is_alive() else "all"
    thread.join()
    gpu.call("cuCtxSynchronize")
    return result


CHECKS: dict[str, Callable[[Gpu], Any]] = {}


def check(function: Callable[[Gpu], Any]) -> Callable[[Gpu], Any]:
    CHECKS[function.__name__] = function
    return function


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
    start = time.perf_counter()
    for stream in (here, there):
        gpu.launch(stream, lambda: time.sleep(0.2))
    gpu.call("cuStreamSynchronize", here)
    gpu.call("cuCtxPushCurrent", context)
    gpu.call("cuStreamSynchronize", there)
    gpu.call("cuCtxPopCurrent")
    duration = time.perf_counter() - start
    gpu.call("cuCtxDestroy", context)
    return duration > 0.39


@check
def copies_wait_for_host_functions_of_other_streams(gpu: Gpu) -> bool:
    one, two, finish = gpu.stream(), gpu.stream(), threading.Event()
    gpu.launch(one, lambda: finish.wait(1))
    gpu.copy(two)
    duration = seconds(lambda: gpu.call("cuStreamSynchronize", two))
    finish.set()
    gpu.call("cuStreamSynchronize", one)
    return duration > 0.5


@check
def host_function_that_calls_the_driver(gpu: Gpu) -> list[int]:
    stream, codes = gpu.stream(), []
    gpu.launch(stream, lambda: codes.append(gpu.code("cuStreamQuery", stream)))
    gpu.call("cuStreamSynchronize", stream)
    return codes


@check
def after_a_fault(gpu: Gpu) -> dict[str, Any]:
    first, second, ran = gpu.stream(), gpu.stream(), []
    gpu.kernel(second, 300)
    gpu.launch(second, lambda: ran.append("second"))
    gpu.kernel(first, 50)
    gpu.fault(first)
    gpu.launch(first, lambda: ran.append("first"))
    while gpu.code("cuStreamQuery", first) == 600:
        time.sleep(0.01)
    time.sleep(0.6)
    function = gpu.function(lambda: None)
    return {
        "host functions": ran,
        "cuStreamQuery": [gpu.code("cuStreamQuery", first), gpu.code("cuStreamQuery", second)],
        "cuLaunchHostFunc": gpu.code("cuLaunchHostFunc", second, function, 0),
        "cuMemHostAlloc": gpu.code("cuMemHostAlloc", 4096, 0),
        "cuCtxSynchronize": gpu.code("cuCtxSynchronize"),
    }


@check
def pageable_copies_block(gpu: Gpu) -> dict[str, bool]:
    stream, array = gpu.stream(), np.zeros(4096, np.uint8)
    address = array.ctypes.data
    calls: dict[str, Callable[[], object]] = {
        "to host": lambda: gpu.call("cuMemcpyAsync", address, gpu.device, 4096, stream),
        "to device": lambda: gpu.call("cuMemcpyAsync", gpu.device, address, 4096, stream),
        "pinned": lambda: gpu.copy(stream, 4096),
    }
    for order in (1, 2, 3):
        calls[f"batch to host, order {order}"] = lambda order=order: gpu.batch(
            stream, [(address, gpu.device, 4096)], order=order
        )
    blocked = {}
    for name, call in calls.items():
        gpu.kernel(stream, 200)
        blocked[name] = seconds(call) > 0.1
        gpu.call("cuStreamSynchronize", stream)
    return blocked


@check
def batch_refusals(gpu: Gpu) -> dict[str, int]:
    stream, entry = gpu.stream(), (gpu.host, gpu.device, 4)
    codes = {
        "accepted": gpu.batch(stream, [entry]),
        "legacy stream": gpu.batch(1, [entry]),
        "per-thread stream": gpu.batch(2, [entry]),
        "no attributes": gpu.batch(stream, [entry], runs=0),
        "empty": gpu.batch(stream, []),
        "zero size": gpu.batch(stream, [entry, (gpu.host, gpu.device, 0)]),
        "invalid order": gpu.batch(stream, [entry], order=0),
    }
    gpu.call("cuCtxSynchronize")
    return codes


@check
def without_the_streams_context(gpu: Gpu) -> dict[str, int]:
    stream, other = gpu.stream(), gpu.second_context()
    function = gpu.function(lambda: None)
    codes = {}
    for name, context in (("other", other), ("none", 0)):
        gpu.call("cuCtxSetCurrent", context)
        codes[f"copy, {name}"] = gpu.code("cuMemcpyAsync", gpu.host, gpu.device, 4, stream)
        codes[f"host function, {name}"] = gpu.code("cuLaunchHostFunc", stream, function, 0)
        if context:
            event = gpu.event()
            codes["event of the other recorded here"] = gpu.code("cuEventRecord", event, stream)
    gpu.kernel(stream, 100)
    codes["query of a busy stream, none"] = gpu.code("cuStreamQuery", stream)
    gpu.call("cuCtxSetCurrent", gpu.context)
    gpu.call("cuCtxSynchronize")
    gpu.call("cuCtxSetCurrent", 0)
    codes["query of an idle stream, none"] = gpu.code("cuStreamQuery", stream)
    gpu.call("cuCtxSetCurrent", gpu.context)
    gpu.call("cuCtxDestroy", other)
    return codes


@check
def what_a_stream_takes(gpu: Gpu) -> dict[str, Any]:
    stream, event, function = gpu.stream(), gpu.event(), gpu.function(lambda: None)
    streams = [gpu.stream() for _ in range(8)]

    def copy(to: Any = stream) -> None:
        gpu.copy(to)

    def kernel() -> None:
        gpu.kernel(stream, 0.001)

    def flag() -> None:
        gpu.call("cuStreamWriteValue32", stream, gpu.host, 1, 0)

    def host_function(to: Any = stream) -> None:
        gpu.call("cuLaunchHostFunc", to, function, 0)

    def record() -> None:
        gpu.call("cuEventRecord", event, stream)

    def halved(count: int | str) -> int | str:
        return count if isinstance(count, str) else count // 2

    def spread() -> list[Callable[[], object]]:
        entries: list[Callable[[], object]] = []
        for index in range(800):
            entries += [lambda s=streams[index % 8]: copy(s), lambda s=streams[index % 8]: host_function(s)]
        return entries

    sparse = accepted(gpu, stream, ([copy] * 16 + [host_function]) * 120)
    return {
        "copies": accepted(gpu, stream, [copy] * 3000),
        "kernels": accepted(gpu, stream, [kernel] * 3000),
        "flags": accepted(gpu, stream, [flag] * 3000),
        "pairs of copy and flag": halved(accepted(gpu, stream, [copy, flag] * 1500)),
        "pairs of copy and host function": halved(accepted(gpu, stream, [copy, host_function] * 300)),
        "pairs of kernel and host function": halved(accepted(gpu, stream, [kernel, host_function] * 300)),
        "pairs over eight streams": halved(accepted(gpu, stream, spread(), tuple(streams))),
        "copies with a host function every 16": sparse if isinstance(sparse, str) else sparse // 17 * 16,
        "event records": accepted(gpu, stream, [record] * 8000),
        "host functions": accepted(gpu, stream, [host_function] * 8000),
    }


def _slowest_call_beside(gpu: Gpu, function: Callable[[], object]) -> float:
    stop, stream, slowest = threading.Event(), gpu.stream(), 0.0

    def body() -> None:
        nonlocal slowest
        gpu.call("cuCtxSetCurrent", gpu.context)
        while not stop.is_set():
            slowest = max(slowest, seconds(lambda: gpu.call("cuStreamQuery", stream)))
            time.sleep(0.001)

    thread = threading.Thread(target=body)
    thread.start()
    time.sleep(0.05)
    slowest = 0.0
    function()
    stop.set()
    thread.join()
    return slowest


@check
def pinning_stalls_other_threads(gpu: Gpu) -> dict[str, bool]:
    nbytes, memory = 1 << 30, []
    array = np.ones(nbytes, np.uint8)
    calls: dict[str, Callable[[], object]] = {
        "cuMemHostAlloc": lambda: memory.append(gpu.call("cuMemHostAlloc", nbytes, 0)),
        "cuMemFreeHost": lambda: gpu.call("cuMemFreeHost", memory[0]),
        "cuMemHostRegister": lambda: gpu.call("cuMemHostRegister", array.ctypes.data, nbytes, 0),
        "cuMemHostUnregister": lambda: gpu.call("cuMemHostUnregister", array.ctypes.data),
    }
    return {name: _slowest_call_beside(gpu, call) > 0.008 for name, call in calls.items()}


@check
def waits_for_a_running_kernel(gpu: Gpu) -> dict[str, bool]:
    stream, array = gpu.stream(), np.ones(4096, np.uint8)
    memory = gpu.call("cuMemHostAlloc", 4096, 0)
    gpu.call("cuMemHostRegister", array.ctypes.data, 4096, 0)
    waits = {}
    for name, argument in (("cuMemHostUnregister", array.ctypes.data), ("cuMemFreeHost", memory)):
        gpu.kernel(stream, 300)
        time.sleep(0.05)
        waits[name] = seconds(lambda name=name, argument=argument: gpu.call(name, argument)) > 0.1
        gpu.call("cuStreamSynchronize", stream)
    return waits


@check
def registrations(gpu: Gpu) -> dict[str, Any]:
    array = np.ones(3 * 4096, np.uint8)
    page = (array.ctypes.data + 4095) // 4096 * 4096
    codes: dict[str, Any] = {}
    codes["sharing a page"] = [gpu.code("cuMemHostRegister", page + offset, 1000, 0) for offset in (0, 1000)]
    codes["copy over both"] = gpu.code("cuMemcpyAsync", gpu.device, page, 2000, 2)
    codes["copy within one"] = gpu.code("cuMemcpyAsync", gpu.device, page, 1000, 2)
    codes["overlapping"] = gpu.code("cuMemHostRegister", page + 500, 1000, 0)
    gpu.call("cuStreamSynchronize", 2)
    codes["unregister"] = [gpu.code("cuMemHostUnregister", page + offset) for offset in (0, 1000, 1000)]
    return codes


@check
def during_a_global_capture(gpu: Gpu) -> dict[str, Any]:
    mode, array = gpu.api.CUstreamCaptureMode, np.ones(4096, np.uint8)
    other, event, function = gpu.stream(), gpu.event(), gpu.function(lambda: None)
    calls: dict[str, tuple[Any, ...]] = {
        "cuStreamQuery": (other,),
        "cuEventQuery": (event,),
        "cuMemHostAlloc": (4096, 0),
        "cuMemHostRegister": (array.ctypes.data, 4096, 0),
        "cuMemcpyAsync": (gpu.host, gpu.device, 4, other),
        "cuLaunchHostFunc": (other, function, 0),
    }
    codes = {}
    for relaxed in (False, True):
        for name, arguments in calls.items():
            stream = gpu.stream()
            gpu.call("cuStreamBeginCapture", stream, mode(0))

            def elsewhere(name: str = name, arguments: tuple[Any, ...] = arguments, relaxed: bool = relaxed) -> int:
                if relaxed:
                    gpu.call("cuThreadExchangeStreamCaptureMode", mode(2))
                return gpu.code(name, *arguments)

            code = on_thread(gpu, elsewhere)
            codes[f"{name}{', relaxed' if relaxed else ''}"] = [code, gpu.code("cuStreamEndCapture", stream)]
    gpu.code("cuMemHostUnregister", array.ctypes.data)
    gpu.call("cuCtxSynchronize")
    return codes


@check
def legacy_stream_beside_a_capture(gpu: Gpu) -> dict[str, list[int]]:
    codes = {}
    for name, flags in (("blocking", 0), ("non-blocking", 1)):
        stream = gpu.stream(flags)
        gpu.call("cuStreamBeginCapture", stream, gpu.api.CUstreamCaptureMode(2))
        copy = gpu.code("cuMemcpyAsync", gpu.host, gpu.device, 4, 1)
        codes[name] = [copy, gpu.code("cuStreamEndCapture", stream)]
    return codes


@check
def legacy_stream_waits_for(gpu: Gpu) -> dict[str, bool]:
    waits = {}
    for name, flags in (("blocking", 0), ("non-blocking", 1)):
        gpu.kernel(gpu.stream(flags), 200)
        gpu.copy(1)
        waits[name] = seconds(lambda: gpu.call("cuStreamSynchronize", 1)) > 0.1
        gpu.call("cuCtxSynchronize")
    return waits


@check
def stream_not_done_when_its_flag_is_seen(gpu: Gpu) -> int:
    stream, flag = gpu.stream(), ctypes.c_uint32.from_address(gpu.host + 64)
    early = 0
    for value in range(1, 301):
        gpu.copy(stream)
        gpu.call("cuStreamWriteValue32", stream, gpu.host + 64, value, 0)
        while flag.value != value:
            pass
        early += gpu.code("cuStreamQuery", stream) != 0
    return early


@check
def small_copy_waits_for_all_bulk_of_its_direction(gpu: Gpu) -> dict[str, bool]:
    nbytes, pieces = 16 << 20, 16
    device, host = int(gpu.call("cuMemAlloc", nbytes)), int(gpu.call("cuMemHostAlloc", nbytes, 0))
    result = {}
    for name, to, source in (("to host", host, device), ("to device", device, host)):
        bulk, tiny = gpu.stream(), gpu.stream()
        gate, first, last = gpu.event(), gpu.call("cuEventCreate", 0), gpu.call("cuEventCreate", 0)
        gatekeeper = gpu.stream()
        gpu.kernel(gatekeeper, 100)
        gpu.call("cuEventRecord", gate, gatekeeper)
        for stream in (bulk, tiny):
            gpu.call("cuStreamWaitEvent", stream, gate, 0)
        for _ in range(pieces):
            gpu.call("cuMemcpyAsync", to, source, nbytes, bulk)
        gpu.call("cuEventRecord", last, bulk)
        gpu.copy(tiny, towards_host=name == "to host")
        gpu.call("cuEventRecord", first, tiny)
        gpu.call("cuCtxSynchronize")
        result[name] = float(gpu.call("cuEventElapsedTime", first, last)) <= 0.5
    gpu.call("cuMemFree", device)
    gpu.call("cuMemFreeHost", host)
    return result


EXPECTED: dict[str, Any] = {
    "host_functions_of_a_context_take_turns": True,
    "host_functions_of_two_contexts_take_turns": False,
    "copies_wait_for_host_functions_of_other_streams": False,
    "host_function_that_calls_the_driver": [800],
    "after_a_fault": {
        "host functions": [],
        "cuStreamQuery": [700, 700],
        "cuLaunchHostFunc": 700,
        "cuMemHostAlloc": 700,
        "cuCtxSynchronize": 700,
    },
    "pageable_copies_block": {
        "to host": True,
        "to device": True,
        "pinned": False,
        "batch to host, order 1": True,
        "batch to host, order 2": True,
        "batch to host, order 3": True,
    },
    "batch_refusals": {
        "accepted": 0,
        "legacy stream": 1,
        "per-thread stream": 0,
        "no attributes": 1,
        "empty": 1,
        "zero size": 1,
        "invalid order": 1,
    },
    "without_the_streams_context": {
        "copy, other": 0,
        "host function, other": 0,
        "event of the other recorded here": 400,
        "copy, none": 0,
        "host function, none": 0,
        "query of a busy stream, none": 600,
        "query of an idle stream, none": 600,
    },
    "what_a_stream_takes": {
        "copies": 1021,
        "kernels": 1021,
        "flags": 1021,
        "pairs of copy and flag": 510,
        "pairs of copy and host function": 56,
        "pairs of kernel and host function": 56,
        "pairs over eight streams": 222,
        "copies with a host function every 16": 896,
        "event records": "all",
        "host functions": "all",
    },
    "pinning_stalls_other_threads": {
        "cuMemHostAlloc": True,
        "cuMemFreeHost": True,
        "cuMemHostRegister": True,
        "cuMemHostUnregister": True,
    },
    "waits_for_a_running_kernel": {"cuMemHostUnregister": False, "cuMemFreeHost": True},
    "registrations": {
        "sharing a page": [0, 0],
        "copy over both": 1,
        "copy within one": 0,
        "overlapping": 712,
        "unregister": [0, 0, 713],
    },
    "during_a_global_capture": {
        "cuStreamQuery": [900, 901],
        "cuEventQuery": [900, 901],
        "cuMemHostAlloc": [900, 901],
        "cuMemHostRegister": [900, 901],
        "cuMemcpyAsync": [0, 0],
        "cuLaunchHostFunc": [0, 0],
        "cuStreamQuery, relaxed": [0, 0],
        "cuEventQuery, relaxed": [0, 0],
        "cuMemHostAlloc, relaxed": [0, 0],
        "cuMemHostRegister, relaxed": [0, 0],
        "cuMemcpyAsync, relaxed": [0, 0],
        "cuLaunchHostFunc, relaxed": [0, 0],
    },
    "legacy_stream_beside_a_capture": {"blocking": [906, 901], "non-blocking": [0, 0]},
    "legacy_stream_waits_for": {"blocking": True, "non-blocking": False},
    "stream_not_done_when_its_flag_is_seen": 0,
    "small_copy_waits_for_all_bulk_of_its_direction": {"to host": True, "to device": False},
}


def observe(name: str, driver: str) -> Any:
    """Run one check in a process of its own: some leave the context unusable."""
    command = [sys.executable, __file__, f"--driver={driver}", "--here", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if result.returncode != 0:
        return {"error": result.stderr.strip().splitlines()[-1:]}
    return json.loads(result.stdout)[name]


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(name: str, request: pytest.FixtureRequest) -> None:
    driver = request.config.getoption("--driver") or "emulated"
    assert observe(name, driver) == EXPECTED[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="which checks (default: all)")
    parser.add_argument("--driver", choices=("emulated", "real"), default="emulated")
    parser.add_argument("--here", action="store_true", help="in this process, not each in its own")
    arguments = parser.parse_args()
    if arguments.here and arguments.driver == "emulated":
        from aiocuda_copy import testing

        testing.use_emulated_driver()
    gpu = Gpu() if arguments.here else None
    for name in arguments.checks or CHECKS:
        value = CHECKS[name](gpu) if gpu else observe(name, arguments.driver)
        print(json.dumps({name: value}), flush=True)


if __name__ == "__main__":
    main()
