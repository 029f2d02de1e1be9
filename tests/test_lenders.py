"""Small copies of what lends its memory by DLPack: they take the short way, and the lender gets back what it lent."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import types
from typing import Any

import numpy as np
import pytest
from calls import SMALL, Stream, calls, content, on_device, turns
from dlpack_producer import UINT, Producer, Tensor
from kinds import pattern
from tensors import check_nothing_in_flight

from aiocuda_copy import copy_to_device, copy_to_host, pinned_empty
from aiocuda_copy.testing import DeviceArray, Emulator

READ_ONLY = 1


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Versioned(Producer):
    """As its base, of DLPack 1."""

    def __init__(self, base: DeviceArray, *, major: int = 1, flags: int = 0) -> None:
        super().__init__(base, (base.nbytes,), UINT, 8)
        self._major, self._flags = major, flags

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, **_: Any) -> Any:
        self.streams.append(stream)
        return self.lend(
            _Versioned(self._major, 0, None, self.deleter(), self._flags, self.tensor()), b"dltensor_versioned"
        )


class Old(Producer):
    """Knows of no versions."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return super().__dlpack__(stream=stream)


class Interface(Producer):
    """Has more to tell than DLPack does."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.base.__cuda_array_interface__


def lender(kind: type[Producer], base: DeviceArray) -> Producer:
    return Versioned(base) if kind is Versioned else kind(base, (base.nbytes,), UINT, 8)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", [Producer, Versioned, Old])
async def test_there_and_back(gpu: Emulator | None, kind: type[Producer]) -> None:
    stream = Stream()
    there, back = lender(kind, on_device(SMALL, 1)), bytearray(SMALL)
    await copy_to_host(there, back, stream=stream.handle)
    await copy_to_device(pattern(SMALL), there, stream=stream.handle)
    assert (there.streams, there.lent, set(back)) == ([stream.handle] * 2, 0, {1})
    assert np.array_equal(there.base.to_numpy(), pattern(SMALL))


@pytest.mark.parametrize(("named", "told"), [(None, 1), (0, 1), (1, 1), (2, 2)])
async def test_the_default_streams_have_names_of_their_own(gpu: Emulator | None, named: int | None, told: int) -> None:
    there, back = lender(Versioned, on_device(SMALL, 1)), bytearray(SMALL)
    await copy_to_host(there, back, stream=named)
    assert (there.streams, set(back)) == ([told], {1})


async def test_what_is_lent_is_held_while_the_copy_waits(emulated_gpu: Emulator) -> None:
    stream = Stream()
    there, back = lender(Versioned, on_device(SMALL, 1)), bytearray(SMALL)
    emulated_gpu.hold(stream)
    emulated_gpu.kernel(stream)
    async with calls() as start:
        call = start(copy_to_host(there, back, stream=stream.handle))
        await turns()
        assert there.lent == 1
        emulated_gpu.release(stream)
        await call.result()
    await turns()
    gc.collect()
    assert (there.lent, set(back)) == (0, {1})


async def test_a_version_that_is_not_known_is_given_back(gpu: Emulator | None) -> None:
    there = Versioned(on_device(SMALL, 1), major=2)
    # cuda.core is asked, and may know it.
    with contextlib.suppress(ValueError):
        await copy_to_host(there, bytearray(SMALL))
    assert len(there.streams) == 2
    gc.collect()
    assert there.lent == 0
    check_nothing_in_flight()


async def test_what_must_not_be_written_to(gpu: Emulator | None) -> None:
    there, back = Versioned(on_device(SMALL, 1), flags=READ_ONLY), bytearray(SMALL)
    with pytest.raises(ValueError, match="read-only"):
        await copy_to_device(pattern(SMALL), there)
    await copy_to_host(there, back)
    gc.collect()
    assert (there.lent, set(back)) == (0, {1})


@pytest.mark.parametrize("shape", [(2**40, 2**40), (-1, SMALL), (SMALL // 2, 2, 0)], ids=str)
async def test_shapes_that_are_none(gpu: Emulator | None, shape: tuple[int, ...]) -> None:
    there = Producer(on_device(SMALL, 1), shape, UINT, 8)
    with pytest.raises(ValueError, match=r"bytes|does not export|claims"):
        await copy_to_host(there, bytearray(SMALL))
    check_nothing_in_flight()


async def test_the_interface_comes_first(gpu: Emulator | None) -> None:
    there, back = Interface(on_device(SMALL, 1), (SMALL,), UINT, 8), bytearray(SMALL)
    await copy_to_host(there, back)
    assert (there.streams, set(back)) == ([], {1})


@pytest.fixture
def jax_like(monkeypatch: pytest.MonkeyPatch) -> type[Producer]:
    """A stand-in for JAX's arrays, which are on a real device only."""
    module: Any = types.ModuleType("jax")
    module.core = types.SimpleNamespace(Tracer=type("Tracer", (), {}))
    module.Array = type("Array", (), {})
    monkeypatch.setitem(sys.modules, "jax", module)

    class ArrayImpl(Versioned, module.Array):  # type: ignore[misc, name-defined]
        dtype, shape, nbytes = np.dtype("f4"), (SMALL // 4,), SMALL

        def is_deleted(self) -> bool:
            return False

    ArrayImpl.__module__ = "jaxlib._jax"
    return ArrayImpl


@pytest.mark.usefixtures("short")
async def test_arrays_of_jax(emulated_gpu: Emulator, jax_like: Any) -> None:
    there, stream = jax_like(DeviceArray.from_numpy(pattern(SMALL))), Stream()
    pinned_empty(1)  # to grow the pool takes the long way
    found = await copy_to_host(there, stream=stream.handle)
    assert (found.dtype, found.shape) == (np.float32, (SMALL // 4,))
    assert np.array_equal(found.view(np.uint8), pattern(SMALL))
    assert (there.streams, there.lent) == ([stream.handle], 0)


async def test_arrays_of_jax_are_not_written_to(emulated_gpu: Emulator, jax_like: Any) -> None:
    there = jax_like(DeviceArray.from_numpy(pattern(SMALL)))
    with pytest.raises(ValueError, match="read-only"):
        await copy_to_device(bytes(SMALL), there)
    gc.collect()
    assert there.lent == 0
    assert np.array_equal(content(there.base), pattern(SMALL))
