"""What any array-like says of its memory: the first step to a region (``_regions.py``).

No driver call, no event loop, and no import of a framework that the object does not come from.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np

from . import _native
from ._layout import compact, extent

__all__ = ["Export", "cuda_array_type", "export", "name_of", "torch_type", "typestr_type"]

Role = Literal["source", "destination"]
Side = Literal["device", "host", "unknown"]

_ACCEPTED = (
    "a device array (anything with __cuda_array_interface__ or __dlpack__: torch, CuPy, JAX, Numba), a cuda.core.Buffer"
    ", a NumPy array, a CPU tensor, or an object with the buffer protocol"
)

# DLDeviceType: where DLPack says that the memory is.
_DLPACK_SIDES: dict[int, Side] = {1: "host", 2: "device", 3: "host", 13: "unknown"}
_DLPACK_ERRORS = (BufferError, RuntimeError, TypeError, ValueError)


class Export(NamedTuple):
    """What an object says about its memory. A named tuple, for it is made several times in a call of microseconds."""

    address: int
    nbytes: int
    # From the first byte to the last one: more than nbytes where there are strides.
    extent: int
    # None where the object is just bytes.
    shape: tuple[int, ...] | None
    # In bytes; None where C-contiguous.
    strides: tuple[int, ...] | None
    itemsize: int
    # None where NumPy has no type for it; type_name is then the framework's name, if it has one.
    dtype: np.dtype[Any] | None
    type_name: str | None
    readonly: bool
    # What must be held for the memory to stay valid.
    owner: object
    side: Side
    # Work of this stream must be waited for, says the object.
    stream: int | None = None
    framework: Literal["torch", "cupy"] | None = None
    device: int | None = None


def export(obj: object, *, role: Role, stream: int | None = None) -> Export:
    """Reads an object's address, size and strides, and takes hold of its memory.

    Parameters
    ----------
    obj
        An array, a tensor or a buffer, on the device or on the host.
    role
        A destination must be writable.
    stream
        The handle of the stream that the copy is ordered in, which DLPack producers on the device are told so that they
        make it wait for their own; ``None`` means the legacy default stream.

    Raises
    ------
    TypeError
        The object is nothing of the kind.
    ValueError
        It is read-only and a destination, masked, or strided in a way that cannot be copied.
    RuntimeError
        It is a closed Buffer.
    """
    export = _export(obj, role, stream)
    if role == "destination" and export.readonly:
        raise ValueError(
            f"the destination ({name_of(obj)}) is read-only; pass {_writable(obj, export.side)} in its place"
        )
    if export.address == 0 and export.nbytes:
        raise ValueError(f"the {role} ({name_of(obj)}) has {export.nbytes} bytes at a null address")
    return export


def _export(obj: Any, role: Role, stream: int | None) -> Export:
    modules = sys.modules
    if isinstance(obj, np.ndarray):
        # Also for Numba's mapped arrays, which have the CUDA array interface too: the host memory is what they are.
        return _export_ndarray(obj, role)
    kind = type(obj)
    if kind is bytes or kind is bytearray or kind is memoryview:
        return _export_buffer(obj, role)
    if isinstance(obj, (bool, int, float, complex, str, np.generic)) or obj is None:
        raise _unaccepted(obj, role)
    core = modules.get("cuda.core")
    if core is not None and isinstance(obj, getattr(core, "Buffer", ())):
        return _export_core_buffer(obj, role)
    torch = modules.get("torch")
    if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
        return _export_tensor(obj, role)
    jax = modules.get("jax")
    if jax is not None and isinstance(obj, getattr(jax, "Array", ())):
        return _export_jax(jax, obj, role, stream)
    # Types are asked, not instances: a class with __getattr__ answers to every name.
    if hasattr(kind, "__cuda_array_interface__") or "__cuda_array_interface__" in getattr(obj, "__dict__", ()):
        # Some have it for their arrays on a device alone.
        interface = getattr(obj, "__cuda_array_interface__", None)
        if interface is not None and not isinstance(interface, dict):
            raise ValueError(f"the {role} ({name_of(obj)}) has a malformed __cuda_array_interface__: it is no dict")
        # Before version 3 the interface says nothing about streams; DLPack does, so it is the one to ask.
        if interface is not None and (interface.get("version", 0) >= 3 or not hasattr(kind, "__dlpack__")):
            return _export_cuda_array(obj, interface, role)
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _export_dlpack(obj, role, stream)
    try:
        view = memoryview(obj)
    except TypeError:
        raise _unaccepted(obj, role) from None
    return _export_buffer(view, role)


def name_of(obj: object) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _writable(obj: object, side: Side) -> str:
    """What to pass in the place of a destination that is read-only."""
    if isinstance(obj, np.ndarray):
        return "a writable array, such as numpy.empty_like(array),"
    if side == "device":
        return "a writable array on the device"
    return "a writable buffer, such as bytearray(nbytes) or numpy.empty(nbytes, numpy.uint8),"


def _unaccepted(obj: object, role: Role) -> TypeError:
    hint = ""
    if isinstance(obj, int) and not isinstance(obj, bool):
        hint = "; wrap a raw address with cuda.core.Buffer.from_handle(address, nbytes, owner=...)"
    elif isinstance(obj, str):
        hint = "; encode it first"
    elif isinstance(obj, (bool, float, complex, np.generic, list, tuple)):
        hint = "; make an array of it first, with numpy.asarray(...)"
    return TypeError(f"the {role} must be {_ACCEPTED}, not {name_of(obj)}{hint}")


def _strided(obj: object, role: Role, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
    return compact(shape, strides, itemsize, f"the {role} ({name_of(obj)})")


def _export_ndarray(array: np.ndarray[Any, Any], role: Role) -> Export:
    dtype = array.dtype
    if dtype.hasobject:  # also inside a structure
        raise TypeError(f"the {role} is a NumPy array of Python objects ({dtype}), whose bytes mean nothing elsewhere")
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"the {role} is a masked array; pass array.filled() or array.data")
    shape, itemsize, nbytes = array.shape, dtype.itemsize, array.nbytes
    flags = array.flags
    strides = None if flags.c_contiguous else _strided(array, role, shape, array.strides, itemsize)
    try:
        address = _native.buffer_address(array)
    except (
        ValueError,
        BufferError,
        TypeError,
        NotImplementedError,
    ):  # datetime64 and ml_dtypes' have no PEP 3118 format
        address = array.__array_interface__["data"][0]
    return Export(
        address,
        nbytes,
        extent(shape, strides, itemsize, nbytes),
        shape,
        strides,
        itemsize,
        dtype,
        None,
        not flags.writeable,
        array,
        "host",
    )


def _export_buffer(obj: Any, role: Role) -> Export:
    # An own view, so that the caller's may be released meanwhile.
    view = memoryview(obj)
    if view.suboffsets:
        raise ValueError(f"the {role} ({name_of(view.obj)}) is a buffer with suboffsets; copy it into a contiguous one")
    shape, itemsize, nbytes = view.shape or (), view.itemsize, view.nbytes
    if "O" in re.sub(":[^:]*:", "", view.format):
        raise TypeError(f"the {role} ({name_of(view.obj)}) is a buffer of Python objects")
    strides = None if view.c_contiguous else _strided(view.obj, role, shape, view.strides or (), itemsize)
    return Export(
        _native.buffer_address(view),
        nbytes,
        extent(shape, strides, itemsize, nbytes),
        shape,
        strides,
        itemsize,
        _buffer_dtype(view.format, itemsize),
        None,
        view.readonly,
        view,
        "host",
    )


def _buffer_dtype(format: str, itemsize: int) -> np.dtype[Any] | None:
    try:
        dtype = np.dtype(format)
    except (TypeError, ValueError):
        return None
    # "=l" has four bytes in PEP 3118 and eight in NumPy.
    return dtype if dtype.itemsize == itemsize else None


def _export_core_buffer(buffer: Any, role: Role) -> Export:
    if buffer.is_closed:
        raise RuntimeError(f"the {role} is a Buffer that has been closed")
    nbytes = int(buffer.size)
    side: Side = "unknown"
    device = None
    # Without a memory resource the Buffer itself would have to ask the driver, and that is what classify() goes by.
    resource = buffer.memory_resource
    if resource is not None:
        on_device, on_host = bool(resource.is_device_accessible), bool(resource.is_host_accessible)
        if on_device is not on_host:
            side = "device" if on_device else "host"
        if side == "device" and resource.device_id >= 0:
            device = int(resource.device_id)
    return Export(
        int(buffer.handle), nbytes, nbytes, None, None, 1, None, None, False, buffer, side, None, None, device
    )


def _export_jax(jax: Any, array: Any, role: Role, stream: int | None) -> Export:
    if isinstance(array, jax.core.Tracer):
        raise TypeError(
            f"the {role} is a JAX tracer, which stands for an array that does not exist yet: copy outside of the "
            f"function that jit, grad or vmap transforms"
        )
    if not hasattr(type(array), "__dlpack__"):
        raise TypeError(
            f"the {role} is a JAX array of {array.dtype}, which has no memory to copy; pass jax.random.key_data(array)"
        )
    if array.is_deleted():
        raise ValueError(f"the {role} is a JAX array that has been deleted, or donated to a function")
    # Its DLPack does not say so, but all that JAX compiles relies on it.
    return _export_dlpack(array, role, stream)._replace(readonly=True)


_torch_types: dict[Any, tuple[np.dtype[Any] | None, str]] = {}
_NUMPY_NAMES = frozenset({"bool", "complex64", "complex128", "float16", "float32", "float64"}) | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def torch_type(dtype: Any) -> tuple[np.dtype[Any] | None, str]:
    """NumPy's counterpart of a torch type, where NumPy itself has one, and the type's name."""
    known = _torch_types.get(dtype)
    if known is None:
        name = str(dtype).removeprefix("torch.")
        known = _torch_types[dtype] = (np.dtype(name) if name in _NUMPY_NAMES else None, name)
    return known


def _export_tensor(tensor: Any, role: Role) -> Export:
    if getattr(tensor, "is_nested", False):
        raise ValueError(
            f"the {role} is a nested torch tensor; pass its parts, tensor.unbind(), or all of them, tensor.values()"
        )
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"the {role} is a torch tensor of layout {tensor.layout}; pass tensor.to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"the {role} is a lazily conjugated or negated torch tensor; pass tensor.resolve_conj().resolve_neg()"
        )
    if role == "destination" and tensor.requires_grad:
        raise ValueError("the destination is a torch tensor that requires grad; pass tensor.detach()")
    place = tensor.device
    side: Side
    if place.type == "cuda":
        side, device = "device", place.index
    elif place.type == "cpu":
        side, device = "host", None
    else:
        raise ValueError(f"the {role} is a torch tensor on the device {place}; CUDA and CPU tensors can be copied")
    shape = tuple(tensor.shape)
    itemsize = int(tensor.element_size())
    nbytes = math.prod(shape) * itemsize
    strides = None
    if not tensor.is_contiguous():
        strides = _strided(tensor, role, shape, tuple(s * itemsize for s in tensor.stride()), itemsize)
    try:
        address, storage = int(tensor.data_ptr()), tensor.untyped_storage()
        base, end = int(storage.data_ptr()), int(storage.data_ptr()) + int(storage.nbytes())
    except RuntimeError as exc:  # of what stands for a tensor, or several, or inside vmap, grad or a compiler
        # Of a distributed tensor and of a masked one.
        parts = [name for name in ("to_local", "get_data") if hasattr(tensor, name)]
        what = f"pass tensor.{parts[0]}()" if parts else exc
        raise ValueError(f"the {role} ({name_of(tensor)}) is a tensor that has no memory of its own: {what}") from exc
    reach = extent(shape, strides, itemsize, nbytes)
    if reach and not (base and base <= address and address + reach <= end):
        raise ValueError(
            f"the {role} is a torch tensor that has no memory, or too little: its storage has been resized, or it only "
            f"stands for a tensor"
        )
    dtype, name = torch_type(tensor.dtype)
    return Export(
        address,
        nbytes,
        reach,
        shape,
        strides,
        itemsize,
        dtype,
        name,
        False,
        # The storage too: assigning to tensor.data gives the tensor another one.
        (tensor, storage),
        side,
        None,
        "torch",
        device,
    )


def _export_cuda_array(obj: Any, interface: dict[str, Any], role: Role) -> Export:
    if interface.get("mask") is not None:
        raise ValueError(
            f"the {role} ({name_of(obj)}) is masked, which a copy cannot keep; pass the array without its mask"
        )
    stream = interface.get("stream")
    if stream is not None:
        if isinstance(stream, bool) or not isinstance(stream, int) or stream <= 0:
            raise ValueError(
                f"the {role} ({name_of(obj)}) names the stream {stream!r} in its __cuda_array_interface__; the "
                f"protocol allows None, 1 (legacy default), 2 (per-thread default) or a handle"
            )
        stream = int(stream)
    try:
        address, readonly = interface["data"]
        address, dtype = operator.index(address or 0), cuda_array_type(obj, interface)
        shape, itemsize = tuple(map(operator.index, interface["shape"])), dtype.itemsize
        nbytes = math.prod(shape) * itemsize
        if not (0 <= address < 2**64 and min(shape, default=0) >= 0 and nbytes < 2**63):
            raise ValueError("an address, a size or a shape that no memory has")
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise ValueError(f"the {role} ({name_of(obj)}) has a malformed __cuda_array_interface__: {exc!r}") from exc
    if dtype.hasobject:
        raise TypeError(f"the {role} ({name_of(obj)}) is an array of Python objects")
    strides = interface.get("strides")
    if strides is not None:
        strides = _strided(obj, role, shape, tuple(int(s) for s in strides), itemsize)
    framework: Literal["cupy"] | None = None
    if "cupy" in sys.modules and any(base.__module__.partition(".")[0] == "cupy" for base in type(obj).__mro__):
        framework = "cupy"
    return Export(
        address,
        nbytes,
        extent(shape, strides, itemsize, nbytes),
        shape,
        strides,
        itemsize,
        dtype,
        None,
        bool(readonly),
        obj,
        "device",
        stream,
        framework,
    )


def typestr_type(typestr: str) -> np.dtype[Any]:
    """The type that a type string names; items of that size, ``V``, where NumPy knows none, or it names none."""
    try:
        return np.dtype(typestr)
    except TypeError:  # also for "<f1", which NumPy itself writes for ml_dtypes.float8_e5m2
        return np.dtype(f"V{int(typestr[2:])}")


def cuda_array_type(obj: Any, interface: dict[str, Any]) -> np.dtype[Any]:
    """The type of an array's elements. Where the type string has none, the array itself may know it, or the ``descr``
    of NumPy's array interface has it."""
    dtype = typestr_type(interface["typestr"])
    if dtype.kind != "V":
        return dtype
    known = [getattr(obj, "dtype", None)]
    with suppress(Exception):  # where there is none, or none that NumPy can read
        known.append(np.lib.format.descr_to_dtype(interface["descr"]))
    for own in known:
        if isinstance(own, np.dtype) and own.itemsize == dtype.itemsize and own != dtype and own.names != ():
            return own
    return dtype


def _export_dlpack(obj: Any, role: Role, stream: int | None) -> Export:
    # cuda.core knows every version of DLPack; NumPy's own importer drops the writability of older ones.
    from cuda.core.utils import StridedMemoryView

    refused = f"the {role} ({name_of(obj)}) does not export its memory"
    try:
        device_type, ordinal = map(int, obj.__dlpack_device__())
    except Exception as exc:
        raise ValueError(f"{refused}: {_said(exc)}") from exc
    side = _DLPACK_SIDES.get(device_type)
    if side is None:
        raise ValueError(
            f"the {role} ({name_of(obj)}) is on a device of DLPack's type {device_type}, which is not CUDA's"
        )
    consumer = None if side == "host" else (stream or 1)
    try:
        view = StridedMemoryView.from_dlpack(obj, stream_ptr=-1 if consumer is None else consumer)
        # It looks at the type only now, and refuses those whose elements are no whole bytes.
        itemsize = int(view._layout.itemsize)
    except Exception as exc:
        no_capsule = isinstance(exc, AssertionError) and not exc.args  # which is how cuda.core puts it
        raise ValueError(f"{refused}: {'its __dlpack__() returned no capsule' if no_capsule else _said(exc)}") from exc
    shape = tuple(int(n) for n in view.shape)
    dtype, type_name = _dlpack_type(obj, view, itemsize)
    nbytes = math.prod(shape) * itemsize
    strides = view.strides
    if strides is not None:
        strides = _strided(obj, role, shape, tuple(int(s) * itemsize for s in strides), itemsize)
    return Export(
        int(view.ptr),
        nbytes,
        extent(shape, strides, itemsize, nbytes),
        shape,
        strides,
        itemsize,
        dtype,
        type_name,
        bool(view.readonly),
        (obj, view),
        side,
        # The producer has made this one wait, which need not be the stream of the copy.
        consumer,
        None,
        ordinal if side == "device" else None,
    )


def _said(exc: Exception) -> str:
    # The text of others may say nothing: that of a KeyError is a key.
    return str(exc) if isinstance(exc, _DLPACK_ERRORS) and exc.args else repr(exc)


def _dlpack_type(obj: Any, view: Any, itemsize: int) -> tuple[np.dtype[Any] | None, str | None]:
    """The type of a DLPack view; else its name, for a message."""
    try:
        return np.dtype(view.dtype), None
    except (TypeError, NotImplementedError) as exc:
        if "ml_dtypes" in str(exc):  # which cuda.core has this one type from
            return None, "bfloat16"
        # cuda.core does not know the 8-bit floats; the array's own library may.
        own = getattr(obj, "dtype", None)
        if isinstance(own, np.dtype) and own.itemsize == itemsize:
            return own, None
        return None, f"what DLPack says of it ({exc})"
