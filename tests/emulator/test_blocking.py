"""What makes a driver call wait, and who is on record for it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from aiocuda_copy.testing import Wait


def _fill(emulated_gpu, cu, in_thread, stream, entries):
    """Enqueues until the calling thread would block; returns how many calls went through."""
    accepted = 0

    def work():
        nonlocal accepted
        for entry in entries:
            entry()
            accepted += 1

    thread = in_thread(work)
    emulated_gpu.wait_for_waiting_threads()
    count = accepted
    assert not thread.done
    assert Wait(thread.thread_id, emulated_gpu.waits()[-1].entry_point, "full queue") in emulated_gpu.waits()
    emulated_gpu.release()
    thread.join()
    cu.cuStreamSynchronize(stream)
    return count


@pytest.fixture
def stalled(emulated_gpu, cu):
    """A stream behind a kernel that does not end, with something to copy."""
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    return stream, device, int(host)


def test_a_stream_takes_1021_entries(emulated_gpu, cu, in_thread, stalled):
    stream, device, host = stalled
    copies = [lambda: cu.cuMemcpyAsync(host, device, 4, stream)] * 2000
    assert _fill(emulated_gpu, cu, in_thread, stream, copies) == 1021


def test_a_stream_takes_510_copies_with_flags(emulated_gpu, cu, in_thread, stalled):
    stream, device, host = stalled
    pair = [
        lambda: cu.cuMemcpyAsync(host, device, 4, stream),
        lambda: cu.cuStreamWriteValue32(stream, host, 1, 0),
    ]
    assert _fill(emulated_gpu, cu, in_thread, stream, pair * 1000) // 2 == 510


def test_a_stream_takes_56_copies_with_host_functions(emulated_gpu, cu, in_thread, stalled):
    stream, device, host = stalled
    function = cu.host_function(lambda: None)
    pair = [
        lambda: cu.cuMemcpyAsync(host, device, 4, stream),
        lambda: cu.cuLaunchHostFunc(stream, function, 0),
    ]
    assert _fill(emulated_gpu, cu, in_thread, stream, pair * 100) // 2 == 56


def test_sparse_host_functions_leave_more_room(emulated_gpu, cu, in_thread, stalled):
    stream, device, host = stalled
    function = cu.host_function(lambda: None)
    entries = []
    for index in range(2000):
        entries.append(lambda: cu.cuMemcpyAsync(host, device, 4, stream))
        if index % 16 == 15:
            entries.append(lambda: cu.cuLaunchHostFunc(stream, function, 0))
    assert _fill(emulated_gpu, cu, in_thread, stream, entries) * 16 // 17 // 16 * 16 == 896


def test_a_context_takes_224_pairs_over_many_streams(emulated_gpu, cu, in_thread):
    emulated_gpu.hold()
    streams = [cu.cuStreamCreate(1) for _ in range(8)]
    device, host = cu.cuMemAlloc(4), int(cu.cuMemHostAlloc(4, 0))
    function = cu.host_function(lambda: None)
    entries = []
    for index in range(600):
        stream = streams[index % 8]
        entries.append(lambda stream=stream: cu.cuMemcpyAsync(host, device, 4, stream))
        entries.append(lambda stream=stream: cu.cuLaunchHostFunc(stream, function, 0))
    assert _fill(emulated_gpu, cu, in_thread, streams[0], entries) // 2 == 224


def test_records_and_bare_host_functions_never_wait(emulated_gpu, cu, stalled):
    stream, _, _ = stalled
    event, function = cu.cuEventCreate(2), cu.host_function(lambda: None)
    for _ in range(8000):
        cu.cuEventRecord(event, stream)
    other = cu.cuStreamCreate(1)
    emulated_gpu.hold(other)
    for _ in range(8000):
        cu.cuLaunchHostFunc(other, function, 0)
    assert emulated_gpu.waits() == []


def test_a_full_stream_leaves_others_alone(emulated_gpu, cu, in_thread, stalled):
    stream, device, host = stalled
    free = cu.cuStreamCreate(1)
    filler = in_thread(lambda: [cu.cuMemcpyAsync(host, device, 4, stream) for _ in range(1100)])
    emulated_gpu.wait_for_waiting_threads()
    cu.cuMemcpyAsync(host, device, 4, free)
    cu.cuStreamSynchronize(free)
    emulated_gpu.release()
    filler.join()


IN_STREAM_ORDER, DURING_CALL, ANY = 1, 2, 3


def _copy_pageable(cu, stream, device, array, towards_host, order):
    """As a single copy if there is no order, else as a batch of one."""
    to, source = (array.ctypes.data, int(device)) if towards_host else (int(device), array.ctypes.data)
    if order is None:
        cu.cuMemcpyAsync(to, source, array.nbytes, stream)
        return
    attributes = cu.api.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.api.CUmemcpySrcAccessOrder(order)
    pointers = [[cu.api.CUdeviceptr(to)], [cu.api.CUdeviceptr(source)]]
    cu.cuMemcpyBatchAsync(*pointers, [array.nbytes], 1, [attributes], [0], 1, stream)


# The largest that was seen not to block is 1 MiB.
LARGE = (1 << 20) + 4


@pytest.mark.parametrize(
    ("towards_host", "order", "nbytes"),
    [
        (True, None, 4),
        (True, DURING_CALL, 4),
        (True, IN_STREAM_ORDER, LARGE),
        (True, ANY, LARGE),
        (False, None, LARGE),
        (False, IN_STREAM_ORDER, 4),
        (False, DURING_CALL, LARGE),
        (False, ANY, LARGE),
    ],
)
def test_pageable_copies_that_block(emulated_gpu, cu, in_thread, towards_host, order, nbytes):
    stream = cu.cuStreamCreate(1)
    device, array = cu.cuMemAlloc(nbytes), np.zeros(nbytes, np.uint8)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    caller = in_thread(lambda: _copy_pageable(cu, stream, device, array, towards_host, order))
    emulated_gpu.wait_for_waiting_threads()
    emulated_gpu.step(stream)
    assert not caller.done
    emulated_gpu.step(stream)
    caller.join()
    call = "cuMemcpyAsync" if order is None else "cuMemcpyBatchAsync"
    assert emulated_gpu.waits() == [Wait(caller.thread_id, call, "pageable copy")]


@pytest.mark.parametrize("order", [None, DURING_CALL, ANY])
def test_small_pageable_copies_to_the_device_read_their_source_at_the_call(emulated_gpu, cu, order):
    stream, nbytes = cu.cuStreamCreate(1), 65536
    device, array = cu.cuMemAlloc(nbytes), np.full(nbytes, 1, np.uint8)
    emulated_gpu.hold(stream)
    _copy_pageable(cu, stream, device, array, False, order)
    array[:] = 2
    assert emulated_gpu.step(stream) == 1
    assert emulated_gpu.read(int(device), nbytes) == b"\1" * nbytes
    assert emulated_gpu.waits() == []


@pytest.mark.parametrize("order", [IN_STREAM_ORDER, ANY])
def test_small_pageable_batches_to_the_host_write_after_the_call(emulated_gpu, cu, order):
    stream = cu.cuStreamCreate(1)
    device, array = cu.cuMemAlloc(4), np.zeros(4, np.uint8)
    emulated_gpu.write(int(device), b"abcd")
    emulated_gpu.hold(stream)
    _copy_pageable(cu, stream, device, array, True, order)
    assert array.tobytes() == b"\0" * 4
    assert emulated_gpu.step(stream) == 1
    assert array.tobytes() == b"abcd"
    assert emulated_gpu.waits() == []


def test_pinned_copies_do_not_block(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    device, array = cu.cuMemAlloc(4096), np.zeros(4096, np.uint8)
    cu.cuMemHostRegister(array.ctypes.data, array.nbytes, 0)
    emulated_gpu.hold(stream)
    cu.cuMemcpyAsync(array.ctypes.data, device, 4096, stream)
    assert emulated_gpu.waits() == []
    emulated_gpu.release()
    cu.cuStreamSynchronize(stream)
    cu.cuMemHostUnregister(array.ctypes.data)


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister"])
def test_pinning_stalls_the_calls_of_other_threads(emulated_gpu, cu, in_thread, call):
    array = np.zeros(4096, np.uint8)
    stream = cu.cuStreamCreate(1)
    context = cu.cuCtxGetCurrent()
    arguments = {
        "cuMemHostAlloc": lambda: (4096, 0),
        "cuMemFreeHost": lambda: (cu.cuMemHostAlloc(4096, 0),),
        "cuMemHostRegister": lambda: (array.ctypes.data, array.nbytes, 0),
        "cuMemHostUnregister": lambda: (cu.cuMemHostRegister(array.ctypes.data, array.nbytes, 0), array.ctypes.data)[
            1:
        ],
    }[call]()
    emulated_gpu.hold_pinning()

    def pin():
        cu.cuCtxSetCurrent(context)
        getattr(cu, call)(*arguments)

    pinner = in_thread(pin)
    emulated_gpu.wait_for_waiting_threads(1)
    other = in_thread(lambda: cu.code("cuStreamGetFlags", stream))
    emulated_gpu.wait_for_waiting_threads(2)
    assert not other.done
    assert cu.code("cuStreamQuery", stream) == 0
    emulated_gpu.release_pinning()
    pinner.join()
    assert other.join() == 0
    assert Wait(other.thread_id, "cuStreamGetFlags", "pinning") in emulated_gpu.waits()
    if call == "cuMemHostRegister":
        cu.cuMemHostUnregister(array.ctypes.data)


@pytest.mark.parametrize("name", ["cuMemFreeHost", "cuMemHostUnregister"])
def test_unpinning_waits_for_a_running_kernel(emulated_gpu, cu, in_thread, name):
    stream = cu.cuStreamCreate(1)
    array = np.zeros(4096, np.uint8)
    if name == "cuMemFreeHost":
        memory = cu.cuMemHostAlloc(4096, 0)
    else:
        memory = array.ctypes.data
        cu.cuMemHostRegister(memory, array.nbytes, 0)
    emulated_gpu.kernel(stream, milliseconds=1e9)
    emulated_gpu.wait_until_begun(stream)
    freeing = in_thread(lambda: getattr(cu, name)(memory))
    emulated_gpu.wait_for_waiting_threads()
    assert emulated_gpu.waits() == [Wait(freeing.thread_id, name, "running kernel")]
    emulated_gpu.reset()
    freeing.join()


def test_synchronising_is_on_record(emulated_gpu, cu, in_thread):
    stream, event = cu.cuStreamCreate(1), cu.cuEventCreate(2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    cu.cuEventRecord(event, stream)
    waiters = [
        in_thread(lambda: cu.cuStreamSynchronize(stream)),
        in_thread(lambda: cu.cuEventSynchronize(event)),
    ]
    emulated_gpu.wait_for_waiting_threads(2)
    emulated_gpu.step(stream, 2)
    for waiter in waiters:
        waiter.join()
    assert {wait.thread_id for wait in emulated_gpu.waits()} == {waiter.thread_id for waiter in waiters}
    assert {wait.reason for wait in emulated_gpu.waits()} == {"synchronize"}
    assert threading.get_native_id() not in {wait.thread_id for wait in emulated_gpu.waits()}
