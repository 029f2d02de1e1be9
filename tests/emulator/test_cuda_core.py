"""cuda.core runs on the emulated driver."""

from __future__ import annotations

import numpy as np
import pytest

core = pytest.importorskip("cuda.core")


@pytest.fixture
def device(cu):
    device = core.Device(0)
    device.set_current()
    return device


@pytest.fixture
def pinned(device):
    resource = core.LegacyPinnedMemoryResource()
    buffers = [resource.allocate(256), resource.allocate(256)]
    arrays = [np.from_dlpack(buffer).view(np.uint8) for buffer in buffers]
    arrays[0][:] = np.arange(256)
    arrays[1][:] = 0
    yield *buffers, *arrays
    del arrays
    for buffer in buffers:
        buffer.close()


def test_the_device_says_what_it_is(device):
    assert device.name == "Emulated GPU 0"
    assert core.Device(1).name == "Emulated GPU 1"
    assert device.compute_capability == (9, 0)
    assert device.properties.async_engine_count == 2


def test_buffers_travel_in_stream_order(emulated_gpu, device, pinned):
    source, target, expected, result = pinned
    stream = device.create_stream()
    buffer = device.allocate(256, stream=stream)
    stream.sync()
    emulated_gpu.hold(stream)
    source.copy_to(buffer, stream=stream)
    buffer.copy_to(target, stream=stream)
    assert emulated_gpu.pending(stream) == ["copy", "copy"]
    assert not result.any()
    emulated_gpu.release(stream)
    stream.sync()
    assert np.array_equal(result, expected)
    buffer.close(stream)
    stream.close()


def test_events(emulated_gpu, device):
    stream, other = device.create_stream(), device.create_stream()
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    event = stream.record()
    assert not event.is_done
    other.wait(event)
    emulated_gpu.kernel(other)
    emulated_gpu.settle()
    assert emulated_gpu.pending(other) == ["event_wait", "kernel"]
    emulated_gpu.release()
    event.sync()
    assert event.is_done
    other.sync()


def test_pools(device):
    stream = device.create_stream()
    pool = core.DeviceMemoryResource(device)
    buffer = pool.allocate(1024, stream=stream)
    assert buffer.is_device_accessible
    assert not buffer.is_host_accessible
    buffer.close(stream)
    options = core.DeviceMemoryResourceOptions(max_size=1 << 20)
    own = core.DeviceMemoryResource(device, options=options)
    buffer = own.allocate(1024, stream=stream)
    buffer.close(stream)
    own.close()
    stream.sync()


def test_pinned_pool(device):
    stream = device.create_stream()
    pool = core.PinnedMemoryResource()
    buffer = pool.allocate(1024, stream=stream)
    assert buffer.is_host_accessible
    stream.sync()
    buffer.close(stream)
    stream.sync()


def test_copy_batch(device, pinned):
    source, target, expected, result = pinned
    stream = device.create_stream()
    middle = device.allocate(256, stream=stream)
    core.utils.copy_batch(stream, [source], [middle])
    options = core.utils.CopyOptions(src_access_order=core.utils.MemcpySrcAccessOrder.STREAM)
    core.utils.copy_batch(stream, [middle], [target], options=options)
    stream.sync()
    assert np.array_equal(result, expected)
    middle.close(stream)


def test_a_captured_graph_replays_its_callback(device, pinned):
    source, target, expected, result = pinned
    stream = device.create_stream()
    buffer = device.allocate(256, stream=stream)
    stream.sync()
    seen = []
    builder = stream.create_graph_builder()
    builder.begin_building()
    source.copy_to(buffer, stream=builder)
    buffer.copy_to(target, stream=builder)
    builder.callback(lambda: seen.append(int(result[0])))
    graph = builder.end_building().complete()
    builder.close()
    for value in (1, 2, 3):
        expected[0] = value
        graph.launch(stream)
        stream.sync()
    assert seen == [1, 2, 3]
    graph.close()
    buffer.close(stream)
    stream.sync()


def test_nothing_is_left(emulated_gpu, device):
    import gc

    gc.collect()
    before = emulated_gpu.live()
    stream = device.create_stream()
    event = stream.record()
    buffer = device.allocate(64, stream=stream)
    buffer.close(stream)
    stream.sync()
    event.close()
    stream.close()
    del stream, event, buffer
    gc.collect()
    assert emulated_gpu.live() == before
