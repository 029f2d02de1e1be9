"""Arrays that tell of their memory by DLPack and by nothing else, of any type, on any kind of device."""

from __future__ import annotations

import ctypes
from typing import Any

from aiocuda_copy.testing import DeviceArray

INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6
FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT4 = 10, 12, 17
CPU, CUDA, VULKAN = 1, 2, 7


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Producer:
    """Device memory as an array of a DLPack type. It counts what it has lent and not been given back."""

    def __init__(
        self, base: DeviceArray, shape: tuple[int, ...], code: int, bits: int, lanes: int = 1, device: int = CUDA
    ) -> None:
        self.base, self.place = base, (device, base.device)
        self.streams: list[int | None] = []
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._type = (code, bits, lanes)
        self._managed: list[ctypes.Structure] = []
        self._given_back: list[int] = []
        # Not a method of this object: in a cycle, the memory would be freed whenever the collector comes by, and on a
        # GPU that waits for whichever kernel runs by then.
        self._deleter = _DELETER(self._given_back.append)

    @property
    def lent(self) -> int:
        return len(self._managed) - len(self._given_back)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.streams.append(stream)
        return self.lend(_Managed(self.tensor(), None, self.deleter()), b"dltensor")

    def tensor(self) -> Tensor:
        return Tensor(self.base.ptr, *self.place, len(self._shape), *self._type, self._shape, None, 0)

    def deleter(self) -> ctypes.c_void_p:
        return ctypes.cast(self._deleter, ctypes.c_void_p)

    def lend(self, managed: ctypes.Structure, name: bytes) -> Any:
        self._managed.append(managed)
        return _new_capsule(ctypes.addressof(managed), name, None)
