"""torch, CuPy, JAX, Numba and RMM with arrays of theirs on a GPU."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from calls import calls, turns
from conformance.gpu import Gpu
from kinds import one_loop, pattern
from tensors import (
    NOT_NUMPYS,
    TORCH_TYPES,
    bits,
    check_nothing_in_flight,
    ignores_half_complex,
    import_jax,
    random_tensor,
)

from aiocuda_copy import Copier, copy_to_device, copy_to_host

pytestmark = [
    pytest.mark.real_gpu,
    # Theirs, of one another and of the machine.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

SMALL, BULK = 4096, (6 << 20) + 4096
# A kernel's, long enough for what a test does behind it.
MILLISECONDS = 200


class Torch:
    """What the tests that are the same for several frameworks need of one."""

    def __init__(self) -> None:
        self.module = pytest.importorskip("torch")
        if not self.module.cuda.is_available():
            pytest.skip("this torch sees no GPU")
        self.get(self.full(8, 1))

    def full(self, nbytes: int, value: int) -> Any:
        return self.module.full((nbytes,), value, dtype=self.module.uint8, device="cuda")

    def fill(self, array: Any, value: int) -> None:
        array.fill_(value)

    def get(self, array: Any) -> Any:
        return array.cpu().numpy()

    def address(self, array: Any) -> int:
        return int(array.data_ptr())

    @contextmanager
    def new_stream(self) -> Iterator[int]:
        """Makes a stream the current one, behind all that there is."""
        self.module.cuda.synchronize()
        stream = self.module.cuda.Stream()
        with self.module.cuda.stream(stream):
            yield stream.cuda_stream
        stream.synchronize()


class Cupy:
    def __init__(self) -> None:
        self.module = pytest.importorskip("cupy")
        if not self.module.cuda.is_available():
            pytest.skip("this CuPy sees no GPU")
        self.get(self.full(8, 1))

    def full(self, nbytes: int, value: int) -> Any:
        return self.module.full(nbytes, value, dtype=np.uint8)

    def fill(self, array: Any, value: int) -> None:
        array.fill(value)

    def get(self, array: Any) -> Any:
        return array.get()

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    @contextmanager
    def new_stream(self) -> Iterator[int]:
        self.module.cuda.Device().synchronize()
        stream = self.module.cuda.Stream(non_blocking=True)
        with stream:
            yield stream.ptr
        stream.synchronize()


# Of the whole module, so that what a framework opens when it is first used is no test's.


@pytest.fixture(scope="module", params=[Torch, Cupy])
def framework(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture(scope="module")
def torch() -> Any:
    return Torch().module


@pytest.fixture(scope="module")
def cupy() -> Any:
    return Cupy().module


@pytest.fixture(scope="module")
def jax() -> Any:
    module = import_jax()
    if module.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    module.numpy.ones(8).block_until_ready()
    return module


@pytest.fixture(scope="module")
def numba_cuda() -> Any:
    module = pytest.importorskip("numba.cuda")
    if not module.is_available():
        pytest.skip("this Numba sees no GPU")
    module.to_device(np.ones(8)).copy_to_host()
    return module


@pytest.fixture(scope="module")
def kernels() -> Gpu:
    return Gpu()


# torch and CuPy alike.


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_copies_come_after_the_current_stream(framework: Any, kernels: Gpu, nbytes: int) -> None:
    array = framework.full(nbytes, 1)
    with framework.new_stream() as stream:
        kernels.kernel(stream, MILLISECONDS)
        framework.fill(array, 2)
        assert (await copy_to_host(array) == 2).all()
        kernels.kernel(stream, MILLISECONDS)
        framework.fill(array, 3)
        host = np.zeros(nbytes, np.uint8)
        await copy_to_host(array, host)
        assert (host == 3).all()
        kernels.kernel(stream, MILLISECONDS)
        framework.fill(array, 4)
        await copy_to_device(np.full(nbytes, 5, np.uint8), array)
        assert (framework.get(array) == 5).all()


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_an_idle_stream_beside_a_busy_one(framework: Any, kernels: Gpu, nbytes: int) -> None:
    array = framework.full(nbytes, 1)
    with framework.new_stream() as busy, framework.new_stream():
        kernels.kernel(busy, MILLISECONDS)
        async with calls() as start:
            behind = start(copy_to_host(array, stream=busy))
            assert (await copy_to_host(array) == 1).all()
            assert not behind.ended
            assert (await behind.result() == 1).all()


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_memory_that_is_dropped_is_not_handed_out_before_its_copy_has_ended(
    framework: Any, kernels: Gpu, nbytes: int
) -> None:
    with framework.new_stream() as stream:
        array = framework.full(nbytes, 5)
        address = framework.address(array)
        kernels.kernel(stream, MILLISECONDS)
        async with calls() as start:
            call = start(copy_to_host(array))
            await turns()
            del array
            gc.collect()
            others = [framework.full(nbytes, 9) for _ in range(8)]
            assert not call.ended
            assert address not in [framework.address(other) for other in others]
            assert (await call.result() == 5).all()


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_a_cancelled_copy_leaves_what_is_allocated_next_alone(framework: Any, kernels: Gpu, nbytes: int) -> None:
    with framework.new_stream() as stream:
        array = framework.full(nbytes, 5)
        kernels.kernel(stream, MILLISECONDS)
        async with calls() as start:
            call = start(copy_to_device(np.full(nbytes, 6, np.uint8), array))
            await turns()
            call.cancel()
            await call.end()
            assert call.cancelled
            del array, call
            gc.collect()
            others = [framework.full(nbytes, 9) for _ in range(8)]
        assert all((framework.get(other) == 9).all() for other in others)


# torch.


@one_loop
@ignores_half_complex
@pytest.mark.parametrize("nbytes", [SMALL, BULK])
@pytest.mark.parametrize("name", TORCH_TYPES)
async def test_tensors_of_every_type(torch: Any, name: str, nbytes: int) -> None:
    tensor = random_tensor(torch, name, nbytes, "cuda")
    expected = bits(tensor)
    if name not in NOT_NUMPYS:
        array = await copy_to_host(tensor)
        assert (array.dtype.name, array.shape) == (name, tuple(tensor.shape))
        assert array.tobytes() == expected
    found = await copy_to_host(tensor, like="torch")
    assert (found.dtype, found.shape, found.device.type) == (tensor.dtype, tensor.shape, "cpu")
    assert bits(found) == expected
    assert found.is_pinned()
    destination = torch.zeros_like(found)
    await copy_to_host(tensor, destination)
    assert bits(destination) == expected
    back = torch.empty_like(tensor)
    await copy_to_device(destination, back)
    assert bits(back) == expected


async def test_pinned_tensors_are_known_as_such(torch: Any) -> None:
    tensor = torch.from_numpy(pattern(BULK)).cuda()
    pinned = torch.zeros(BULK, dtype=torch.uint8, pin_memory=True)
    await copy_to_host(tensor, pinned, in_stream=True)
    assert bits(pinned) == pattern(BULK).tobytes()
    with pytest.raises(ValueError, match="page-locked"):
        await copy_to_host(tensor, torch.zeros(BULK, dtype=torch.uint8), in_stream=True)
    check_nothing_in_flight()


@pytest.mark.parametrize("nbytes", [SMALL, BULK])
async def test_the_storage_of_a_tensor_is_held(torch: Any, kernels: Gpu, nbytes: int) -> None:
    with Torch().new_stream() as stream:
        parameter = torch.nn.Parameter(torch.full((nbytes,), 5, dtype=torch.uint8, device="cuda"), requires_grad=False)
        kernels.kernel(stream, MILLISECONDS)
        async with calls() as start:
            call = start(copy_to_host(parameter))
            await turns()
            parameter.data = torch.full((nbytes,), 6, dtype=torch.uint8, device="cuda")
            others = [torch.full((nbytes,), 9, dtype=torch.uint8, device="cuda") for _ in range(8)]
            assert not call.ended
            assert (await call.result() == 5).all()
        assert all((other == 9).all() for other in others)


async def test_tensors_that_require_grad(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.arange(16.0, device="cuda"))
    assert np.array_equal(await copy_to_host(parameter), np.arange(16))
    found = await copy_to_host(parameter, like="torch")
    assert not found.requires_grad
    with pytest.raises(ValueError, match=r"detach\(\)"):
        await copy_to_device(found, parameter)
    await copy_to_device(found + 1, parameter.detach())
    assert np.array_equal(await copy_to_host(parameter), np.arange(1, 17))
    check_nothing_in_flight()


async def test_tensors_that_are_refused(torch: Any) -> None:
    complexes = torch.zeros(8, dtype=torch.complex64, device="cuda")
    for tensor, reason in (
        (complexes.conj(), r"resolve_conj\(\)"),
        (complexes.conj().imag, r"resolve_neg\(\)"),
        (torch.eye(8, device="cuda").to_sparse(), r"to_dense\(\)"),
        (torch.zeros(4, 8, device="cuda").t(), r"contiguous\(\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            await copy_to_host(tensor)
    device = torch.zeros(8, device="cuda")
    with pytest.raises(ValueError, match="use copy_to_device"):
        await copy_to_host(device, device)
    with pytest.raises(TypeError, match="CPU tensor"):
        await copy_to_host(device, like=device)
    with pytest.raises(TypeError, match="like='torch' or a destination of 32 bytes"):
        await copy_to_host(torch.zeros(8, dtype=torch.complex32, device="cuda"))
    check_nothing_in_flight()


async def test_a_tensor_on_another_device(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    tensor = torch.full((8,), 3.0, device="cuda:1")
    async with Copier(device=0) as copier:
        with pytest.raises(ValueError, match="are on device 1, but this copier is for device 0"):
            await copier.copy_to_host(tensor)
        assert copier.stats().in_flight == 0
    assert (await copy_to_host(tensor) == 3).all()


async def test_a_capture_stays_valid(torch: Any) -> None:
    tensor, result = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(tensor + 1)
        for dst in (None, np.zeros(8, "f4")):
            with pytest.raises(RuntimeError, match="under capture"):
                await copy_to_host(tensor, dst)
    graph.replay()
    assert (await copy_to_host(result) == 1).all()
    del graph
    check_nothing_in_flight()


# CuPy.


@one_loop
@pytest.mark.parametrize("dtype", list("?bBhHiIqQefdFD"))
async def test_cupy_arrays_of_every_type(cupy: Any, dtype: str) -> None:
    data = (pattern(96) & 1 if dtype == "?" else pattern(96)).view(dtype).reshape(2, -1)
    array = cupy.asarray(data)
    found = await copy_to_host(array)
    assert (found.dtype, found.shape) == (data.dtype, data.shape)
    assert found.tobytes() == data.tobytes()
    back = cupy.zeros_like(array)
    await copy_to_device(found, back)
    assert back.get().tobytes() == data.tobytes()


async def test_strided_cupy_arrays(cupy: Any) -> None:
    data = pattern(64).reshape(8, 8)
    assert np.array_equal(await copy_to_host(cupy.asarray(data)[:, 2:4]), data[:, 2:4])
    with pytest.raises(ValueError, match="permuted"):
        await copy_to_host(cupy.asarray(data).T)
    check_nothing_in_flight()


async def test_cupys_current_stream_is_waited_for_beside_the_one_given(cupy: Any, kernels: Gpu) -> None:
    given = cupy.cuda.Stream(non_blocking=True)
    array = cupy.zeros(64, np.uint8)
    with Cupy().new_stream() as current:
        kernels.kernel(current, MILLISECONDS)
        array.fill(3)
        assert (await copy_to_host(array, stream=given) == 3).all()
    given.synchronize()


# JAX, Numba, RMM.


@one_loop
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn"])
async def test_jax_arrays(jax: Any, dtype: str) -> None:
    array = jax.numpy.arange(32).reshape(4, 8).astype(dtype)
    expected = np.asarray(array)
    found = await copy_to_host(array)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        await copy_to_device(found, array)
    check_nothing_in_flight()


@pytest.mark.parametrize("n", [32, 1024])
async def test_jax_arrays_that_are_being_computed(jax: Any, n: int) -> None:
    @jax.jit
    def long(array: Any) -> Any:
        return jax.lax.fori_loop(0, 2000, lambda _, x: x @ array, array)

    # Reverses the rows: an even number of times, and once.
    swap = jax.numpy.eye(n)[::-1]
    long(swap).block_until_ready()
    for _ in range(3):
        found = await copy_to_host(long(swap))
        others = [jax.numpy.full((n, n), 9.0) for _ in range(4)]
        assert np.array_equal(found, np.eye(n)[::-1])
        del others


async def test_numba_arrays(numba_cuda: Any) -> None:
    data = pattern(4096).reshape(64, 64)
    array = numba_cuda.to_device(data)
    assert np.array_equal(await copy_to_host(array), data)
    assert np.array_equal(await copy_to_host(array[:, 2:4]), data[:, 2:4])
    await copy_to_device(data[::-1].copy(), array)
    assert np.array_equal(array.copy_to_host(), data[::-1])
    check_nothing_in_flight()


async def test_a_numba_array_that_names_a_stream(numba_cuda: Any, kernels: Gpu) -> None:
    stream = numba_cuda.stream()
    array = numba_cuda.device_array(64, np.uint8, stream=stream)
    handle = array.__cuda_array_interface__["stream"]
    source = numba_cuda.to_device(np.full(64, 3, np.uint8))
    numba_cuda.synchronize()
    kernels.kernel(handle, MILLISECONDS)
    array.copy_to_device(source, stream=stream)
    assert (await copy_to_host(array) == 3).all()


async def test_buffers_of_rmm() -> None:
    pytest.importorskip("rmm")
    buffer = importlib.import_module("rmm").DeviceBuffer.to_device(bytes(pattern(100)))
    assert (await copy_to_host(buffer)).tobytes() == pattern(100).tobytes()
    await copy_to_device(bytes(100), buffer)
    assert buffer.tobytes() == bytes(100)
    check_nothing_in_flight()
