"""Whose context it takes, what is refused, and what is left after a fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .gpu import LEGACY, PER_THREAD, Gpu, check, check_alone


@check_alone
def host_function_that_asks_the_driver(gpu: Gpu) -> dict[str, int]:
    """Only queries: the documentation forbids all calls there, and others may deadlock."""
    stream, idle, event, codes = gpu.stream(), gpu.stream(), gpu.event(), {}
    gpu.call("cuEventRecord", event, idle)
    gpu.call("cuCtxSynchronize")

    def ask() -> None:
        codes["cuStreamQuery of its own stream"] = gpu.code("cuStreamQuery", stream)
        codes["cuStreamQuery of an idle stream"] = gpu.code("cuStreamQuery", idle)
        codes["cuEventQuery"] = gpu.code("cuEventQuery", event)
        codes["cuStreamIsCapturing"] = gpu.code("cuStreamIsCapturing", idle)
        codes["cuCtxGetCurrent"] = gpu.code("cuCtxGetCurrent")

    gpu.launch(stream, ask)
    gpu.call("cuStreamSynchronize", stream)
    return codes


@check_alone
def after_a_fault(gpu: Gpu) -> dict[str, Any]:
    first, second, ran = gpu.stream(), gpu.stream(), []
    # The fault comes when all is enqueued, however long that takes, and finds the other kernel running.
    enqueued = threading.Event()
    gpu.launch(first, enqueued.wait)
    gpu.fault(first, nth=2)
    gpu.launch(first, lambda: ran.append("first"))
    gpu.kernel(second, 2000)
    gpu.launch(second, lambda: ran.append("second"))
    enqueued.set()
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
def event_of_a_destroyed_context(gpu: Gpu) -> dict[str, int]:
    context = gpu.second_context()
    gpu.call("cuCtxPushCurrent", context)
    stream, event = gpu.stream(), gpu.event()
    gpu.call("cuEventRecord", event, stream)
    gpu.call("cuStreamSynchronize", stream)
    gpu.call("cuCtxPopCurrent")
    gpu.call("cuCtxDestroy", context)
    return {"cuEventQuery": gpu.code("cuEventQuery", event)}


@check
def batch_refusals(gpu: Gpu) -> dict[str, int]:
    stream, entry = gpu.stream(), (gpu.host, gpu.device, 4)
    codes = {
        "accepted": gpu.batch(stream, [entry]),
        "legacy stream": gpu.batch(LEGACY, [entry]),
        "per-thread stream": gpu.batch(PER_THREAD, [entry]),
        "no attributes": gpu.batch(stream, [entry], runs=0),
        "empty": gpu.batch(stream, []),
        "zero size": gpu.batch(stream, [entry, (gpu.host, gpu.device, 0)]),
        "invalid order": gpu.batch(stream, [entry], order=0),
    }
    gpu.call("cuCtxSynchronize")
    return codes


@check
def another_context_than_the_streams(gpu: Gpu) -> dict[str, int]:
    stream, other = gpu.stream(), gpu.second_context()
    function = gpu.function(lambda: None)
    gpu.call("cuCtxPushCurrent", other)
    event = gpu.event()
    codes = {
        "copy": gpu.code("cuMemcpyAsync", gpu.host, gpu.device, 4, stream),
        "host function": gpu.code("cuLaunchHostFunc", stream, function, 0),
        "its event recorded there": gpu.code("cuEventRecord", event, stream),
    }
    gpu.call("cuCtxPopCurrent")
    gpu.call("cuCtxSynchronize")
    gpu.call("cuCtxDestroy", other)
    return codes


@check
def without_a_context(gpu: Gpu) -> dict[str, int]:
    busy, idle, event = gpu.stream(), gpu.stream(), gpu.event()
    function = gpu.function(lambda: None)
    calls: dict[str, tuple[str, tuple[Any, ...]]] = {
        "cuStreamQuery of a busy stream": ("cuStreamQuery", (busy,)),
        "cuStreamQuery of an idle stream": ("cuStreamQuery", (idle,)),
        "cuStreamIsCapturing": ("cuStreamIsCapturing", (idle,)),
        "cuStreamGetCtx": ("cuStreamGetCtx", (idle,)),
        "cuEventRecord": ("cuEventRecord", (event, busy)),
        "cuEventQuery": ("cuEventQuery", (event,)),
        "cuStreamWaitEvent": ("cuStreamWaitEvent", (idle, event, 0)),
        "cuMemcpyAsync": ("cuMemcpyAsync", (gpu.host, gpu.device, 4, busy)),
        "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync", (gpu.host, gpu.device, 4, busy)),
        "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync", (gpu.device, gpu.host, 4, busy)),
        "cuStreamWriteValue32": ("cuStreamWriteValue32", (busy, gpu.host, 1, 0)),
        "cuLaunchHostFunc": ("cuLaunchHostFunc", (busy, function, 0)),
        "cuEventCreate": ("cuEventCreate", (2,)),
    }
    for name in ("cuStreamQuery", "cuStreamIsCapturing"):
        for handle in (0, LEGACY, PER_THREAD):
            calls[f"{name} of handle {handle}"] = (name, (handle,))

    def ask() -> dict[str, int]:
        return {text: gpu.code(name, *arguments) for text, (name, arguments) in calls.items()}

    kernel = gpu.running_kernel(busy, 200)
    codes = gpu.on_thread(ask, context=False)
    kernel.must_go_on()
    gpu.call("cuCtxSynchronize")
    return codes


@check
def registrations(gpu: Gpu) -> dict[str, Any]:
    array = np.ones(3 * 4096, np.uint8)
    page = (array.ctypes.data + 4095) // 4096 * 4096
    codes: dict[str, Any] = {}
    codes["sharing a page"] = [gpu.code("cuMemHostRegister", page + offset, 1000, 0) for offset in (0, 1000)]
    codes["copy over both"] = gpu.code("cuMemcpyAsync", gpu.device, page, 2000, PER_THREAD)
    codes["copy within one"] = gpu.code("cuMemcpyAsync", gpu.device, page, 1000, PER_THREAD)
    codes["overlapping"] = gpu.code("cuMemHostRegister", page + 500, 1000, 0)
    gpu.call("cuStreamSynchronize", PER_THREAD)
    codes["unregister"] = [gpu.code("cuMemHostUnregister", page + offset) for offset in (0, 1000, 1000)]
    return codes


@check
def during_a_global_capture(gpu: Gpu) -> dict[str, Any]:
    """On another thread: the call's code, and that of ending the capture."""
    mode, array = gpu.api.CUstreamCaptureMode, np.ones(4096, np.uint8)
    other, event, function = gpu.stream(), gpu.event(), gpu.function(lambda: None)
    memory_type = gpu.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    calls: dict[str, tuple[Any, ...]] = {
        "cuStreamQuery": (other,),
        "cuEventQuery": (event,),
        "cuMemAlloc": (4096,),
        "cuMemHostAlloc": (4096, 0),
        "cuMemHostRegister": (array.ctypes.data, 4096, 0),
        "cuMemcpyAsync": (gpu.host, gpu.device, 4, other),
        "cuLaunchHostFunc": (other, function, 0),
        "cuStreamCreate": (1,),
        "cuStreamIsCapturing": (other,),
        "cuStreamGetId": (other,),
        "cuStreamGetCtx": (other,),
        "cuCtxGetCurrent": (),
        "cuCtxPushCurrent": (gpu.call("cuCtxGetCurrent"),),
        "cuDevicePrimaryCtxRetain": (gpu.call("cuCtxGetDevice"),),
        "cuEventCreate": (2,),
        "cuEventRecord": (event, other),
        "cuStreamWaitEvent": (other, event, 0),
        "cuPointerGetAttributes": (1, [memory_type], gpu.device),
    }
    codes = {}
    for relaxed in (False, True):
        for name, arguments in calls.items():
            stream = gpu.stream()
            # What earlier calls enqueued is done, so that a query's answer tells of the capture alone.
            gpu.call("cuStreamSynchronize", other)
            gpu.call("cuStreamBeginCapture", stream, mode(0))

            def elsewhere(name: str = name, arguments: tuple[Any, ...] = arguments, relaxed: bool = relaxed) -> int:
                if relaxed:
                    gpu.call("cuThreadExchangeStreamCaptureMode", mode(2))
                return gpu.code(name, *arguments)

            code = gpu.on_thread(elsewhere)
            codes[f"{name}{', relaxed' if relaxed else ''}"] = [code, gpu.code("cuStreamEndCapture", stream)]
    gpu.code("cuMemHostUnregister", array.ctypes.data)
    gpu.call("cuCtxSynchronize")
    return codes


@check
def questions_of_a_capturing_stream(gpu: Gpu) -> dict[str, list[int]]:
    """What is returned, and whether the capture can still be ended."""
    codes = {}
    for name in ("cuStreamIsCapturing", "cuStreamGetCtx", "cuStreamGetFlags", "cuStreamGetId", "cuStreamQuery"):
        stream = gpu.stream()
        gpu.call("cuStreamBeginCapture", stream, gpu.api.CUstreamCaptureMode(2))
        code = gpu.code(name, stream)
        codes[name] = [code, gpu.code("cuStreamEndCapture", stream)]
    return codes


@check
def legacy_stream_beside_a_capture(gpu: Gpu) -> dict[str, list[int]]:
    """What a call about the legacy stream returns, and whether the capture beside it can be ended."""
    event = gpu.event()
    calls: dict[str, Callable[[], int]] = {
        "copy": lambda: gpu.code("cuMemcpyAsync", gpu.host, gpu.device, 4, LEGACY),
        "cuStreamIsCapturing": lambda: gpu.code("cuStreamIsCapturing", LEGACY),
        "cuStreamQuery": lambda: gpu.code("cuStreamQuery", LEGACY),
        "cuStreamGetId": lambda: gpu.code("cuStreamGetId", LEGACY),
        "cuEventRecord": lambda: gpu.code("cuEventRecord", event, LEGACY),
    }
    codes = {}
    for kind, flags in (("blocking", 0), ("non-blocking", 1)):
        for name, call in calls.items():
            stream = gpu.stream(flags)
            relaxed = gpu.api.CUstreamCaptureMode(2)
            gpu.call("cuStreamBeginCapture", stream, relaxed)
            # A relaxed thread too, so that what is found is about the legacy stream alone.
            previous = gpu.call("cuThreadExchangeStreamCaptureMode", relaxed)
            code = call()
            gpu.call("cuThreadExchangeStreamCaptureMode", previous)
            codes[f"{name}, {kind}"] = [code, gpu.code("cuStreamEndCapture", stream)]
            gpu.call("cuCtxSynchronize")
    return codes
