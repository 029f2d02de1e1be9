"""Streams run when they are told to, engines in the order that the hardware has."""

from __future__ import annotations

import threading

import pytest

from .conftest import memory_at


def test_a_held_stream_runs_by_steps(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    emulated_gpu.hold(stream)
    emulated_gpu.write(int(device), b"abcd")
    emulated_gpu.write(int(host), b"----")
    cu.cuMemcpyAsync(int(host), device, 4, stream)
    emulated_gpu.kernel(stream, milliseconds=1e9)
    assert emulated_gpu.pending(stream) == ["copy", "kernel"]
    assert memory_at(int(host), 4).raw == b"----"
    assert emulated_gpu.step(stream) == 1
    assert memory_at(int(host), 4).raw == b"abcd"
    assert emulated_gpu.pending(stream) == ["kernel"]
    assert cu.code("cuStreamQuery", stream) == 600
    assert emulated_gpu.step(stream, 5) == 1
    assert cu.code("cuStreamQuery", stream) == 0


def test_step_stops_at_an_unmet_event(emulated_gpu, cu):
    first, second = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    event = cu.cuEventCreate(2)
    emulated_gpu.hold()
    emulated_gpu.kernel(first)
    cu.cuEventRecord(event, first)
    cu.cuStreamWaitEvent(second, event, 0)
    emulated_gpu.kernel(second)
    assert emulated_gpu.step(second, 2) == 0
    assert emulated_gpu.step(first) == 1
    assert cu.code("cuEventQuery", event) == 600
    assert emulated_gpu.step(first) == 1
    assert cu.code("cuEventQuery", event) == 0
    assert emulated_gpu.step(second, 2) == 2


def test_a_wait_is_for_the_record_before_it(emulated_gpu, cu):
    first, second = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    event = cu.cuEventCreate(2)
    emulated_gpu.hold(first)
    emulated_gpu.kernel(first)
    cu.cuEventRecord(event, first)
    cu.cuStreamWaitEvent(second, event, 0)
    cu.cuEventRecord(event, first)
    emulated_gpu.step(first, 2)
    emulated_gpu.settle()
    assert emulated_gpu.pending(second) == []
    assert cu.code("cuEventQuery", event) == 600


def test_an_event_without_a_time_fires_at_once_in_a_stream_with_nothing_to_do(emulated_gpu, cu):
    legacy, blocking, timed, event = 1, cu.cuStreamCreate(0), cu.cuEventCreate(0), cu.cuEventCreate(2)
    emulated_gpu.hold()
    cu.cuEventRecord(event, blocking)
    assert cu.code("cuEventQuery", event) == 0
    assert emulated_gpu.pending(blocking) == []
    cu.cuEventRecord(timed, blocking)
    assert cu.code("cuEventQuery", timed) == 600
    cu.cuEventRecord(event, legacy)
    assert cu.code("cuEventQuery", event) == 600


def test_release_lets_everything_run(emulated_gpu, cu):
    emulated_gpu.hold()
    stream = cu.cuStreamCreate(1)
    emulated_gpu.kernel(stream)
    emulated_gpu.settle()
    assert emulated_gpu.pending(stream) == ["kernel"]
    emulated_gpu.release(stream)
    emulated_gpu.settle()
    assert emulated_gpu.pending(stream) == []
    emulated_gpu.kernel(stream)
    cu.cuStreamSynchronize(stream)
    emulated_gpu.release()


def _completion_order(emulated_gpu, cu, towards_host):
    """Completion times of three copies in one stream and, queued last, one in another; copies take a while."""
    emulated_gpu.virtual_clock()
    emulated_gpu.throttle(latency_us=1000)
    bulk, tiny = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(64), cu.cuMemHostAlloc(64, 0)
    start = cu.cuEventCreate(0)
    events = [cu.cuEventCreate(0) for _ in range(4)]
    to, source = (int(host), device) if towards_host else (device, int(host))
    emulated_gpu.hold(bulk)
    emulated_gpu.hold(tiny)
    cu.cuEventRecord(start, bulk)
    for event in events[:3]:
        cu.cuMemcpyAsync(to, source, 64, bulk)
        cu.cuEventRecord(event, bulk)
    cu.cuMemcpyAsync(to, source, 64, tiny)
    cu.cuEventRecord(events[3], tiny)
    emulated_gpu.release()
    emulated_gpu.settle()
    return [round(cu.cuEventElapsedTime(start, event)) for event in events]


def test_towards_the_host_the_engine_stays_with_a_stream(emulated_gpu, cu):
    assert _completion_order(emulated_gpu, cu, towards_host=True) == [1, 2, 3, 4]


def test_towards_the_device_streams_take_turns(emulated_gpu, cu):
    assert _completion_order(emulated_gpu, cu, towards_host=False) == [1, 3, 4, 2]


def test_opposite_directions_run_at_once(emulated_gpu, cu):
    emulated_gpu.virtual_clock()
    emulated_gpu.throttle(gigabytes_per_second=1e-6)
    up, down = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(8), cu.cuMemHostAlloc(8, 0)
    start, end = cu.cuEventCreate(0), cu.cuEventCreate(0)
    emulated_gpu.hold()
    cu.cuEventRecord(start, up)
    cu.cuMemcpyAsync(device, int(host), 4, up)
    cu.cuMemcpyAsync(int(host) + 4, int(device) + 4, 4, down)
    cu.cuEventRecord(end, down)
    emulated_gpu.release()
    emulated_gpu.settle()
    assert round(cu.cuEventElapsedTime(start, end)) == 4


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 12), (0, 3), (2, 4)])
def test_a_running_copy_has_poisoned_its_destination(emulated_gpu, cu, offset, nbytes):
    begin_and_end_a_copy(emulated_gpu, cu, offset, nbytes, meanwhile=b"\xe5")


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 8), (4, 4), (2, 2), (3, 1)])
def test_a_number_arrives_at_once(emulated_gpu, cu, offset, nbytes):
    begin_and_end_a_copy(emulated_gpu, cu, offset, nbytes, meanwhile=b"-")


def begin_and_end_a_copy(emulated_gpu, cu, offset, nbytes, meanwhile):
    emulated_gpu.throttle(latency_us=1e9)
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(16), int(cu.cuMemHostAlloc(16, 0)) + offset
    emulated_gpu.write(int(device), b"abcdefghijklmnop")
    emulated_gpu.write(host, b"-" * nbytes)
    cu.cuMemcpyAsync(host, device, nbytes, stream)
    emulated_gpu.wait_until_begun(stream)
    assert emulated_gpu.read(host, nbytes) == meanwhile * nbytes
    emulated_gpu.reset()
    assert emulated_gpu.read(host, nbytes) == b"abcdefghijklmnop"[:nbytes]


def test_legacy_stream_orders_blocking_streams_only(emulated_gpu, cu):
    blocking, free = cu.cuStreamCreate(0), cu.cuStreamCreate(1)
    emulated_gpu.hold(blocking)
    emulated_gpu.kernel(blocking)
    emulated_gpu.kernel(0)
    emulated_gpu.kernel(free)
    emulated_gpu.settle()
    assert emulated_gpu.pending(free) == []
    assert emulated_gpu.pending(0) == ["kernel"]
    later = cu.cuStreamCreate(0)
    emulated_gpu.kernel(later)
    emulated_gpu.settle()
    assert emulated_gpu.pending(later) == ["kernel"]
    emulated_gpu.step(blocking)
    emulated_gpu.settle()
    assert emulated_gpu.pending(0) == emulated_gpu.pending(later) == []


def test_per_thread_streams_are_per_thread(emulated_gpu, cu, in_thread):
    emulated_gpu.hold(2)
    emulated_gpu.kernel(2)
    assert emulated_gpu.pending(2) == ["kernel"]
    context = cu.cuCtxGetCurrent()

    def elsewhere():
        cu.cuCtxSetCurrent(context)
        return emulated_gpu.pending(2), cu.code("cuStreamQuery", 2)

    assert in_thread(elsewhere).join() == ([], 0)
    emulated_gpu.release(2)


def test_kernels_take_their_time_on_the_virtual_clock(emulated_gpu, cu):
    emulated_gpu.virtual_clock()
    stream = cu.cuStreamCreate(1)
    start, end = cu.cuEventCreate(0), cu.cuEventCreate(0)
    cu.cuEventRecord(start, stream)
    emulated_gpu.kernel(stream, milliseconds=3_600_000)
    cu.cuEventRecord(end, stream)
    cu.cuStreamSynchronize(stream)
    assert cu.cuEventElapsedTime(start, end) == 3_600_000


def test_value_write_lands_after_the_copy(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(8, 0)
    emulated_gpu.write(int(device), b"abcd")
    emulated_gpu.write(int(host), b"--------")
    emulated_gpu.hold(stream)
    cu.cuMemcpyAsync(int(host), device, 4, stream)
    cu.cuStreamWriteValue32(stream, int(host) + 4, 0x31323334, 0)
    assert emulated_gpu.step(stream) == 1
    assert memory_at(int(host), 8).raw == b"abcd----"
    emulated_gpu.release(stream)
    flag = memory_at(int(host) + 4, 4)
    while flag.raw == b"----":
        pass
    assert memory_at(int(host), 8).raw == b"abcd4321"


def test_value_wait_holds_the_stream(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    host = cu.cuMemHostAlloc(8, 0)
    emulated_gpu.write(int(host), bytes(8))
    cu.cuStreamWaitValue32(stream, int(host), 5, 0)
    assert cu.code("cuStreamQuery", stream) == 600
    emulated_gpu.write(int(host), (7).to_bytes(4, "little"))
    cu.cuStreamSynchronize(stream)


def test_host_functions_of_a_context_take_turns_and_contexts_do_not_wait_for_each_other(emulated_gpu, cu):
    one, two = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    begun, finish, ran = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        finish.wait(30)
        ran.append("slow")

    cu.launch(one, slow)
    assert begun.wait(30)
    cu.launch(two, lambda: ran.append("same context"))
    other = cu.cuDevicePrimaryCtxRetain(1)
    cu.cuCtxPushCurrent(other)
    foreign = cu.cuStreamCreate(1)
    cu.launch(foreign, lambda: ran.append("other context"))
    cu.cuStreamSynchronize(foreign)
    cu.cuCtxPopCurrent()
    assert ran == ["other context"]
    finish.set()
    cu.cuCtxSynchronize()
    assert ran == ["other context", "slow", "same context"]


def test_copies_go_on_beside_a_host_function(emulated_gpu, cu):
    one, two = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    finish = threading.Event()
    cu.launch(one, lambda: finish.wait(30))
    cu.cuMemcpyAsync(int(host), device, 4, two)
    cu.cuStreamSynchronize(two)
    assert cu.code("cuStreamQuery", one) == 600
    finish.set()
    cu.cuStreamSynchronize(one)


def test_host_functions_may_only_ask_the_driver(cu):
    stream, idle, codes = cu.cuStreamCreate(1), cu.cuStreamCreate(1), []
    event = cu.cuEventCreate(2)

    def call():
        codes.append(cu.code("cuStreamQuery", stream))
        codes.append(cu.code("cuStreamQuery", idle))
        codes.append(cu.code("cuEventQuery", event))
        codes.append(cu.code("cuEventRecord", event, idle))

    cu.launch(stream, call)
    cu.cuStreamSynchronize(stream)
    assert codes == [600, 0, 0, 800]


@pytest.mark.parametrize("queries", [0, 1, 3])
def test_a_value_write_is_seen_before_its_stream_is_done(emulated_gpu, cu, queries):
    stream, host = cu.cuStreamCreate(1), int(cu.cuMemHostAlloc(4, 0))
    if queries != 1:
        emulated_gpu.linger(queries)
    emulated_gpu.hold(stream)
    for _ in range(2):
        cu.cuStreamWriteValue32(stream, host, 7, 0)
        emulated_gpu.step(stream)
        assert emulated_gpu.read(host, 4) == b"\7\0\0\0"
        assert [cu.code("cuStreamQuery", stream) for _ in range(5)] == [600] * queries + [0] * (5 - queries)
    cu.cuStreamWriteValue32(stream, host, 7, 0)
    emulated_gpu.step(stream)
    cu.cuStreamSynchronize(stream)
    assert cu.code("cuStreamQuery", stream) == 0


@pytest.mark.parametrize("flags", [0, 1])
def test_the_legacy_stream_is_busy_with_blocking_streams(emulated_gpu, cu, in_thread, flags):
    stream, legacy = cu.cuStreamCreate(flags), 1
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    assert cu.code("cuStreamQuery", legacy) == (0 if flags else 600)
    emulated_gpu.kernel(legacy)
    assert cu.code("cuStreamQuery", stream) == 600
    emulated_gpu.step(stream)
    cu.cuStreamSynchronize(legacy)
    emulated_gpu.kernel(stream)
    if not flags:
        context = cu.cuCtxGetCurrent()
        waiter = in_thread(lambda: (cu.cuCtxSetCurrent(context), cu.cuStreamSynchronize(legacy)))
        emulated_gpu.wait_for_waiting_threads()
        emulated_gpu.step(stream)
        waiter.join()
    emulated_gpu.hold(legacy)
    emulated_gpu.release(stream)
    emulated_gpu.kernel(legacy)
    emulated_gpu.settle()
    assert cu.code("cuStreamQuery", stream) == 0
