"""What an H200 with driver 580 did."""

from __future__ import annotations

from typing import Any

_SMALL, _LARGE = ("4096", "65536"), ("65540", "1048576")


def _by_size(small: str, large: str) -> dict[str, str]:
    return dict.fromkeys(_SMALL, small) | dict.fromkeys(_LARGE, large)


def _batches(direction: str, order: int, small: str, large: str) -> dict[str, dict[str, str]]:
    return {f"batch of {count} {direction}, order {order}": _by_size(small, large) for count in (1, 16)}


# The sizes are those of the whole batch. Earlier seen: 64 entries of 1 MiB to the host waited with any order. The
# source of an entry of more than 64 KiB is read when the copy runs.
_PAGEABLE = {
    "to host": _by_size("blocked", "blocked"),
    **_batches("to host", 1, "later", "later"),
    **_batches("to host", 2, "blocked", "blocked"),
    **_batches("to host", 3, "later", "later"),
    "to device": _by_size("read at the call", "read at the call"),
    **_batches("to device", 1, "blocked", "blocked"),
    **_batches("to device", 2, "read at the call", "read at the call"),
    **_batches("to device", 3, "read at the call", "read at the call"),
    **{f"batch of 1 to device, order {order}": _by_size("read at the call", "read later") for order in (2, 3)},
}

_STALLED = [
    "cuPointerGetAttributes",
    "cuEventRecord",
    "cuMemcpyDtoHAsync",
    "cuStreamWriteValue32",
]

_WAITS = {
    f"{call} of {size}": waits
    for size in ("4 KiB", "64 MiB")
    for call, waits in (
        ("cuMemHostUnregister", True),
        ("cuMemFreeHost", True),
        ("cuMemFree", True),
        ("cuMemHostRegister", False),
        ("cuMemHostAlloc", False),
    )
} | {
    f"cuMemHostUnregister of {size}{where}{use}": True
    for size in ("4 KiB", "64 MiB")
    for where in ("", " of whole pages")
    for use in ("", ", again", ", used before", ", kernel in the legacy stream")
}

_DEFAULT_STREAMS = {
    f"{busy} busy": {
        **{f"query of {name}": 600 if name in queries else 0 for name in _NAMES},
        **{f"event in {name}": 600 if name in events else 0 for name in _NAMES},
    }
    for _NAMES in [("legacy", "per-thread", "blocking", "non-blocking")]
    for busy, queries, events in (
        ("legacy", {"legacy"}, {"legacy", "per-thread", "blocking"}),
        ("per-thread", {"legacy", "per-thread"}, {"legacy", "per-thread"}),
        ("blocking", {"legacy", "blocking"}, {"legacy", "blocking"}),
        ("non-blocking", {"non-blocking"}, {"non-blocking"}),
    )
}

# To a capture in global mode on another thread.
_HARMFUL = ("cuStreamQuery", "cuEventQuery", "cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister")
_HARMLESS = (
    "cuMemcpyAsync",
    "cuLaunchHostFunc",
    "cuStreamCreate",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuStreamGetCtx",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuPointerGetAttributes",
)

# What goes by the channels to the multiprocessors, and what waits whenever anything does.
_COMPUTE = ["flag", "copy to the device", "kernel", "host function"]

EXPECTED: dict[str, Any] = {
    "pageable_copies": _PAGEABLE,
    "pinned_copies_block": {"to host": False, "to device": False},
    "what_a_stream_takes": {
        "copies": 1021,
        "kernels": 1021,
        "flags": 1021,
        "pairs of copy and flag": 510,
        "pairs of copy and host function": 56,
        "pairs of kernel and host function": 56,
        "pairs over eight streams": 224,
        "copies with a host function every 16": 896,
        "event records": "all",
        "copies over eight streams": 4084,
        "large copies over eight streams": 4084,
        "copies to the device over sixteen streams": 8168,
        "large copies to the device over sixteen streams": 4084,
        "kernels over sixteen streams": 8168,
        "pairs of kernel and host function over sixteen streams": 448,
        "host functions": "all",
    },
    "what_waits_beside_full_streams": {
        "a stream of copies": ["host function"],
        "a stream of copies and host functions": ["host function"],
        "three streams of copies": ["host function"],
        "four streams of copies": ["copy", "large copy", "host function"],
        "eight streams of copies and host functions": ["copy", "large copy", "host function"],
        "four streams of large copies to the device": ["large copy to the device", "host function"],
        "eight streams of copies to the device": _COMPUTE,
        "a stream of kernels": ["host function"],
        "eight streams of kernels": _COMPUTE,
        "eight streams of kernels and host functions": _COMPUTE,
        "a stream of flags": [],
    },
    "pinning_stalls": {
        "cuMemHostAlloc": _STALLED,
        "cuMemFreeHost": _STALLED,
        "cuMemHostRegister": _STALLED,
        "cuMemHostUnregister": _STALLED,
    },
    "waits_for_a_running_kernel": {
        **_WAITS,
        "cuStreamCreate": False,
        "cuStreamDestroy": False,
        "cuEventDestroy": False,
        "cuModuleLoadData": True,
    },
    "host_functions_of_a_context_take_turns": True,
    "host_functions_of_two_contexts_take_turns": False,
    "copies_wait_for_host_functions_of_other_streams": False,
    "host_function_that_asks_the_driver": {
        "cuStreamQuery of its own stream": 600,
        "cuStreamQuery of an idle stream": 0,
        "cuEventQuery": 0,
        "cuStreamIsCapturing": 0,
        "cuCtxGetCurrent": 800,
    },
    "after_a_fault": {
        "host functions": [],
        "cuStreamQuery": [700, 700],
        "cuLaunchHostFunc": 700,
        "cuMemHostAlloc": 700,
        "cuCtxSynchronize": 700,
    },
    "event_of_a_destroyed_context": {"cuEventQuery": 709},
    "batch_refusals": {
        "accepted": 0,
        "legacy stream": 1,
        "per-thread stream": 0,
        "no attributes": 1,
        "empty": 1,
        "zero size": 1,
        "invalid order": 1,
    },
    "another_context_than_the_streams": {"copy": 0, "host function": 0, "its event recorded there": 400},
    "without_a_context": {
        "cuStreamQuery of a busy stream": 600,
        "cuStreamQuery of an idle stream": 0,
        "cuStreamIsCapturing": 0,
        "cuMemcpyAsync": 0,
        "cuMemcpyDtoHAsync": 0,
        "cuStreamWriteValue32": 0,
        "cuLaunchHostFunc": 0,
        "cuEventCreate": 201,
        "cuStreamQuery of handle 0": 201,
        "cuStreamIsCapturing of handle 0": 201,
        "cuStreamGetCtx": 0,
        "cuEventRecord": 0,
        "cuEventQuery": 600,
        "cuStreamWaitEvent": 0,
        "cuMemcpyHtoDAsync": 0,
        "cuStreamQuery of handle 1": 201,
        "cuStreamQuery of handle 2": 201,
        "cuStreamIsCapturing of handle 1": 201,
        "cuStreamIsCapturing of handle 2": 201,
    },
    "registrations": {
        "sharing a page": [0, 0],
        "copy over both": 1,
        "copy within one": 0,
        "overlapping": 712,
        "unregister": [0, 0, 713],
    },
    "during_a_global_capture": {
        **{name: [900, 901] for name in _HARMFUL},
        **{name: [0, 0] for name in _HARMLESS},
        **{f"{name}, relaxed": [0, 0] for name in (*_HARMFUL, *_HARMLESS)},
    },
    "questions_of_a_capturing_stream": {
        "cuStreamIsCapturing": [0, 0],
        "cuStreamGetCtx": [0, 0],
        "cuStreamGetFlags": [900, 901],
        "cuStreamGetId": [900, 901],
        "cuStreamQuery": [900, 901],
    },
    "legacy_stream_beside_a_capture": {
        "copy, blocking": [906, 901],
        "cuStreamIsCapturing, blocking": [906, 0],
        "cuStreamQuery, blocking": [906, 901],
        "cuStreamGetId, blocking": [906, 901],
        "cuEventRecord, blocking": [906, 901],
        "copy, non-blocking": [0, 0],
        "cuStreamIsCapturing, non-blocking": [0, 0],
        "cuStreamQuery, non-blocking": [0, 0],
        "cuStreamGetId, non-blocking": [0, 0],
        "cuEventRecord, non-blocking": [0, 0],
    },
    "legacy_stream_waits_for": {
        "blocking": True,
        "non-blocking": False,
        "blocking, with nothing in the legacy stream": True,
    },
    "default_streams": _DEFAULT_STREAMS,
    "event_of_an_idle_stream": {"legacy": [0], "blocking": [0], "non-blocking": [0]},
    "flags_of_value_writes": {"may be seen before the stream is done": True, "other codes": []},
    "value_writes_come_after_the_copy_before": True,
    "small_copy_waits_for_all_bulk_of_its_direction": {"to host": True, "to device": False},
}
