"""Types of elements that a type string does not tell: structures, and those of ml_dtypes."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
from kinds import pattern
from tensors import ignores_half_complex

from aiocuda_copy import collect, copy_to_device, copy_to_host, prefetch
from aiocuda_copy._results import result_type
from aiocuda_copy.testing import DeviceArray, Emulator

# On the short way and on the long one.
COUNTS = [24, 60_000]
STRUCTURE = np.dtype([("a", "<i4"), ("b", "<f4")])
TYPES = {
    "a structure": STRUCTURE,
    "an aligned structure": np.dtype([("a", "i1"), ("b", "f8", (2,))], align=True),
    "fields out of order": np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [8, 0]}),
    "a structure of ml_dtypes": [("a", "bfloat16"), ("b", "float8_e5m2")],
} | {name: name for name in ("bfloat16", "float8_e5m2", "float8_e4m3fn", "int4")}


@pytest.fixture
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    what = TYPES[request.param]
    if isinstance(what, np.dtype):
        return what
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if isinstance(what, str):
        return np.dtype(getattr(ml_dtypes, what))
    return np.dtype([(name, getattr(ml_dtypes, scalar)) for name, scalar in what])


class Foreign:
    """Tells of its memory by the CUDA array interface and by nothing else."""

    def __init__(self, base: DeviceArray, **changes: Any) -> None:
        self.base, self.changes = base, changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.base.__cuda_array_interface__ | self.changes


def array_of(dtype: np.dtype, count: int) -> np.ndarray:
    return pattern(count * dtype.itemsize).view(dtype).reshape(2, -1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", TYPES, indirect=True)
async def test_there_and_back(gpu: Emulator | None, dtype: np.dtype, count: int) -> None:
    array = array_of(dtype, count)
    async with prefetch([array]) as batches, collect(batches) as results:
        (found,) = [result async for result in results]
    assert (found.dtype, found.shape, found.tobytes()) == (dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", TYPES, indirect=True)
async def test_new_arrays(gpu: Emulator | None, dtype: np.dtype, count: int) -> None:
    array = array_of(dtype, count)
    async with prefetch([array]) as batches:
        for device in (DeviceArray.from_numpy(array), await anext(batches)):
            found = await copy_to_host(device)
            assert (device.dtype, found.dtype, found.shape) == (dtype, dtype, array.shape)
            assert found.tobytes() == array.tobytes()
            # Which names no type that NumPy could not read.
            assert np.dtype(device.__cuda_array_interface__["typestr"]).itemsize == dtype.itemsize


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
async def test_new_tensors(gpu: Emulator | None, name: str, count: int) -> None:
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    array = array_of(np.dtype(getattr(ml_dtypes, name)), count)
    found = await copy_to_host(DeviceArray.from_numpy(array), like="torch")
    assert (found.dtype, found.shape) == (getattr(torch, name), array.shape)
    assert found.view(torch.uint8).numpy().tobytes() == array.tobytes()


async def test_a_host_array_has_the_type(gpu: Emulator | None) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = array_of(np.dtype(ml_dtypes.bfloat16), 24)
    device = DeviceArray.from_numpy(np.zeros_like(array))
    await copy_to_device(array, device)
    assert device.to_numpy().tobytes() == array.tobytes()


async def test_a_view_has_the_type(gpu: Emulator | None) -> None:
    array = array_of(STRUCTURE, 24)
    view = DeviceArray.from_numpy(array)[:, ::2]
    assert np.array_equal(view.to_numpy(), array[:, ::2])
    assert np.array_equal(await copy_to_host(view), array[:, ::2])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("itemsize", "interface", "expected"),
    [
        (8, {"typestr": "|V8", "descr": STRUCTURE.descr}, STRUCTURE),
        (8, {"typestr": "|V8", "descr": [("a", "<i2"), ("", "|V2"), ("b", "<f4")]}, None),
        (8, {"typestr": "|V8", "descr": [("", "|V8")]}, "V8"),
        (8, {"typestr": "|V8", "descr": [("a", "<f1"), ("b", "|V7")]}, "V8"),
        (8, {"typestr": "|V8", "descr": [("of another size", "<i4")]}, "V8"),
        (8, {"typestr": "|V8", "descr": 3}, "V8"),
        # Which goes for types that the string does not tell.
        (8, {"typestr": "<f8", "descr": STRUCTURE.descr}, "f8"),
        (1, {"typestr": "<f1"}, "V1"),
        (1, {"typestr": "|V1"}, "V1"),
    ],
    ids=str,
)
async def test_the_interface_of_others(
    gpu: Emulator | None, itemsize: int, interface: dict[str, Any], expected: Any, count: int
) -> None:
    array = array_of(np.dtype(f"V{itemsize}"), count)
    source = Foreign(DeviceArray.from_numpy(array), **interface)
    if expected is None:
        expected = {"names": ["a", "b"], "formats": ["<i2", "<f4"], "offsets": [0, 4]}
    async with collect([source]) as results:
        for found in (await copy_to_host(source), await anext(results)):
            assert (found.dtype, found.shape) == (np.dtype(expected), array.shape)
            assert found.tobytes() == array.tobytes()


async def test_one_type_string_of_many_types(gpu: Emulator | None) -> None:
    record = np.dtype((np.record, STRUCTURE))
    for dtype in (STRUCTURE, np.dtype("<u4,<u4"), np.dtype("V8"), record, STRUCTURE):
        found = (await copy_to_host(DeviceArray(3, dtype))).dtype
        assert (found, found.type) == (dtype, dtype.type)


@pytest.mark.parametrize("count", COUNTS)
async def test_objects_in_a_structure_are_refused(gpu: Emulator | None, count: int) -> None:
    source = Foreign(DeviceArray(count, "V8"), typestr="|V8", descr=[("a", "|O")])
    with pytest.raises(TypeError, match="Python objects"):
        await copy_to_host(source)


WITHOUT_PACKAGES = """
import asyncio, sys
sys.modules["ml_dtypes"] = sys.modules["torch"] = sys.modules["jax"] = None
import dlpack_producer as dlpack
from aiocuda_copy import collect, copy_to_host
from aiocuda_copy.testing import DeviceArray

async def main():
    memory = DeviceArray(64)
    brain = dlpack.Producer(memory, (32,), dlpack.BFLOAT, 16)
    async with collect([brain]) as results:
        others = [copy_to_host(memory, like=name) for name in ("torch", "jax")]
        for awaitable in (copy_to_host(brain), anext(results), *others):
            try:
                await awaitable
            except TypeError as exc:
                print(exc)

asyncio.run(main())
"""


def test_a_sentence_names_the_extra_that_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES],
        env={
            **os.environ,
            "AIOCUDA_COPY_DRIVER": "emulated",
            # An empty entry would mean the current directory.
            "PYTHONPATH": os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")])),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "NumPy has no bfloat16: pip install 'aiocuda-copy[dtypes]' (ml_dtypes), or pass like='torch' or a destination "
        "of 64 bytes",
        "NumPy has no bfloat16: pip install 'aiocuda-copy[dtypes]' (ml_dtypes), or view it as bytes, such as with "
        "tensor.view(torch.uint8)",
        *(
            f"like='{name}' needs the package '{name}', which is not installed: pip install 'aiocuda-copy[{name}]', or "
            f"leave like= out for a NumPy array"
            for name in ("torch", "jax")
        ),
    ]


def test_jax_takes_no_floats_that_are_not_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    canonical = types.SimpleNamespace(canonicalize_dtype=lambda dtype: dtype)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(dtypes=canonical))
    with pytest.raises(TypeError, match="JAX takes no float8_e5m2"):
        result_type(None, np.dtype(ml_dtypes.float8_e5m2), 8, "jax")
    assert result_type(None, "<f4", 8, "jax").numpy == np.float32


@pytest.mark.parametrize("like", ["numpy", "torch", None])
def test_quantized_tensors_are_told_of_their_integers(like: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"quint8 .*; pass tensor\.int_repr\(\)"):
        result_type(None, torch.quint8, 8, like)


@ignores_half_complex
async def test_empty_is_asked_for_no_type_that_numpy_lacks(gpu: Emulator | None) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(8, dtype=torch.complex32)
    with pytest.raises(TypeError, match="no type for complex32; view it as bytes"):
        async with prefetch([tensor], empty=DeviceArray) as batches:
            await anext(batches)


# Copies of DeviceArray.


@dataclasses.dataclass
class Batch:
    data: Any


@pytest.mark.parametrize("shape", [(3, 4), ()])
@pytest.mark.parametrize("dtype", [np.dtype("f4"), STRUCTURE], ids=str)
def test_a_deep_copy_has_its_own_memory(gpu: Emulator | None, shape: tuple[int, ...], dtype: np.dtype) -> None:
    array = np.array(pattern(12 * dtype.itemsize).view(dtype)[: np.prod(shape, dtype=int)].reshape(shape))
    device = DeviceArray.from_numpy(array)
    deep, shallow = dataclasses.asdict(Batch(device))["data"], copy.copy(device)
    assert (deep.shape, deep.dtype, deep.device) == (shape, dtype, device.device)
    assert shallow.ptr == device.ptr != deep.ptr
    assert shallow._memory is device._memory
    device.free()
    assert deep.to_numpy().tobytes() == array.tobytes()


def test_a_device_array_cannot_be_pickled(gpu: Emulator | None) -> None:
    with pytest.raises(TypeError, match="to_numpy"):
        pickle.dumps(DeviceArray(4))
