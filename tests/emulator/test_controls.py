"""The controls that have no test elsewhere."""

from __future__ import annotations

import threading

import pytest

from aiocuda_copy import testing
from aiocuda_copy.testing import Call


def test_the_nth_call_fails_before_it_does_anything(emulated_gpu, cu):
    before = emulated_gpu.live()["device_allocations"]
    emulated_gpu.fail_call("cuMemAlloc", nth=2, code=2)
    assert [cu.code("cuMemAlloc", 4) for _ in range(3)] == [0, 2, 0]
    assert emulated_gpu.live()["device_allocations"] == before + 2


def test_the_nth_operation_fails_when_it_runs(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    emulated_gpu.hold(stream)
    emulated_gpu.fail_operation("kernel", nth=2, code=719)
    for _ in range(3):
        emulated_gpu.kernel(stream)
    assert emulated_gpu.step(stream) == 1
    assert cu.code("cuStreamQuery", stream) == 600
    assert emulated_gpu.step(stream) == 1
    assert cu.code("cuStreamQuery", stream) == 719


def test_a_record_in_an_idle_stream_can_be_made_to_fail(emulated_gpu, cu):
    stream, event = cu.cuStreamCreate(1), cu.cuEventCreate(2)
    emulated_gpu.fail_operation("event_record", code=719)
    cu.cuEventRecord(event, stream)
    emulated_gpu.settle()
    assert cu.code("cuEventQuery", event) == 719


def test_stalled_host_functions_hold_their_streams(emulated_gpu, cu):
    stream, ran = cu.cuStreamCreate(1), []
    emulated_gpu.stall_host_functions()
    cu.launch(stream, lambda: ran.append(1))
    emulated_gpu.kernel(stream)
    emulated_gpu.settle()
    assert ran == []
    assert emulated_gpu.pending(stream) == ["host_function", "kernel"]
    emulated_gpu.resume_host_functions()
    cu.cuStreamSynchronize(stream)
    assert ran == [1]


def test_a_stalled_host_function_ends_a_step(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    emulated_gpu.stall_host_functions()
    emulated_gpu.hold(stream)
    cu.launch(stream, lambda: None)
    emulated_gpu.kernel(stream)
    assert emulated_gpu.step(stream, 2) == 1
    assert emulated_gpu.pending(stream) == ["host_function", "kernel"]


def test_dropped_host_functions_are_skipped(emulated_gpu, cu):
    stream, ran = cu.cuStreamCreate(1), []
    emulated_gpu.drop_host_functions(2)
    for index in range(3):
        cu.launch(stream, lambda index=index: ran.append(index))
    cu.cuStreamSynchronize(stream)
    assert ran == [2]


def test_calls_are_counted_and_logged(emulated_gpu, cu):
    before = emulated_gpu.calls()
    emulated_gpu.call_log(True)
    stream = cu.cuStreamCreate(1)
    cu.code("cuMemFree", 4711)
    emulated_gpu.call_log(False)
    cu.cuStreamQuery(stream)
    thread = threading.get_native_id()
    assert emulated_gpu.logged_calls() == [Call(thread, "cuStreamCreate", 0), Call(thread, "cuMemFree", 1)]
    assert emulated_gpu.calls("cuStreamCreate") == 1
    assert emulated_gpu.calls("cuMemAlloc") == 0
    assert emulated_gpu.calls() == before + 3


def test_live_objects(emulated_gpu, cu):
    before = emulated_gpu.live()
    stream, event, device, host = cu.cuStreamCreate(1), cu.cuEventCreate(2), cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    during = emulated_gpu.live()
    changed = {name for name in before if during[name] != before[name]}
    assert changed == {"streams", "events", "device_allocations", "host_allocations"}
    cu.cuStreamDestroy(stream)
    cu.cuEventDestroy(event)
    cu.cuMemFree(device)
    cu.cuMemFreeHost(host)
    assert emulated_gpu.live() == before


def test_memory_outside_allocations_is_refused(emulated_gpu, cu):
    device = int(cu.cuMemAlloc(4))
    emulated_gpu.write(device, b"1234")
    with pytest.raises(ValueError, match="not inside one allocation"):
        emulated_gpu.read(device, 5)
    with pytest.raises(ValueError, match="not inside one allocation"):
        emulated_gpu.write(device + 1, b"1234")


def test_unknown_streams_are_refused(emulated_gpu):
    for control in (emulated_gpu.hold, emulated_gpu.release, emulated_gpu.step, emulated_gpu.pending):
        with pytest.raises(ValueError, match="no such stream"):
            control(0xDEAD)


@pytest.mark.parametrize("wrong", ["x", None, 1.0, True, object()])
def test_what_is_no_stream_is_refused(emulated_gpu, wrong):
    controls = [emulated_gpu.step, emulated_gpu.pending, emulated_gpu.kernel, emulated_gpu.wait_until_begun]
    if wrong is not None:  # which means all of them
        controls += [emulated_gpu.hold, emulated_gpu.release]
    for control in controls:
        with pytest.raises(TypeError, match="a stream is an int handle or an object with __cuda_stream__ or handle"):
            control(wrong)
    for control in controls:
        with pytest.raises(ValueError, match="no such stream: -1"):
            control(-1)


def test_functions_that_the_driver_does_not_have_are_refused(emulated_gpu, cu):
    for control in (emulated_gpu.fail_call, emulated_gpu.calls):
        with pytest.raises(ValueError, match=r"no entry point 'cuMemcpyBachAsync'.* is 'cuMemcpyBatchAsync'"):
            control("cuMemcpyBachAsync")
        with pytest.raises(ValueError, match="no entry point 'x'"):
            control("x")
    assert emulated_gpu.calls("cuMemcpyBatchAsync") == 0
    assert cu.code("cuMemAlloc", 4) == 0


KINDS = [
    "copy", "memset", "kernel", "host_function", "event_record", "event_wait", "write_value", "wait_value",
    "allocate", "free",
]  # fmt: skip


def test_kinds_that_no_operation_has_are_refused(emulated_gpu):
    for kind in ("x", "Copy", "copy\n", ""):
        with pytest.raises(ValueError, match="kind must be one of " + ", ".join(KINDS)):
            emulated_gpu.fail_operation(kind)
    for kind in KINDS:
        emulated_gpu.fail_operation(kind, nth=1_000_000)


def test_failures_that_never_come_are_refused(emulated_gpu):
    for plan in (
        lambda **how: emulated_gpu.fail_call("cuMemAlloc", **how),
        lambda **how: emulated_gpu.fail_operation("copy", **how),
    ):
        with pytest.raises(ValueError, match="nth counts from 1"):
            plan(nth=0)
        with pytest.raises(ValueError, match="code 0 is success"):
            plan(code=0)


def test_reset_frees_streams_that_wait_for_nothing(emulated_gpu, cu):
    stream, host = cu.cuStreamCreate(1), cu.cuMemHostAlloc(4, 0)
    emulated_gpu.write(int(host), bytes(4))
    cu.cuStreamWaitValue32(stream, int(host), 1, 1)
    emulated_gpu.reset()
    assert emulated_gpu.pending(stream) == []


def test_a_destroyed_stream_finishes_its_work(emulated_gpu, cu):
    stream, ran, done = cu.cuStreamCreate(1), [], threading.Event()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    cu.launch(stream, lambda: (ran.append(1), done.set()))
    cu.cuStreamDestroy(stream)
    assert ran == []
    emulated_gpu.release()
    assert done.wait(30)


def test_there_is_one_emulator(emulated_gpu):
    assert testing.emulated()
    assert testing.current_emulator() is emulated_gpu
    assert testing.use_emulated_driver() is emulated_gpu
    with pytest.raises(RuntimeError, match="other parameters"):
        testing.use_emulated_driver(devices=7)
