"""What the driver knows about memory, and what it refuses."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

import numpy as np
import pytest

from aiocuda_copy.testing import DeviceArray

INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, ILLEGAL_ADDRESS = 1, 2, 400, 700


def _batch(cu, stream, entries, attributes="stream order"):
    run = cu.api.CUmemcpyAttributes()
    run.srcAccessOrder = cu.api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    if attributes == "any order":
        run.srcAccessOrder = cu.api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    runs = [] if attributes is None else [run]
    destinations = [cu.api.CUdeviceptr(entry[0]) for entry in entries]
    sources = [cu.api.CUdeviceptr(entry[1]) for entry in entries]
    sizes = [entry[2] for entry in entries]
    indices = [0] * len(runs)
    return cu.code("cuMemcpyBatchAsync", destinations, sources, sizes, len(sizes), runs, indices, len(runs), stream)


def test_the_cpu_cannot_touch_device_memory():
    code = (
        "import ctypes\n"
        "from aiocuda_copy import testing\n"
        "testing.use_emulated_driver()\n"
        "ctypes.string_at(testing.DeviceArray(4).ptr, 1)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert result.returncode == -11


def _resident() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * resource.getpagesize()


@pytest.mark.no_sanitizer  # its shadow of 12 GiB is what takes the memory
def test_huge_allocations_cost_nothing_until_they_are_written(cu):
    n = (1 << 32) + 1
    source, target = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
    positions = [0, 5, 1 << 31, n - 1]
    source[positions] = 7
    before = _resident()
    with DeviceArray(n) as device:
        cu.cuMemcpyHtoD(device.ptr, source.ctypes.data, n)
        cu.cuMemcpyDtoH(target.ctypes.data, device.ptr, n)
    assert list(target[positions]) == [7] * 4
    assert not target[1:5].any()
    assert _resident() - before < 1 << 30


def test_large_copies_with_holes_are_exact(cu):
    generator = np.random.default_rng(1)
    n = 40 << 20
    source, target = np.zeros(n, np.uint8), generator.integers(1, 255, n, np.uint8)
    for start in generator.integers(0, n - 5000, 20):
        source[start : start + 5000] = generator.integers(0, 255, 5000, np.uint8)
    with DeviceArray(n + 3) as device:
        cu.cuMemsetD8(device.ptr, 9, n + 3)
        cu.cuMemcpyHtoD(device.ptr + 3, source.ctypes.data, n)
        cu.cuMemcpyDtoH(target.ctypes.data, device.ptr + 3, n)
        assert cu.api.cuMemcpyDtoH(target[:3].copy().ctypes.data, device.ptr, 3)[0] == 0
    assert np.array_equal(source, target)


def test_fresh_memory_is_not_zero(emulated_gpu, cu):
    assert emulated_gpu.read(int(cu.cuMemAlloc(64)), 64) == b"\xe5" * 64
    assert emulated_gpu.read(int(cu.cuMemHostAlloc(64, 0)), 64) == b"\xe5" * 64


def test_addresses_and_handles_are_reused_eagerly(cu):
    address = int(cu.cuMemAlloc(64))
    cu.cuMemFree(address)
    assert int(cu.cuMemAlloc(64)) == address
    stream = cu.cuStreamCreate(1)
    value, identity = int(stream), cu.cuStreamGetId(stream)
    cu.cuStreamDestroy(stream)
    assert cu.code("cuStreamQuery", value) == INVALID_HANDLE
    again = cu.cuStreamCreate(1)
    assert int(again) == value
    assert cu.cuStreamGetId(again) != identity


def test_stale_handles_are_errors(cu):
    event, address, host = cu.cuEventCreate(2), cu.cuMemAlloc(64), cu.cuMemHostAlloc(64, 0)
    cu.cuEventDestroy(event)
    cu.cuMemFree(address)
    cu.cuMemFreeHost(host)
    assert cu.code("cuEventQuery", event) == INVALID_HANDLE
    assert cu.code("cuEventDestroy", event) == INVALID_HANDLE
    assert cu.code("cuMemFree", address) == INVALID_VALUE
    assert cu.code("cuMemFreeHost", host) == INVALID_VALUE
    assert cu.code("cuStreamQuery", 0xDEAD) == INVALID_HANDLE


def test_memory_that_was_freed_before_its_copy_ran_is_a_fault(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    device, host = cu.cuMemAlloc(64), cu.cuMemHostAlloc(64, 0)
    emulated_gpu.hold(stream)
    cu.cuMemcpyAsync(int(host), device, 64, stream)
    cu.cuMemFree(device)
    emulated_gpu.release(stream)
    assert cu.code("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS


def test_memory_freed_in_stream_order_lives_until_then(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    before = emulated_gpu.live()["device_allocations"]
    address = cu.cuMemAllocAsync(64, stream)
    emulated_gpu.hold(stream)
    cu.cuMemsetD8Async(address, 1, 64, stream)
    cu.cuMemFreeAsync(address, stream)
    assert emulated_gpu.live()["device_allocations"] == before + 1
    emulated_gpu.release(stream)
    cu.cuStreamSynchronize(stream)
    assert emulated_gpu.live()["device_allocations"] == before
    assert cu.code("cuMemcpyAsync", address, address, 1, stream) == INVALID_VALUE


def test_a_copy_over_two_adjoining_registrations_is_refused(cu):
    array, device = np.zeros(8192, np.uint8), cu.cuMemAlloc(8192)
    half = array.ctypes.data + 4096
    cu.cuMemHostRegister(array.ctypes.data, 4096, 0)
    cu.cuMemHostRegister(half, 4096, 0)
    assert cu.code("cuMemcpyAsync", device, array.ctypes.data, 8192, 2) == INVALID_VALUE
    assert cu.code("cuMemcpyAsync", device, array.ctypes.data, 4096, 2) == 0
    cu.cuStreamSynchronize(2)
    cu.cuMemHostUnregister(array.ctypes.data)
    cu.cuMemHostUnregister(half)


def test_two_arrays_that_share_a_page_can_both_be_registered(cu):
    array = np.zeros(8192, np.uint8)
    address = (array.ctypes.data + 4095) // 4096 * 4096
    cu.cuMemHostRegister(address, 100, 0)
    cu.cuMemHostRegister(address + 100, 100, 0)
    assert cu.code("cuMemHostRegister", address + 50, 100, 0) == 712
    cu.cuMemHostUnregister(address)
    cu.cuMemHostUnregister(address + 100)
    assert cu.code("cuMemHostUnregister", address) == 713


def test_memory_that_is_not_mapped_cannot_be_registered(cu):
    assert cu.code("cuMemHostRegister", 4096, 4096, 0) == INVALID_VALUE


def test_copies_past_the_end_are_refused(cu):
    device, host = cu.cuMemAlloc(64), cu.cuMemHostAlloc(128, 0)
    assert cu.code("cuMemcpyAsync", device, int(host), 65, 2) == INVALID_VALUE
    assert cu.code("cuMemcpyAsync", device, int(host), 64, 2) == 0


def test_limits_on_memory(emulated_gpu, cu):
    emulated_gpu.limit_memory(device_nbytes=1 << 40)
    free, total = cu.cuMemGetInfo()
    emulated_gpu.limit_memory(device_nbytes=total - free + (1 << 20), pinned_nbytes=4096)
    assert cu.code("cuMemAlloc", 2 << 20) == OUT_OF_MEMORY
    assert cu.code("cuMemHostAlloc", 8192, 0) == OUT_OF_MEMORY
    assert cu.code("cuMemAlloc", 4096) == 0
    assert cu.cuMemGetInfo()[0] == (1 << 20) - 4096


@pytest.mark.parametrize(
    ("stream", "entries", "attributes"),
    [
        ("legacy", 1, "stream order"),
        ("own", 0, "stream order"),
        ("own", 1, None),
        ("own", "zero size", "stream order"),
        ("own", "null", "stream order"),
    ],
)
def test_batches_that_are_refused(cu, stream, entries, attributes):
    device, host = int(cu.cuMemAlloc(64)), int(cu.cuMemHostAlloc(64, 0))
    handle = 1 if stream == "legacy" else cu.cuStreamCreate(1)
    batch = {
        0: [],
        1: [(device, host, 64)],
        "zero size": [(device, host, 4), (device, host, 0)],
        "null": [(device, 0, 4)],
    }[entries]
    assert _batch(cu, handle, batch, attributes) == INVALID_VALUE


def test_a_batch_on_the_per_thread_stream_is_accepted(emulated_gpu, cu):
    device, host = int(cu.cuMemAlloc(64)), int(cu.cuMemHostAlloc(64, 0))
    emulated_gpu.write(host, bytes(range(64)))
    assert _batch(cu, 2, [(device + 4, host, 4), (device, host + 4, 4)]) == 0
    cu.cuStreamSynchronize(2)
    assert emulated_gpu.read(device, 8) == bytes([4, 5, 6, 7, 0, 1, 2, 3])


def test_a_source_that_may_be_read_in_any_order_is_read_early(emulated_gpu, cu):
    stream = cu.cuStreamCreate(1)
    device, host = int(cu.cuMemAlloc(4)), int(cu.cuMemHostAlloc(4, 0))
    emulated_gpu.write(device, b"old!")
    emulated_gpu.hold(stream)
    assert _batch(cu, stream, [(host, device, 4)], "any order") == 0
    emulated_gpu.write(device, b"new!")
    emulated_gpu.step(stream)
    assert emulated_gpu.read(host, 4) == b"old!"


def test_rectangles(emulated_gpu, cu):
    array = np.arange(48, dtype=np.uint8).reshape(6, 8)
    device = DeviceArray.from_numpy(np.zeros((6, 8), np.uint8))
    copy = cu.api.CUDA_MEMCPY2D()
    copy.srcMemoryType = cu.api.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.srcHost = array.ctypes.data
    copy.srcPitch = copy.dstPitch = 8
    copy.srcXInBytes, copy.srcY = 2, 1
    copy.dstMemoryType = cu.api.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstDevice = device.ptr
    copy.dstXInBytes, copy.dstY = 1, 3
    copy.WidthInBytes, copy.Height = 4, 2
    cu.cuMemcpy2DAsync(copy, 2)
    expected = np.zeros((6, 8), np.uint8)
    expected[3:5, 1:5] = array[1:3, 2:6]
    assert np.array_equal(device.to_numpy(), expected)


def test_pointer_attributes(cu):
    Attribute = cu.api.CUpointer_attribute
    kind, ordinal = Attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    device, host, managed = cu.cuMemAlloc(64), cu.cuMemHostAlloc(64, 0), cu.cuMemAllocManaged(64, 1)
    array = np.zeros(64, np.uint8)
    assert int(cu.cuPointerGetAttribute(kind, int(device) + 8)) == 2
    assert int(cu.cuPointerGetAttribute(kind, int(host) + 8)) == 1
    assert int(cu.cuPointerGetAttribute(kind, managed)) == 2
    assert cu.cuPointerGetAttribute(Attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED, managed)
    assert cu.code("cuPointerGetAttribute", kind, array.ctypes.data) == INVALID_VALUE
    # Past the bindings, which make 0 of the second before 13.5.
    address = int(cu.api.cuGetProcAddress(b"cuPointerGetAttributes", 12000, 0)[1])
    ask = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)(address)
    values, wanted = (ctypes.c_int * 2)(7, 7), (ctypes.c_int * 2)(int(kind), int(ordinal))
    places = (ctypes.c_void_p * 2)(*(ctypes.addressof(values) + 4 * index for index in range(2)))
    assert ask(2, wanted, places, array.ctypes.data) == 0
    assert list(values) == [0, -2]
    assert (
        cu.cuMemGetAddressRange(int(device) + 8) == (device, 64)
        or int(cu.cuMemGetAddressRange(int(device) + 8)[1]) == 64
    )


def test_managed_memory_is_the_cpus_too(cu):
    managed = int(cu.cuMemAllocManaged(64, 1))
    cu.cuMemsetD8(managed, 7, 64)
    cu.cuStreamSynchronize(0)
    assert ctypes.string_at(managed, 64) == b"\x07" * 64
    cu.cuMemFree(managed)


def test_copies_between_devices(emulated_gpu, cu):
    first = DeviceArray.from_numpy(np.arange(64, dtype=np.uint8), device=0)
    second = DeviceArray(64, device=1)
    stream = cu.cuStreamCreate(1)
    assert cu.cuDeviceCanAccessPeer(0, 1)
    cu.cuMemcpyPeerAsync(second.ptr, 0, first.ptr, 0, 64, stream)
    cu.cuStreamSynchronize(stream)
    assert np.array_equal(second.to_numpy(), first.to_numpy())


def test_memset_patterns(emulated_gpu, cu):
    device = cu.cuMemAlloc(8)
    cu.cuMemsetD32Async(device, 0x04030201, 2, 2)
    cu.cuStreamSynchronize(2)
    assert emulated_gpu.read(int(device), 8) == bytes([1, 2, 3, 4] * 2)
    cu.cuMemsetD16Async(int(device) + 2, 0, 1, 2)
    cu.cuStreamSynchronize(2)
    assert emulated_gpu.read(int(device), 8) == bytes([1, 2, 0, 0, 1, 2, 3, 4])
