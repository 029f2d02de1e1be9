"""Regions, streams and page-locked memory with the objects of real libraries, on the emulated driver or a real one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocuda_copy import _driver, _native
from aiocuda_copy._exports import export
from aiocuda_copy._pinned import PinnedPool, pinned
from aiocuda_copy._regions import Kind, Region, classify
from aiocuda_copy._results import result_spec
from aiocuda_copy._streams import default_for, event_handle, is_event, resolve_handle
from aiocuda_copy.testing import DeviceArray, use_emulated_driver

core = pytest.importorskip("cuda.core")


@pytest.fixture(autouse=True)
def _driver_is_bound(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--driver") in (None, "emulated"):
        use_emulated_driver()
    _driver.ensure()


@pytest.fixture
def device() -> Any:
    device = core.Device(0)
    device.set_current()
    return device


def region(obj: object, role: Any = "source") -> Region:
    found = export(obj, role=role)
    return classify(found, _native.pointer_attributes(found.address))


def test_a_device_array() -> None:
    array = DeviceArray.from_numpy(np.arange(12, dtype="i4").reshape(3, 4))
    whole, part = region(array), region(array[:, 1:3])
    assert (whole.kind, whole.device, whole.strides, whole.nbytes) == (Kind.DEVICE, 0, None, 48)
    assert (part.strides, part.extent, part.address) == ((16, 4), 40, whole.address + 4)
    assert whole.context
    assert whole.range_start <= whole.address
    assert result_spec(part) == ((3, 2), np.dtype("i4"))


def test_an_array_that_claims_more_than_its_allocation() -> None:
    array = DeviceArray.from_numpy(np.zeros(1000))

    class Liar:
        __cuda_array_interface__ = array.__cuda_array_interface__ | {"shape": (1 << 32,)}

    with pytest.raises(ValueError, match="its allocation ends after"):
        region(Liar())


def test_an_array_on_the_second_device() -> None:
    from cuda.bindings import driver

    if driver.cuDeviceGetCount()[1] < 2:
        pytest.skip("needs two devices")
    assert region(DeviceArray.from_numpy(np.zeros(3), device=1)).device == 1


def test_buffers_of_cuda_core(device: Any) -> None:
    stream = device.create_stream()
    on_device = core.DeviceMemoryResource(device).allocate(1000, stream=stream)
    stream.sync()
    found = region(on_device, "destination")
    assert (found.kind, found.device, found.nbytes, found.shape) == (Kind.DEVICE, 0, 1000, None)
    on_host = core.LegacyPinnedMemoryResource().allocate(1000, stream=stream)
    assert region(on_host).kind is Kind.PINNED
    for buffer in (on_device, on_host):
        buffer.close()
        with pytest.raises(RuntimeError, match="closed"):
            export(buffer, role="source")
    stream.close()


def test_streams_and_events_of_cuda_core(device: Any) -> None:
    stream = device.create_stream()
    event = stream.record()
    assert resolve_handle(stream) == resolve_handle(stream.handle) == int(stream.handle)
    assert is_event(event)
    assert event_handle(event) == int(event.handle)
    event.close()
    with pytest.raises(RuntimeError, match="closed"):
        event_handle(event)
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        resolve_handle(stream)


def test_a_graph_builder_of_cuda_core(device: Any) -> None:
    builder = device.create_graph_builder().begin_building()
    with pytest.raises(RuntimeError, match="under capture"):
        resolve_handle(builder)
    builder.end_building()
    builder.close()


def test_page_locked_memory(device: Any) -> None:
    pool = PinnedPool(64 << 20)
    for nbytes in (1, 5000, 3 << 20, 50 << 20):
        array = pool.empty(nbytes)
        found = region(array, "destination")
        assert found.kind is Kind.PINNED
        assert found.range_start <= found.address
        assert found.address + nbytes <= found.range_start + found.range_nbytes
        array[:] = 1
        del array, found
    pool.close()
    assert pool.stats().held_nbytes == 0


def test_page_locking_of_parts_that_share_pages(device: Any) -> None:
    array = np.zeros(1 << 20, np.uint8)
    with pinned(array[100:5000]), pinned(array[5000:9000]), pinned(array):
        assert all(region(array[at:]).kind is Kind.PINNED for at in (0, 100, 4999, 5000, 9000, 500_000, array.size - 1))
    assert region(array).kind is Kind.PAGEABLE


@pytest.mark.real_gpu
def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 6), dtype=torch.bfloat16, device="cuda")
    found = region(tensor, "destination")
    assert (found.kind, found.framework, found.address) == (Kind.DEVICE, "torch", tensor.data_ptr())
    assert region(tensor[1:, 2:4]).strides == (12, 2)
    assert region(torch.zeros(9).pin_memory()).kind is Kind.PINNED
    assert region(torch.zeros(9)).kind is Kind.PAGEABLE
    assert region(torch.zeros(0, device="cuda")).kind is Kind.DEVICE
    assert default_for([found]) == 0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert default_for([found]) == stream.cuda_stream == resolve_handle(stream)
        event = stream.record_event()
    assert event_handle(event) == event.cuda_event
    assert event_handle(torch.cuda.Event()) == 0


@pytest.mark.real_gpu
def test_arrays_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(12, dtype="f4").reshape(3, 4)
    found = region(array, "destination")
    assert (found.kind, found.framework, found.address) == (Kind.DEVICE, "cupy", array.data.ptr)
    assert region(array[:, 1:3]).strides == (16, 4)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert default_for([found]) == stream.ptr == resolve_handle(stream)
        assert region(array).stream == stream.ptr
        event = stream.record()
    assert is_event(event)
    assert event_handle(event) == event.ptr


@pytest.mark.real_gpu
def test_managed_memory_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        assert region(cupy.zeros(5)).kind is Kind.MANAGED
