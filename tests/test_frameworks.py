"""Arrays of real frameworks: torch, JAX and DLPack wherever the tests run, and on a GPU CuPy and Numba as well."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import dlpack_producer as dlpack
import numpy as np
import pytest
from calls import Stream, calls, nothing_held, turns
from dlpack_producer import Producer
from kinds import one_loop, pattern
from tensors import TORCH_TYPES, bits, check_nothing_in_flight, ignores_half_complex, import_jax, random_tensor

from aiocuda_copy import Copier, _native, collect, copy_to_device, copy_to_host, prefetch
from aiocuda_copy.testing import DeviceArray, Emulator

SMALL, BULK = 4096, (6 << 20) + 4096
PINNED = 1


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# Of the whole module, so that what it opens when it is first used is no test's.
@pytest.fixture(scope="module")
def jax() -> Any:
    return import_jax()


def is_pinned(address: int) -> bool:
    return _native.pointer_attributes(address)[1] == PINNED


# torch, on the host.


@one_loop
@ignores_half_complex
@pytest.mark.parametrize("nbytes", [SMALL, BULK])
@pytest.mark.parametrize("name", TORCH_TYPES)
async def test_cpu_tensors_there_and_back(torch: Any, name: str, nbytes: int) -> None:
    tensor = random_tensor(torch, name, nbytes)
    device = DeviceArray(nbytes)
    assert await copy_to_device(tensor, device) is device
    assert device.to_numpy().tobytes() == bits(tensor)
    back = torch.zeros_like(tensor)
    assert await copy_to_host(device, back) is back
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("nbytes", [64, BULK])
async def test_strided_cpu_tensors(torch: Any, nbytes: int) -> None:
    data = torch.from_numpy(pattern(2 * nbytes).reshape(-1, 4))
    device = DeviceArray(nbytes)
    await copy_to_device(data[:, 1:3], device)
    back = torch.zeros_like(data)
    await copy_to_host(device, back[:, 1:3])
    assert torch.equal(back[:, 1:3], data[:, 1:3])
    assert not back[:, ::3].any()


async def test_cpu_tensors_that_require_grad_are_sources(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.arange(16.0))
    device = DeviceArray(16, np.float32)
    await copy_to_device(parameter, device)
    assert np.array_equal(device.to_numpy(), np.arange(16))
    for destination in (parameter, parameter * 2):
        with pytest.raises(ValueError, match=r"detach\(\)"):
            await copy_to_host(device, destination)
    await copy_to_host(device, parameter.detach())
    check_nothing_in_flight()


def stands_for_another(torch: Any) -> Any:
    """A tensor without a storage, as torch's distributed ones are."""

    class Wrapper(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
            raise NotImplementedError(function)

        def to_local(self) -> None: ...

    return torch.Tensor._make_wrapper_subclass(Wrapper, (8,))


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "conjugated": (lambda torch: torch.zeros(8, dtype=torch.complex64).conj(), r"resolve_conj\(\)"),
    "negated": (lambda torch: torch.zeros(8, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
    "sparse": (lambda torch: torch.eye(8).to_sparse(), r"to_dense\(\)"),
    "sparse rows": (lambda torch: torch.eye(8).to_sparse_csr(), r"to_dense\(\)"),
    "permuted": (lambda torch: torch.zeros(4, 8).t(), r"contiguous\(\)"),
    "expanded": (lambda torch: torch.zeros(1, 4).expand(8, 4), r"contiguous\(\)"),
    "nested": (lambda torch: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)]), r"tensor\.values\(\)"),
    "jagged": (
        lambda torch: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged),
        r"tensor\.unbind\(\)",
    ),
    "masked": (
        lambda torch: torch.masked.masked_tensor(torch.zeros(8), torch.ones(8, dtype=torch.bool)),
        r"tensor\.get_data\(\)",
    ),
    "distributed": (stands_for_another, r"tensor\.to_local\(\)"),
    "meta": (lambda torch: torch.zeros(8, device="meta"), "on the device meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of")
@pytest.mark.parametrize("kind", REFUSED)
async def test_tensors_that_are_refused_say_what_to_call(torch: Any, kind: str) -> None:
    make, reason = REFUSED[kind]
    tensor = make(torch)
    with pytest.raises(ValueError, match=reason):
        await copy_to_device(tensor, DeviceArray(1))
    with pytest.raises(ValueError, match=reason):
        await copy_to_host(DeviceArray(1), tensor)
    check_nothing_in_flight()


@pytest.mark.parametrize("count", [100, 1 << 20])
async def test_parts_of_complex_tensors(torch: Any, count: int) -> None:
    """Every second float: rows of four bytes."""
    numbers = torch.arange(count, dtype=torch.float32)
    tensor, device = torch.complex(numbers, -numbers), DeviceArray(count, np.float32)
    for part in (tensor.real, tensor.imag, tensor.conj().real):
        await copy_to_device(part, device)
        assert np.array_equal(device.to_numpy(), part.numpy())
    await copy_to_device(numbers, device)
    await copy_to_host(device, tensor.imag)
    assert torch.equal(tensor, torch.complex(numbers, numbers))


async def test_a_tensor_inside_vmap_is_refused(torch: Any) -> None:
    seen = []
    torch.func.vmap(lambda tensor: seen.append(tensor) or tensor)(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="no memory of its own"):
        await copy_to_device(seen[0], DeviceArray(16))
    seen.clear()


async def test_tensors_on_the_wrong_side(torch: Any) -> None:
    tensor = torch.zeros(8)
    for copy in (copy_to_host(tensor), copy_to_host(tensor, np.zeros(8, "f4")), copy_to_device(tensor, tensor)):
        with pytest.raises(ValueError, match="is not on a device"):
            await copy
    with pytest.raises(ValueError, match="use copy_to_host"):
        await copy_to_device(DeviceArray(32), tensor)
    with pytest.raises(ValueError, match="sizes must match"):
        await copy_to_host(DeviceArray(31), tensor)
    check_nothing_in_flight()


async def test_the_storage_of_a_cpu_tensor_is_held(emulated_gpu: Emulator, torch: Any) -> None:
    for nbytes in (SMALL, BULK):
        stream, device = Stream(), DeviceArray.from_numpy(pattern(nbytes))
        tensor = torch.nn.Parameter(torch.zeros(nbytes, dtype=torch.uint8), requires_grad=False)
        old = tensor.detach()
        emulated_gpu.hold(stream)
        emulated_gpu.kernel(stream)
        async with calls() as start:
            call = start(copy_to_host(device, tensor, stream=stream.handle))
            await turns()
            tensor.data = torch.zeros(nbytes, dtype=torch.uint8)
            emulated_gpu.release(stream)
            await call.result()
        assert bits(old) == pattern(nbytes).tobytes()
        assert not tensor.any()


# like=


@pytest.mark.parametrize("nbytes", [64, BULK])
async def test_a_new_tensor_in_pooled_memory(torch: Any, nbytes: int) -> None:
    device = DeviceArray.from_numpy(pattern(nbytes).view("f4").reshape(2, -1))
    for like in ("torch", torch, torch.zeros(3, dtype=torch.int8)):
        found = await copy_to_host(device, like=like)
        assert type(found) is torch.Tensor
        assert (found.dtype, found.shape, found.requires_grad) == (torch.float32, device.shape, False)
        assert found.is_contiguous()
        assert bits(found) == pattern(nbytes).tobytes()
        assert is_pinned(found.data_ptr())
    address, view = found.data_ptr(), found[1]
    del found
    gc.collect()
    others = [await copy_to_host(device, like="torch") for _ in range(2)]
    assert address not in [other.data_ptr() for other in others]
    del view, others
    await nothing_held()
    gc.collect()
    assert address in [array.data_ptr() for array in [await copy_to_host(device, like="torch") for _ in range(4)]]


async def test_a_new_array_of_numpy() -> None:
    device = DeviceArray.from_numpy(np.arange(12, dtype="i8").reshape(3, 4))
    for like in (None, "numpy", np, np.zeros(1)):
        found = await copy_to_host(device, like=like)
        assert type(found) is np.ndarray
        assert np.array_equal(found, np.arange(12).reshape(3, 4))
        assert is_pinned(found.ctypes.data)


async def test_new_tensors_without_elements_and_without_dimensions(torch: Any) -> None:
    empty = await copy_to_host(DeviceArray((0, 3), "f8"), like="torch")
    assert (empty.shape, empty.dtype) == ((0, 3), torch.float64)
    one = await copy_to_device(np.array(5, "i2"), DeviceArray((), "i2"))
    scalar = await copy_to_host(one, like="torch")
    assert (scalar.shape, scalar.dtype, scalar.item()) == ((), torch.int16, 5)
    calls: list[tuple[int, int]] = []
    with_progress = await copy_to_host(
        DeviceArray.from_numpy(pattern(8)), like="torch", progress=lambda *n: calls.append(n)
    )
    assert bits(with_progress) == pattern(8).tobytes()
    assert calls[-1] == (8, 8)


async def test_bytes_are_a_tensor_of_bytes(torch: Any) -> None:
    from cuda.core import Buffer

    array = DeviceArray.from_numpy(pattern(100))
    found = await copy_to_host(Buffer.from_handle(array.ptr, 100, owner=array), like="torch")
    assert (found.dtype, found.shape) == (torch.uint8, (100,))
    assert bits(found) == pattern(100).tobytes()


async def test_new_tensors_in_pageable_memory_where_the_pool_has_none(torch: Any) -> None:
    async with Copier(pinned_limit_nbytes=0) as copier:
        for nbytes in (64, BULK):
            found = await copier.copy_to_host(DeviceArray.from_numpy(pattern(nbytes)), like=torch)
            assert bits(found) == pattern(nbytes).tobytes()
            assert not is_pinned(found.data_ptr())


@pytest.mark.parametrize("dtype", ["U3", ">f4", "datetime64[ns]", "V5"])
async def test_types_that_torch_lacks(torch: Any, dtype: str) -> None:
    device = DeviceArray(4, dtype)
    with pytest.raises(TypeError, match=r"torch has no type for .*; pass a destination of \d+ bytes"):
        await copy_to_host(device, like="torch")
    check_nothing_in_flight()


@pytest.mark.parametrize("like", ["cupy", 3, object(), np.float32, "", b"torch"], ids=lambda like: type(like).__name__)
async def test_what_names_no_library(like: Any) -> None:
    with pytest.raises(TypeError, match="like= must be 'numpy', 'torch'"):
        await copy_to_host(DeviceArray(4), like=like)
    check_nothing_in_flight()


async def test_like_does_not_go_with_a_destination(torch: Any) -> None:
    async with Copier() as copier:
        for copy in (copy_to_host, copier.copy_to_host):
            with pytest.raises(TypeError, match="like="):
                await copy(DeviceArray(4), bytearray(4), like="torch")
            with pytest.raises(TypeError, match="CPU tensor"):
                await copy(DeviceArray(4), like=torch.zeros(1, device="meta"))
    check_nothing_in_flight()


# DLPack.


@pytest.mark.parametrize(
    ("code", "bits", "name"),
    [
        (dlpack.INT, 16, "int16"),
        (dlpack.UINT, 64, "uint64"),
        (dlpack.FLOAT, 16, "float16"),
        (dlpack.COMPLEX, 64, "complex64"),
        (dlpack.BOOL, 8, "bool"),
        (dlpack.BFLOAT, 16, "bfloat16"),
    ],
)
async def test_dlpack_on_the_device(code: int, bits: int, name: str) -> None:
    pytest.importorskip("ml_dtypes")
    base = DeviceArray.from_numpy(pattern(64) & 1)
    array = Producer(base, (2, 32 * 8 // bits), code, bits)
    found = await copy_to_host(array)
    assert (found.dtype.name, found.shape) == (name, (2, 32 * 8 // bits))
    assert found.tobytes() == base.to_numpy().tobytes()
    await copy_to_device(pattern(64), array)
    assert np.array_equal(base.to_numpy(), pattern(64))
    await nothing_held()
    gc.collect()
    assert array.lent == 0


@pytest.mark.parametrize("code", [dlpack.FLOAT8_E4M3FN, dlpack.FLOAT8_E5M2])
async def test_a_dlpack_type_that_is_not_known_is_copied_as_bytes(code: int) -> None:
    array = Producer(DeviceArray.from_numpy(pattern(64)), (64,), code, 8)
    with pytest.raises(TypeError, match=r"NumPy has no type for .*DLPack.*; pass a destination of 64 bytes"):
        await copy_to_host(array)
    host = bytearray(64)
    assert await copy_to_host(array, host) == pattern(64).tobytes()
    array.dtype = np.dtype("u1")  # type: ignore[attr-defined]
    assert np.array_equal(await copy_to_host(array), pattern(64))
    check_nothing_in_flight()


@pytest.mark.parametrize(("code", "bits", "lanes"), [(dlpack.FLOAT, 32, 4), (dlpack.FLOAT4, 4, 2)])
async def test_dlpack_vectors_are_copied_as_bytes(code: int, bits: int, lanes: int) -> None:
    nbytes = 4 * bits * lanes // 8
    array = Producer(DeviceArray.from_numpy(pattern(nbytes)), (4,), code, bits, lanes)
    assert await copy_to_host(array, bytearray(nbytes)) == pattern(nbytes).tobytes()
    with pytest.raises(TypeError, match=f"lanes={lanes}.*pass a destination of {nbytes} bytes"):
        await copy_to_host(array)


async def test_dlpack_elements_that_are_no_whole_bytes_are_refused() -> None:
    array = Producer(DeviceArray(64), (4,), dlpack.INT, 4)
    with pytest.raises(ValueError, match=r"does not export its memory: .*multiple of 8"):
        await copy_to_host(array, bytearray(2))
    gc.collect()
    assert array.lent == 0
    check_nothing_in_flight()


async def test_dlpack_on_a_device_that_is_not_cudas() -> None:
    array = Producer(DeviceArray(64), (64,), dlpack.UINT, 8, device=dlpack.VULKAN)
    with pytest.raises(ValueError, match="type 7"):
        await copy_to_host(array)
    check_nothing_in_flight()


async def test_what_dlpack_lends_is_held_until_the_end(emulated_gpu: Emulator) -> None:
    stream = Stream()
    array = Producer(DeviceArray.from_numpy(pattern(BULK)), (BULK,), dlpack.UINT, 8)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(array, stream=stream))
        await turns()
        gc.collect()
        assert (array.lent, array.streams) == (1, [stream.handle])
        emulated_gpu.release(stream)
        assert np.array_equal(await call.result(), pattern(BULK))
        del call
    await turns()
    gc.collect()
    assert array.lent == 0


async def test_the_stream_that_a_dlpack_producer_made_wait_is_waited_for(
    emulated_gpu: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tensor as the destination the copy is in torch's current stream, which the producer was not told of."""
    import stand_ins

    stream = Stream()
    tensor = stand_ins.torch(monkeypatch, {0: stream.handle}).Tensor(DeviceArray(64))
    array = Producer(DeviceArray.from_numpy(pattern(64)), (64,), dlpack.UINT, 8)
    legacy = 1
    emulated_gpu.hold(legacy)
    emulated_gpu.kernel(legacy)
    async with calls() as start:
        call = start(copy_to_device(array, tensor))
        await turns()
        assert not call.ended
        emulated_gpu.release(legacy)
        await call.result()
    assert array.streams == [legacy]
    assert np.array_equal(tensor.array.to_numpy(), pattern(64))


# JAX, on the host; its arrays on a device are in test_frameworks_on_a_gpu.py.


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn"])
async def test_jax_arrays_on_the_host_are_sources(jax: Any, dtype: str) -> None:
    array = jax.device_put(np.arange(32), jax.devices("cpu")[0]).astype(dtype)
    device = DeviceArray(array.nbytes)
    await copy_to_device(array, device)
    assert device.to_numpy().tobytes() == np.asarray(array).tobytes()
    with pytest.raises(ValueError, match="read-only"):
        await copy_to_host(device, array)
    with pytest.raises(ValueError, match="is not on a device"):
        await copy_to_host(array)
    check_nothing_in_flight()


@pytest.mark.parametrize("nbytes", [64, BULK])
async def test_a_new_array_of_jax_in_pooled_memory(jax: Any, nbytes: int) -> None:
    device = DeviceArray.from_numpy(pattern(nbytes).view("f4").reshape(2, -1))
    on_the_host = jax.device_put(np.zeros(3), jax.devices("cpu")[0])
    for like in ("jax", jax, jax.numpy, on_the_host):
        found = await copy_to_host(device, like=like)
        assert isinstance(found, jax.Array)
        assert (found.dtype, found.shape) == (np.float32, device.shape)
        assert {one.platform for one in found.devices()} == {"cpu"}
        assert np.asarray(found).tobytes() == pattern(nbytes).tobytes()
        assert is_pinned(found.unsafe_buffer_pointer())
    address = found.unsafe_buffer_pointer()
    del found
    gc.collect()
    await nothing_held()
    assert address in [
        array.unsafe_buffer_pointer() for array in [await copy_to_host(device, like="jax") for _ in range(4)]
    ]
    empty = await copy_to_host(DeviceArray((0, 3), "f4"), like="jax")
    assert empty.shape == (0, 3)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("f8", "JAX has no float64 while jax_enable_x64 is off"),
        ("i8", "JAX has no int64 while jax_enable_x64 is off"),
        (">f4", "JAX takes no >f4 from NumPy"),
        ("U3", "JAX takes no str96 from NumPy"),
        ("V2", "JAX takes no void16 from NumPy"),
    ],
)
async def test_types_that_jax_lacks(jax: Any, dtype: str, message: str) -> None:
    for shape in (4, 100_000):
        with pytest.raises(TypeError, match=message):
            await copy_to_host(DeviceArray(shape, dtype), like="jax")
    check_nothing_in_flight()


async def test_jax_with_types_of_64_bits(jax: Any) -> None:
    device = DeviceArray.from_numpy(np.arange(5.0))
    jax.config.update("jax_enable_x64", True)
    try:
        found = await copy_to_host(device, like="jax")
        assert found.dtype == np.float64
        assert found.tolist() == [0, 1, 2, 3, 4]
    finally:
        jax.config.update("jax_enable_x64", False)
    with pytest.raises(TypeError, match="jax_enable_x64"):
        await copy_to_host(device, like="jax")


async def test_jax_objects_that_are_no_arrays(jax: Any) -> None:
    tracers: list[Any] = []

    def keep(array: Any) -> Any:
        tracers.append(array)
        return array

    jax.jit(keep)(np.zeros(4))
    jax.vmap(keep)(np.zeros((2, 4)))
    for tracer in tracers:
        for copy in (copy_to_host(tracer), copy_to_device(tracer, DeviceArray(4))):
            with pytest.raises(TypeError, match="is a JAX tracer"):
                await copy
    for batches in (prefetch([tracers[:1]]), collect([{"x": tracers[1]}])):
        async with batches:
            with pytest.raises(TypeError, match="is a JAX tracer"):
                await anext(batches)
    with pytest.raises(TypeError, match=r"jax\.random\.key_data"):
        await copy_to_device(jax.random.key(0), DeviceArray(8))
    deleted = jax.numpy.ones(4)
    deleted.delete()
    with pytest.raises(ValueError, match="has been deleted"):
        await copy_to_host(deleted)
    check_nothing_in_flight()
    tracers.clear()


IMPORT_PROBE = """
import asyncio, sys
import numpy as np
from aiocuda_copy import copy_to_device, copy_to_host
from aiocuda_copy.testing import DeviceArray

async def main():
    for nbytes in (64, 1 << 20):
        device = DeviceArray(nbytes)
        await copy_to_device(bytes(nbytes), device)
        await copy_to_host(device, bytearray(nbytes))
        await copy_to_host(device, like="numpy")

asyncio.run(main())
loaded = {"torch", "cupy", "jax", "numba", "ml_dtypes"} & sys.modules.keys()
assert not loaded, loaded
"""


def test_no_framework_is_imported_that_no_object_comes_from() -> None:
    environment = {**os.environ, "AIOCUDA_COPY_DRIVER": "emulated"}
    subprocess.run([sys.executable, "-c", IMPORT_PROBE], check=True, env=environment, timeout=60)
