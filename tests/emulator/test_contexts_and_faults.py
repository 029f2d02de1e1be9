"""Contexts, and what is left of one after a fault."""

from __future__ import annotations

import pytest

SUCCESS, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED = 0, 201, 400, 600, 700, 709


def test_work_in_a_stream_does_not_need_its_context(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    own = cu.cuCtxGetCurrent()
    ran = []
    emulated_gpu.hold(stream)
    for context in (cu.cuDevicePrimaryCtxRetain(1), 0):
        cu.cuCtxSetCurrent(context)
        cu.cuMemcpyAsync(int(host), device, 4, stream)
        cu.launch(stream, lambda: ran.append(1))
    assert cu.code("cuStreamQuery", stream) == NOT_READY
    assert emulated_gpu.step(stream, 4) == 4
    assert cu.code("cuStreamQuery", stream) == SUCCESS
    assert int(cu.cuStreamIsCapturing(stream)) == 0
    for handle in (0, 1, 2):
        assert cu.code("cuStreamQuery", handle) == INVALID_CONTEXT
        assert cu.code("cuStreamIsCapturing", handle) == INVALID_CONTEXT
    assert cu.code("cuEventCreate", 2) == INVALID_CONTEXT
    assert cu.code("cuMemAlloc", 4) == INVALID_CONTEXT
    cu.cuCtxSetCurrent(own)
    cu.cuStreamSynchronize(stream)
    assert ran == [1, 1]


def test_an_event_of_another_context_cannot_be_recorded_but_waited_for(cu):
    stream = cu.cuStreamCreate(1)
    cu.cuCtxPushCurrent(cu.cuDevicePrimaryCtxRetain(1))
    event = cu.cuEventCreate(2)
    foreign = cu.cuStreamCreate(1)
    assert cu.code("cuEventRecord", event, stream) == INVALID_HANDLE
    cu.cuEventRecord(event, foreign)
    cu.cuCtxPopCurrent()
    cu.cuStreamWaitEvent(stream, event, 0)
    cu.cuStreamSynchronize(stream)


def test_contexts_of_ones_own(emulated_gpu, cu):
    before = emulated_gpu.live()["contexts"]
    own = cu.cuCtxCreate(None, 0, 1)
    assert int(cu.cuCtxGetDevice()) == 1
    stream, address, event = cu.cuStreamCreate(1), cu.cuMemAlloc(4), cu.cuEventCreate(2)
    cu.cuCtxDestroy(own)
    assert cu.code("cuEventQuery", event) == CONTEXT_IS_DESTROYED
    cu.cuEventDestroy(event)
    assert cu.code("cuEventQuery", event) == INVALID_HANDLE
    assert cu.code("cuStreamQuery", stream) == INVALID_HANDLE
    assert cu.code("cuMemFree", address) == 1
    assert int(cu.cuCtxGetDevice()) == 0
    assert emulated_gpu.live()["contexts"] == before


@pytest.fixture
def faulty(emulated_gpu, cu):
    """Two streams of a context that fails while they have work, and what ran before."""
    first, second = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    event, ran = cu.cuEventCreate(2), []
    emulated_gpu.hold()
    emulated_gpu.kernel(first)
    cu.launch(first, lambda: ran.append(1))
    cu.launch(second, lambda: ran.append(2))
    cu.cuEventRecord(event, second)
    emulated_gpu.fail_operation("kernel", code=ILLEGAL_ADDRESS)
    emulated_gpu.release()
    emulated_gpu.settle()
    return first, second, event, ran


def test_after_a_fault_every_call_returns_it(cu, faulty):
    first, second, event, _ = faulty
    host_function = cu.host_function(lambda: None)
    for name, *arguments in [
        ("cuStreamQuery", first),
        ("cuStreamQuery", second),
        ("cuEventQuery", event),
        ("cuStreamSynchronize", second),
        ("cuEventSynchronize", event),
        ("cuLaunchHostFunc", second, host_function, 0),
        ("cuMemHostAlloc", 64, 0),
        ("cuMemAlloc", 64),
        ("cuStreamCreate", 1),
        ("cuMemcpyAsync", 1, 2, 3, second),
        ("cuCtxSynchronize",),
    ]:
        assert cu.code(name, *arguments) == ILLEGAL_ADDRESS, name
    cu.cuDeviceGetCount()
    cu.cuCtxGetCurrent()


def test_after_a_fault_no_host_function_runs(emulated_gpu, cu, faulty):
    first, second, _, ran = faulty
    assert 1 not in ran
    before = list(ran)
    emulated_gpu.settle()
    assert emulated_gpu.pending(first) == emulated_gpu.pending(second) == []
    assert ran == before


def test_a_fault_wakes_who_waits(emulated_gpu, cu, in_thread):
    stream, event = cu.cuStreamCreate(1), cu.cuEventCreate(2)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    cu.cuEventRecord(event, stream)
    waiters = [
        in_thread(lambda: cu.code("cuStreamSynchronize", stream)),
        in_thread(lambda: cu.code("cuEventSynchronize", event)),
    ]
    emulated_gpu.wait_for_waiting_threads(2)
    emulated_gpu.fault(0, 719)
    assert [waiter.join() for waiter in waiters] == [719, 719]


def test_a_fault_stays_in_its_context(emulated_gpu, cu):
    other = cu.cuDevicePrimaryCtxRetain(1)
    emulated_gpu.fault(0)
    assert cu.code("cuMemAlloc", 4) == ILLEGAL_ADDRESS
    cu.cuCtxPushCurrent(other)
    cu.cuMemAlloc(4)
    cu.cuCtxPopCurrent()


def test_a_running_copy_still_lands_after_a_fault(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    emulated_gpu.write(int(device), b"late")
    emulated_gpu.throttle(latency_us=1e9)
    cu.cuMemcpyAsync(int(host), device, 4, stream)
    emulated_gpu.wait_until_begun(stream)
    emulated_gpu.fault()
    assert cu.code("cuStreamQuery", stream) == ILLEGAL_ADDRESS
    emulated_gpu.reset()
    assert emulated_gpu.read(int(host), 4) == b"late"


def test_reset_heals(emulated_gpu, cu):
    emulated_gpu.fault()
    emulated_gpu.reset()
    stream = cu.cuStreamCreate(1)
    emulated_gpu.kernel(stream)
    cu.cuStreamSynchronize(stream)
