"""Which tensors and arrays take the short way, which stream they take and what is held; by stand-ins."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import stand_ins
from calls import Stream, calls, nothing_held, turns, until
from kinds import pattern, stream_of
from stand_ins import on_device

import aiocuda_copy._copier as copier
from aiocuda_copy import copy_batch, copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator

pytestmark = pytest.mark.emulated_only


@pytest.fixture(autouse=True)
def _pool_has_memory() -> None:
    """To grow takes the long way."""
    pinned_empty(1)


class Ways:
    """Counts who took the long way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.long = 0
        export = copier.export

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.long += kwargs["role"] == "source"
            return export(*args, **kwargs)

        monkeypatch.setattr(copier, "export", counted)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


async def waits_for(gpu: Emulator, stream: int, copy: Any) -> None:
    """Whether a copy waits for what is in a stream."""
    gpu.hold(stream)
    gpu.kernel(stream)
    async with calls() as start:
        call = start(copy)
        await turns()
        assert not call.ended
        gpu.release(stream)
        await call.result()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["Tensor", "Parameter"])
async def test_tensors_there_and_back(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch = stand_ins.torch(monkeypatch)
    tensor = (torch.Tensor if kind == "Tensor" else torch.nn.Parameter)(on_device())
    host = np.zeros(64, np.uint8)
    assert await copy_to_host(tensor, host) is host
    assert (host == 7).all()
    assert await copy_to_device(pattern(64), tensor) is tensor
    assert np.array_equal(tensor.array.to_numpy(), pattern(64))


@pytest.mark.usefixtures("short")
async def test_cupy_arrays_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {"device": 0, "stream": 0}
    array = stand_ins.cupy(monkeypatch, current).ndarray(on_device(), current)
    host = np.zeros(64, np.uint8)
    await copy_to_host(array, host)
    assert (host == 7).all()
    await copy_to_device(pattern(64), array)
    assert np.array_equal(array.array.to_numpy(), pattern(64))


@pytest.mark.usefixtures("short")
async def test_real_tensors_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    device = on_device()
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    await copy_to_host(device, tensor)
    assert (tensor.view(torch.uint8) == 7).all()
    await copy_to_device(torch.nn.Parameter(torch.ones(16)), device)
    assert np.array_equal(device.to_numpy().view("f4"), np.ones(16))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("dtype", ["bool", "int64", "complex64", "complex128", "float8_e4m3fn", "uint16"])
async def test_real_tensors_of_any_plain_type(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    data = pattern(64)
    device, tensor = on_device(), torch.from_numpy(data.copy()).view(getattr(torch, dtype))
    await copy_to_device(tensor[None, :, None], device)
    assert np.array_equal(device.to_numpy(), data)
    tensor = torch.zeros_like(tensor).reshape(2, -1)
    await copy_to_host(device, tensor)
    assert tensor.view(torch.uint8).numpy().tobytes() == data.tobytes()


async def test_real_tensors_that_are_not_plain(ways: Ways) -> None:
    """Of none of these does DLPack say that it is no plain memory, or not all of it."""
    torch = pytest.importorskip("torch")
    device = on_device()
    wide = torch.arange(128, dtype=torch.uint8)
    await copy_to_device(wide[::2], device)
    assert np.array_equal(device.to_numpy(), np.arange(0, 128, 2))
    await copy_to_host(device, wide[1::2])
    assert np.array_equal(wide.numpy(), np.arange(128) // 2 * 2)
    assert ways.long == 2
    numbers = torch.ones(8, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"resolve_conj\(\)"):
        await copy_to_device(numbers.conj(), device)
    with pytest.raises(ValueError, match=r"resolve_neg\(\)"):
        await copy_to_device(torch.repeat_interleave(numbers, 2).conj().imag, device)
    with pytest.raises(ValueError, match=r"to_dense\(\)"):
        await copy_to_device(torch.zeros(64, dtype=torch.uint8).to_sparse(), device)
    with pytest.raises(ValueError, match=r"detach\(\)"):
        await copy_to_host(device, torch.zeros(16, requires_grad=True))
    with pytest.raises(ValueError, match="meta"):
        await copy_to_device(torch.zeros(16, device="meta"), device)


@pytest.mark.parametrize("nbytes", [0, 8, 100])
async def test_real_tensors_whose_storage_has_been_resized(nbytes: int) -> None:
    torch = pytest.importorskip("torch")
    device = on_device()
    for tensor in (torch.zeros(16), torch.zeros(32)[16:]):
        tensor.untyped_storage().resize_(nbytes)
        if nbytes == 100 and not tensor.storage_offset():
            await copy_to_host(device, tensor)
            assert (tensor.view(torch.uint8) == 7).all()
            continue
        with pytest.raises(ValueError, match="its storage has been resized"):
            await copy_to_device(tensor, device)
        with pytest.raises(ValueError, match="its storage has been resized"):
            await copy_to_host(device, tensor)
        with pytest.raises(ValueError, match="its storage has been resized"):
            await copy_batch(0, [device], [tensor])


class RmmBuffer:
    """Its interface is of a version that says nothing of streams, and there is no DLPack to ask."""

    def __init__(self, base: DeviceArray) -> None:
        self.base = base

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.base.ptr, False), "shape": (64,), "strides": None, "typestr": "|u1", "version": 0}


class Interface:
    """Its interface is whatever it is given, and counts who asks for it."""

    def __init__(self, base: DeviceArray, **changes: Any) -> None:
        self.base, self.asked = base, 0
        self.interface = base.__cuda_array_interface__ | changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self.asked += 1
        return self.interface


class Shape(tuple[int, ...]):
    """As torch.Size."""

    __slots__ = ()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["plain", "another key", "shape of its own", "names made at run time"])
async def test_interfaces_are_asked_for_once(kind: str) -> None:
    array = Interface(on_device())
    if kind == "another key":
        array.interface["descr"], array.interface["mine"] = [("", "|u1")], 5
    elif kind == "shape of its own":
        array.interface["shape"] = Shape((64,))
    elif kind == "names made at run time":
        array.interface = {"".join(list(name)): value for name, value in array.interface.items()}
    host = np.zeros(64, np.uint8)
    await copy_to_host(array, host)
    assert (host == 7).all()
    assert array.asked == 1


@pytest.mark.usefixtures("short")
async def test_buffers_of_rmm() -> None:
    buffer = RmmBuffer(on_device())
    found = await copy_to_host(buffer)
    assert (found.dtype, found.shape) == (np.uint8, (64,))
    assert (found == 7).all()
    await copy_to_device(pattern(64), buffer)
    assert np.array_equal(buffer.base.to_numpy(), pattern(64))


@pytest.mark.usefixtures("short")
async def test_tensors_come_after_the_current_stream_of_their_device(
    emulated_gpu: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stream_of(0) as first, stream_of(1) as second, stream_of(0) as named:
        torch = stand_ins.torch(monkeypatch, {0: first, 1: second})
        for device, stream in ((0, first), (1, second)):
            tensor = torch.Tensor(DeviceArray(64, device=device))
            await waits_for(emulated_gpu, stream, copy_to_host(tensor, np.zeros(64, np.uint8)))
            await waits_for(emulated_gpu, stream, copy_to_host(tensor))
            await waits_for(emulated_gpu, stream, copy_to_device(bytes(64), tensor))
        emulated_gpu.hold(first)
        emulated_gpu.kernel(first)
        tensor = torch.Tensor(on_device())
        assert ((await copy_to_host(tensor, stream=named)) == 7).all()
        emulated_gpu.release(first)


async def test_cupy_arrays_come_after_the_current_stream_and_the_one_given(
    emulated_gpu: Emulator, monkeypatch: pytest.MonkeyPatch, ways: Ways
) -> None:
    with stream_of(0) as current, stream_of(0) as other:
        now = {"device": 0, "stream": current}
        array = stand_ins.cupy(monkeypatch, now).ndarray(on_device(), now)
        await waits_for(emulated_gpu, current, copy_to_host(array))
        await waits_for(emulated_gpu, current, copy_to_host(array, stream=current))
        assert ways.long == 0
        for stream in (current, other):
            await waits_for(emulated_gpu, stream, copy_to_host(array, stream=other))
        assert ways.long == 2
        now["stream"] = 0
        for stream in (0, 1, None):
            assert ((await copy_to_host(array, stream=stream)) == 7).all()
        assert ways.long == 2
        with pytest.raises(ValueError, match="handle"):
            await copy_to_host(array, stream=-1)
        now["device"] = 1
        assert ((await copy_to_host(array)) == 7).all()
        assert ways.long == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "torch.sparse_coo"}, "to_dense"),
        ({"is_conj": lambda: True}, r"resolve_conj\(\)"),
        ({"is_neg": lambda: True}, r"resolve_neg\(\)"),
        ({"requires_grad": True}, r"detach\(\)"),
    ],
)
async def test_tensors_that_are_not_plain_take_the_long_way(
    monkeypatch: pytest.MonkeyPatch, ways: Ways, changes: dict[str, Any], reason: str
) -> None:
    tensor = stand_ins.torch(monkeypatch).Tensor(on_device())
    tensor.__dict__.update(changes)
    with pytest.raises(ValueError, match=reason):
        await copy_to_device(bytes(64), tensor)
    if "requires_grad" in changes:
        host = np.zeros(64, np.uint8)
        await copy_to_host(tensor, host)
        assert (host == 7).all()
    else:
        with pytest.raises(ValueError, match=reason):
            await copy_to_host(tensor)
        assert ways.long == 2


async def test_what_stands_for_a_tensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def data_ptr() -> int:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    tensor = stand_ins.torch(monkeypatch).Tensor(on_device())
    tensor.data_ptr = data_ptr
    with pytest.raises(ValueError, match=r"no memory of its own: Cannot access"):
        await copy_to_host(tensor, bytearray(64))


async def test_strided_tensors_and_arrays(monkeypatch: pytest.MonkeyPatch, ways: Ways) -> None:
    current = {"device": 0, "stream": 0}
    view = DeviceArray.from_numpy(pattern(64).reshape(8, 8))[:, 2:4]
    expected = pattern(64).reshape(8, 8)[:, 2:4]
    for array in (
        stand_ins.torch(monkeypatch).Tensor(view),
        stand_ins.cupy(monkeypatch, current).ndarray(view, current),
    ):
        host = np.zeros((8, 2), np.uint8)
        await copy_to_host(array, host)
        assert np.array_equal(host, expected)
    assert ways.long == 2


async def test_subclasses_take_the_long_way(monkeypatch: pytest.MonkeyPatch, ways: Ways) -> None:
    torch = stand_ins.torch(monkeypatch)
    subclass = type("Mine", (torch.Tensor,), {"__module__": "mine"})
    host = np.zeros(64, np.uint8)
    await copy_to_host(subclass(on_device()), host)
    assert (host == 7).all()
    assert ways.long == 1


async def test_a_torch_without_the_quick_way_to_the_stream(
    emulated_gpu: Emulator, monkeypatch: pytest.MonkeyPatch, ways: Ways
) -> None:
    with stream_of(0) as current:
        torch = stand_ins.torch(monkeypatch, {0: current})
        del torch._C._cuda_getCurrentRawStream
        tensor = torch.Tensor(on_device())
        await waits_for(emulated_gpu, current, copy_to_host(tensor, bytearray(64)))
        assert ways.long == 1
        await copy_to_host(tensor, bytearray(64), stream=current)
        assert ways.long == 1


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("to_host", [True, False])
async def test_a_tensors_storage_is_held(
    emulated_gpu: Emulator, monkeypatch: pytest.MonkeyPatch, to_host: bool
) -> None:
    torch, stream = stand_ins.torch(monkeypatch), Stream()
    tensor = torch.Tensor(on_device())
    held = weakref.ref(tensor.storage)
    host = np.full(64, 9, np.uint8)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        copy = copy_to_host if to_host else copy_to_device
        call = start(copy(*((tensor, host) if to_host else (host, tensor)), stream=stream.handle))
        await turns()
        tensor.data = torch.Tensor(on_device())
        gc.collect()
        storage = held()
        assert storage is not None
        emulated_gpu.release(stream)
        await call.result()
        assert (storage.array.to_numpy() == (7 if to_host else 9)).all()
        assert (host == (7 if to_host else 9)).all()
        del call, storage
    await nothing_held()
    gc.collect()
    assert held() is None


async def test_a_cancelled_copy_lets_the_storage_go(emulated_gpu: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    tensor = stand_ins.torch(monkeypatch).Tensor(on_device())
    held = weakref.ref(tensor.storage)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(tensor, bytearray(64), stream=stream.handle))
        await turns()
        call.cancel()
        del tensor, call

    def gone() -> bool:
        gc.collect()
        return held() is None

    await until(gone)
    emulated_gpu.release(stream)
