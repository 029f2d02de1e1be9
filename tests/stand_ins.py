"""Stand-ins for torch and CuPy on the emulated driver: modules and classes that answer what theirs would answer.

They are for the logic that asks them. What the real ones do is tested with the real ones, in test_frameworks.py.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from aiocuda_copy.testing import DeviceArray


class Storage:
    """What holds a tensor's memory."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array._memory.ptr

    def nbytes(self) -> int:
        return self.array._memory.nbytes


class Dtype:
    """The type of a tensor's elements."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


class TensorBase:
    """A tensor on the device."""

    layout: Any = "torch.strided"
    is_cuda, is_cpu, requires_grad = True, False, False

    def __init__(self, array: DeviceArray) -> None:
        self.storage, self.array = Storage(array), array
        self.shape, self.dtype = array.shape, Dtype(str(array.dtype))
        self.device = types.SimpleNamespace(type="cuda", index=array.device)

    @property
    def data(self) -> TensorBase:
        return self

    @data.setter
    def data(self, other: TensorBase) -> None:
        self.storage, self.array = other.storage, other.array

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def is_contiguous(self) -> bool:
        return bool(self.array._geometry.flags.c_contiguous)

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.dtype.itemsize for s in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ptr

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.dtype.itemsize

    def get_device(self) -> int:
        return self.array.device

    def untyped_storage(self) -> Storage:
        return self.storage


def torch(monkeypatch: pytest.MonkeyPatch, current: dict[int, int] | None = None) -> Any:
    """A module in torch's place, with the current stream of each device."""
    current = {} if current is None else current
    module: Any = types.ModuleType("torch")
    module.strided = TensorBase.layout
    module.Tensor = type("Tensor", (TensorBase,), {"__module__": "torch"})
    module.nn = types.SimpleNamespace(Parameter=type("Parameter", (module.Tensor,), {"__module__": "torch.nn"}))
    module._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: current.get(device, 0))
    module.cuda = types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=current.get(device, 0))
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


class CupyBase:
    """An array on the device."""

    def __init__(self, array: DeviceArray, current: dict[str, int]) -> None:
        self.array, self.current = array, current
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.data = types.SimpleNamespace(ptr=array.ptr, device_id=array.device)
        self.flags = types.SimpleNamespace(c_contiguous=array._geometry.flags.c_contiguous)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__ | {"stream": self.current["stream"] or 1}


def cupy(monkeypatch: pytest.MonkeyPatch, current: dict[str, int]) -> Any:
    """A module in CuPy's place; ``current`` has the current ``"stream"`` and ``"device"``."""
    module: Any = types.ModuleType("cupy")
    module.ndarray = type("ndarray", (CupyBase,), {"__module__": "cupy"})
    module.cuda = types.SimpleNamespace(
        get_current_stream=lambda device=None: types.SimpleNamespace(ptr=current["stream"]),
        runtime=types.SimpleNamespace(getDevice=lambda: current["device"]),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def on_device(nbytes: int = 64, value: int = 7) -> DeviceArray:
    return DeviceArray.from_numpy(np.full(nbytes, value, np.uint8))
