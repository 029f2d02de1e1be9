"""Stream capture: what invalidates it, and that graphs replay."""

from __future__ import annotations

import pytest

UNSUPPORTED, INVALIDATED, UNJOINED, ISOLATION, IMPLICIT = 900, 901, 904, 905, 906
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


@pytest.fixture
def mode(cu):
    return cu.api.CUstreamCaptureMode


def _status(cu, stream):
    return int(cu.cuStreamIsCapturing(stream))


@pytest.mark.parametrize("call", ["cuStreamQuery", "cuEventQuery", "cuMemHostAlloc", "cuMemHostRegister"])
@pytest.mark.parametrize("relaxed", [False, True])
def test_what_another_thread_may_not_do_during_a_global_capture(emulated_gpu, cu, mode, in_thread, call, relaxed):
    stream, other, event = cu.cuStreamCreate(1), cu.cuStreamCreate(1), cu.cuEventCreate(2)
    buffer, context = bytearray(4096), cu.cuCtxGetCurrent()
    import numpy as np

    array = np.frombuffer(buffer, np.uint8)
    arguments = {
        "cuStreamQuery": (other,),
        "cuEventQuery": (event,),
        "cuMemHostAlloc": (64, 0),
        "cuMemHostRegister": (array.ctypes.data, 64, 0),
    }[call]
    cu.cuStreamBeginCapture(stream, mode(GLOBAL))

    def elsewhere():
        cu.cuCtxSetCurrent(context)
        if relaxed:
            assert int(cu.cuThreadExchangeStreamCaptureMode(mode(RELAXED))) == GLOBAL
        return cu.code(call, *arguments)

    assert in_thread(elsewhere).join() == (0 if relaxed else UNSUPPORTED)
    assert _status(cu, stream) == (1 if relaxed else 2)
    assert cu.code("cuStreamEndCapture", stream) == (0 if relaxed else INVALIDATED)
    assert _status(cu, stream) == 0
    if relaxed and call == "cuMemHostRegister":
        cu.cuMemHostUnregister(array.ctypes.data)


def test_what_another_thread_may_do_during_a_global_capture(cu, mode, in_thread):
    stream, other = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    cu.cuStreamBeginCapture(stream, mode(GLOBAL))

    def elsewhere():
        cu.cuMemcpyAsync(int(host), device, 4, other)
        cu.launch(other, lambda: None)

    in_thread(elsewhere).join()
    cu.cuStreamEndCapture(stream)


@pytest.mark.parametrize(("how", "allowed"), [(THREAD_LOCAL, True), (RELAXED, True), (GLOBAL, False)])
def test_modes_of_a_capture(cu, mode, in_thread, how, allowed):
    stream, other, context = cu.cuStreamCreate(1), cu.cuStreamCreate(1), cu.cuCtxGetCurrent()
    cu.cuStreamBeginCapture(stream, mode(how))

    def query():
        cu.cuCtxSetCurrent(context)
        return cu.code("cuStreamQuery", other)

    assert (in_thread(query).join() == 0) == allowed
    cu.code("cuStreamEndCapture", stream)


def test_the_captured_stream_cannot_be_asked(cu, mode):
    stream = cu.cuStreamCreate(1)
    cu.cuStreamBeginCapture(stream, mode(RELAXED))
    assert cu.code("cuStreamQuery", stream) == UNSUPPORTED
    assert cu.code("cuStreamEndCapture", stream) == INVALIDATED


@pytest.mark.parametrize(("flags", "code"), [(0, IMPLICIT), (1, 0)])
def test_the_legacy_stream_beside_a_capture(cu, mode, flags, code):
    stream = cu.cuStreamCreate(flags)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    cu.cuStreamBeginCapture(stream, mode(RELAXED))
    assert cu.code("cuStreamIsCapturing", 1) == code
    assert cu.code("cuMemcpyAsync", int(host), device, 4, 1) == code
    assert cu.code("cuStreamEndCapture", stream) == (INVALIDATED if code else 0)


def test_a_batch_cannot_be_captured(cu, mode):
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    attributes = cu.api.CUmemcpyAttributes()
    attributes.srcAccessOrder = cu.api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    cu.cuStreamBeginCapture(stream, mode(RELAXED))
    pointers = [device], [cu.api.CUdeviceptr(int(host))]
    assert cu.code("cuMemcpyBatchAsync", *pointers, [4], 1, [attributes], [0], 1, stream) == UNSUPPORTED
    assert cu.code("cuStreamEndCapture", stream) == INVALIDATED


def test_nothing_runs_while_it_is_captured_and_everything_on_each_replay(emulated_gpu, cu, mode):
    stream, ran = cu.cuStreamCreate(1), []
    device, host = cu.cuMemAlloc(4), int(cu.cuMemHostAlloc(4, 0))
    emulated_gpu.write(int(device), b"abcd")
    emulated_gpu.write(host, b"----")
    cu.cuStreamBeginCapture(stream, mode(RELAXED))
    cu.cuMemcpyAsync(host, device, 4, stream)
    cu.launch(stream, lambda: ran.append(emulated_gpu.read(host, 4)))
    graph = cu.cuStreamEndCapture(stream)
    assert emulated_gpu.pending(stream) == []
    types = cu.cuGraphGetNodes(graph, 2)[0]
    assert [int(cu.cuGraphNodeGetType(node)) for node in types] == [1, 3]
    executable = cu.cuGraphInstantiate(graph, 0)
    cu.cuGraphDestroy(graph)
    cu.cuGraphLaunch(executable, stream)
    cu.cuStreamSynchronize(stream)
    emulated_gpu.write(int(device), b"efgh")
    cu.cuGraphLaunch(executable, stream)
    cu.cuStreamSynchronize(stream)
    cu.cuGraphExecDestroy(executable)
    assert ran == [b"abcd", b"efgh"]


def test_a_capture_forks_and_joins_through_events(emulated_gpu, cu, mode):
    first, second = cu.cuStreamCreate(1), cu.cuStreamCreate(1)
    fork, join, ran = cu.cuEventCreate(2), cu.cuEventCreate(2), []
    cu.cuStreamBeginCapture(first, mode(RELAXED))
    cu.launch(first, lambda: ran.append("fork"))
    cu.cuEventRecord(fork, first)
    cu.cuStreamWaitEvent(second, fork, 0)
    assert _status(cu, second) == 1
    cu.launch(second, lambda: ran.append("branch"))
    cu.cuEventRecord(join, second)
    cu.cuStreamWaitEvent(first, join, 0)
    cu.launch(first, lambda: ran.append("join"))
    graph = cu.cuStreamEndCapture(first)
    assert _status(cu, second) == 0
    executable = cu.cuGraphInstantiate(graph, 0)
    cu.cuGraphLaunch(executable, first)
    cu.cuStreamSynchronize(first)
    assert ran == ["fork", "branch", "join"]
    assert cu.code("cuEventQuery", fork) == 907


def test_a_branch_that_does_not_join_is_an_error(cu, mode):
    first, second, event = cu.cuStreamCreate(1), cu.cuStreamCreate(1), cu.cuEventCreate(2)
    cu.cuStreamBeginCapture(first, mode(RELAXED))
    cu.cuEventRecord(event, first)
    cu.cuStreamWaitEvent(second, event, 0)
    cu.launch(second, lambda: None)
    assert cu.code("cuStreamEndCapture", first) == UNJOINED


def test_waiting_for_work_outside_the_capture_is_an_error(cu, mode):
    stream, event = cu.cuStreamCreate(1), cu.cuEventCreate(2)
    cu.cuEventRecord(event, stream)
    cu.cuStreamBeginCapture(stream, mode(RELAXED))
    assert cu.code("cuStreamWaitEvent", stream, event, 0) == ISOLATION
    assert cu.code("cuStreamEndCapture", stream) == INVALIDATED


def test_external_records_are_nodes(emulated_gpu, cu, mode):
    stream, event = cu.cuStreamCreate(1), cu.cuEventCreate(2)
    cu.cuStreamBeginCapture(stream, mode(RELAXED))
    cu.cuEventRecordWithFlags(event, stream, 1)
    executable = cu.cuGraphInstantiate(cu.cuStreamEndCapture(stream), 0)
    emulated_gpu.hold(stream)
    cu.cuGraphLaunch(executable, stream)
    assert cu.code("cuEventQuery", event) == 600
    emulated_gpu.step(stream)
    assert cu.code("cuEventQuery", event) == 0


def test_a_launched_graph_outlives_its_destruction(emulated_gpu, cu, mode):
    stream, freed = cu.cuStreamCreate(1), []
    emulated_gpu.hold(stream)
    cu.cuStreamBeginCapture(stream, mode(RELAXED))
    emulated_gpu.kernel(stream)
    graph = cu.cuStreamEndCapture(stream)
    flags = cu.api.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    owner = cu.cuUserObjectCreate(0, cu.host_function(lambda: freed.append(1)), 1, flags)
    cu.cuGraphRetainUserObject(graph, owner, 1, cu.api.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
    executable = cu.cuGraphInstantiate(graph, 0)
    cu.cuGraphDestroy(graph)
    cu.cuGraphLaunch(executable, stream)
    cu.cuGraphExecDestroy(executable)
    assert emulated_gpu.pending(stream) == ["kernel"]
    assert freed == []
    emulated_gpu.step(stream)
    cu.cuStreamSynchronize(stream)
    emulated_gpu.settle()
    assert freed == [1]
