"""Small copies between plain objects take a short way through the library; what is not plain must not."""

from __future__ import annotations

import abc
import sys
import types
from typing import Any

import anyio
import numpy as np
import pytest
from cuda.bindings import driver
from kinds import check, context_of, pattern, stream_of

from aiocuda_copy import copy_to_device, copy_to_host
from aiocuda_copy.testing import DeviceArray


class Wrapped:
    """What another library's array says of a device array's memory."""

    def __init__(self, base: DeviceArray, **changes: Any) -> None:
        self.base = base
        self.__dict__["interface"] = base.__cuda_array_interface__ | changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface  # type: ignore[no-any-return]


class WithMetaclass(Wrapped, metaclass=abc.ABCMeta):
    """As those of pybind11 and of most abstract classes."""


async def test_classes_with_a_metaclass() -> None:
    device = WithMetaclass(DeviceArray.from_numpy(pattern(100)))
    host = np.zeros(100, np.uint8)
    await copy_to_host(device, host)
    assert np.array_equal(host, pattern(100))
    await copy_to_device(np.flip(pattern(100)).copy(), device)
    assert np.array_equal(device.base.to_numpy(), pattern(100)[::-1])


@pytest.mark.parametrize(
    "changes",
    [
        {"typestr": "<M8[ns]", "shape": (8,)},
        {"typestr": "<m8[25s]", "shape": (8,)},
        {"typestr": "<U4", "shape": (4,)},
        {"typestr": "|S16", "shape": (4,)},
        {"typestr": "<f8", "shape": (np.int64(2), np.int64(4))},
        {"typestr": "|b1", "shape": [64]},
        {"version": 2},
        {"version": 3, "descr": [("", "|u1")]},
        {"strides": (1,)},
        {"stream": 1},
    ],
    ids=str,
)
async def test_whatever_the_interface_says_well(changes: dict[str, Any]) -> None:
    device = Wrapped(DeviceArray.from_numpy(pattern(64)), **changes)
    host = bytearray(64)
    await copy_to_host(device, host)
    assert host == pattern(64).tobytes()
    with pytest.raises(ValueError, match="sizes must match"):
        await copy_to_host(device, bytearray(16))


async def test_data_as_a_list() -> None:
    base = DeviceArray.from_numpy(pattern(64))
    host = bytearray(64)
    await copy_to_host(Wrapped(base, data=[base.ptr, False]), host)
    assert host == pattern(64).tobytes()


@pytest.mark.parametrize("address", [0, None])
async def test_nothing_at_a_null_address(address: int | None) -> None:
    empty = Wrapped(DeviceArray(1), shape=(0,), data=(address, False))
    assert await copy_to_host(empty, bytearray()) == b""
    with pytest.raises(ValueError, match="null address"):
        await copy_to_host(Wrapped(DeviceArray(1), data=(address, False)), bytearray(1))


@pytest.mark.parametrize("scalar", [np.float64(1), np.datetime64("2020-01-01"), np.bytes_(b"12345678")], ids=repr)
async def test_scalars_are_no_memory_of_the_callers(scalar: Any) -> None:
    with pytest.raises(TypeError, match="numpy"):
        await copy_to_device(scalar, DeviceArray(8))


async def test_arrays_of_subclasses() -> None:
    class Mine(np.ndarray):
        pass

    class MyMasked(np.ma.MaskedArray):
        pass

    device = DeviceArray(8)
    await copy_to_device(pattern(8).view(Mine), device)
    assert np.array_equal(device.to_numpy(), pattern(8))
    for masked in (np.ma.masked_array(pattern(8), np.arange(8) > 3), pattern(8).view(MyMasked)):
        with pytest.raises(ValueError, match="masked"):
            await copy_to_device(masked, device)
        with pytest.raises(ValueError, match="masked"):
            await copy_to_host(device, masked)


class JaxLike(Wrapped):
    """Its CUDA array interface is of version 2, which has no stream: DLPack makes the consumer's stream wait."""

    asked: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        self.asked = stream
        raise BufferError("asked")


@pytest.mark.parametrize("to_host", [True, False])
async def test_dlpack_is_asked_where_the_interface_knows_no_streams(to_host: bool) -> None:
    array = JaxLike(DeviceArray(64), version=2)
    with stream_of(0) as stream:
        copy = copy_to_host(array, bytearray(64), stream=stream)
        if not to_host:
            copy.close()
            copy = copy_to_device(bytes(64), array, stream=stream)
        with pytest.raises(ValueError, match="asked"):
            await copy
        assert array.asked == stream


async def test_subclasses_of_a_frameworks_arrays_use_its_current_stream(
    emulated_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.ModuleType("cupy")
    base = type("ndarray", (Wrapped,), {"__module__": "cupy._core"})
    subclass = type("Mine", (base,), {"__module__": "mine"})
    monkeypatch.setitem(sys.modules, "cupy", fake)
    source, fresh = DeviceArray.from_numpy(np.zeros(64, np.uint8)), DeviceArray.from_numpy(pattern(64))
    with stream_of(0) as current:
        stream = types.SimpleNamespace(ptr=current)
        fake.cuda = types.SimpleNamespace(get_current_stream=lambda device: stream)  # type: ignore[attr-defined]
        for kind in (base, subclass):
            emulated_gpu.hold(current)
            host = np.zeros(64, np.uint8)
            with context_of(0):
                check(driver.cuMemcpyDtoDAsync(source.ptr, fresh.ptr, 64, current))
            async with anyio.create_task_group() as group:
                group.start_soon(copy_to_host, kind(source), host)
                await anyio.lowlevel.checkpoint()
                await copy_to_host(fresh, np.zeros(64, np.uint8), stream=2)
                assert not host.any()
                emulated_gpu.release(current)
            assert np.array_equal(host, pattern(64))
            with context_of(0):
                check(driver.cuMemsetD8(source.ptr, 0, 64))
