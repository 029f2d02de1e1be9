"""What ``copy_to_host`` returns where it is given no destination: an array of which library, and of which type."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Literal, NamedTuple

import numpy as np

from ._exports import Export, cuda_array_type, torch_type, typestr_type
from ._regions import Region

__all__ = ["Like", "library_of", "make", "result_spec", "result_type"]

Like = Literal["numpy", "torch", "jax"]
# A dtype of NumPy or of torch, or ``_JaxType``.
_Type = Any

_BYTES = np.dtype(np.uint8)


class _JaxType(NamedTuple):
    """What JAX takes from NumPy by DLPack."""

    numpy: np.dtype[Any]


def library_of(like: Any) -> Like:
    """Whose array ``like=`` asks for.

    Raises
    ------
    TypeError
        It is nothing that names a library, or the library is not installed.
    """
    if like is None or like is np or (isinstance(like, str) and like == "numpy") or isinstance(like, np.ndarray):
        return "numpy"
    if isinstance(like, str) and like in ("torch", "jax"):
        _import(like)
        return "torch" if like == "torch" else "jax"
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None:
        if like is torch:
            return "torch"
        if isinstance(like, torch.Tensor):
            _check_on_the_host("a CPU tensor", {like.device.type}, like.device)
            return "torch"
    if jax is not None:
        if like is jax or like is sys.modules.get("jax.numpy"):
            return "jax"
        if isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer):
            devices = like.devices()
            _check_on_the_host("a JAX array on the CPU", {device.platform for device in devices}, devices)
            return "jax"
    what = repr(like) if isinstance(like, str) else f"of type {type(like).__qualname__}"
    raise TypeError(f"like= must be 'numpy', 'torch' or 'jax', one of these modules or an array of theirs, not {what}")


def _import(name: str) -> None:
    try:
        importlib.import_module(name)  # named by the caller
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise
        raise TypeError(
            f"like={name!r} needs the package {name!r}, which is not installed: pip install 'aiocuda-copy[{name}]', or "
            f"leave like= out for a NumPy array"
        ) from None


def _check_on_the_host(what: str, platforms: set[str], devices: Any) -> None:
    if platforms != {"cpu"}:
        raise TypeError(f"like= must be {what}, for that is what it asks for, not one on {devices}")


def result_spec(region: Region | Export, like: Like | None = None) -> tuple[tuple[int, ...], _Type]:
    """The shape and the type of the array that ``copy_to_host(src)`` returns: the source's, or bytes.

    Without ``like`` it is NumPy's type, for a caller that has no such argument, nor a destination.

    Raises
    ------
    TypeError
        For a type that the library has no counterpart for.
    """
    if region.shape is None or (region.dtype is None and region.type_name is None):
        return (region.nbytes,), _type_of(_BYTES, None, region.nbytes, like)
    return region.shape, _type_of(region.dtype, region.type_name, region.nbytes, like)


_types: dict[tuple[Any, Like], _Type] = {}


def result_type(src: Any, dtype: Any, nbytes: int, like: Like) -> _Type:
    """The type of a result by that of the source, as ``_native.small_source`` gives it.

    Raises
    ------
    TypeError
        For a type that the library has no counterpart for.
    """
    if like == "jax":  # which types it has may be changed at any time
        return _jax_type(result_type(src, dtype, nbytes, "numpy"))
    known = _types.get((dtype, like))
    if known is None:
        if isinstance(dtype, str) and typestr_type(dtype).kind == "V":
            # Of one string there are many types.
            known = cuda_array_type(src, src.__cuda_array_interface__)
            if known.hasobject:
                raise TypeError("the source is an array of Python objects")
            if known.names is not None:  # records and aligned structures are equal to others
                return _type_of(known, None, nbytes, like)
            return result_type(src, known, nbytes, like)
        own = _BYTES if dtype is None else dtype
        numpy_type, name = (np.dtype(own), None) if isinstance(own, (str, np.dtype)) else torch_type(own)
        known = _types[dtype, like] = _type_of(numpy_type, name, nbytes, like)
    return known


def _type_of(dtype: np.dtype[Any] | None, name: str | None, nbytes: int, like: Like | None) -> _Type:
    if name is not None and name.startswith(("qint", "quint")):
        raise TypeError(f"{name} means nothing without the scale of its tensor; pass tensor.int_repr()")
    if like == "torch":
        return _torch_type(dtype, name, nbytes)
    if like == "jax":
        return _jax_type(_type_of(dtype, name, nbytes, "numpy"))
    if dtype is not None:
        return dtype
    assert name is not None
    otherwise = f"pass a destination of {nbytes} bytes"
    if like is None:
        otherwise = "view it as bytes, such as with tensor.view(torch.uint8)"
    elif name.isidentifier():  # of torch's
        otherwise = f"pass like='torch' or a destination of {nbytes} bytes"
    if name.startswith(("bfloat", "float")):
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                f"NumPy has no {name}: pip install 'aiocuda-copy[dtypes]' (ml_dtypes), or {otherwise}"
            ) from None
        scalar = getattr(ml_dtypes, name, None)
        if scalar is not None:
            return np.dtype(scalar)
    raise TypeError(f"NumPy has no type for {name}; {otherwise}")


def _torch_type(dtype: np.dtype[Any] | None, name: str | None, nbytes: int) -> _Type:
    import torch

    if name is None and dtype is not None and dtype.isnative:
        name = dtype.name
    found = getattr(torch, name or "", None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no type for {dtype or name}; pass a destination of {nbytes} bytes")
    return found


def _jax_type(dtype: np.dtype[Any]) -> _JaxType:
    jax = sys.modules["jax"]
    # ml_dtypes' float8_e5m2 has the kind of NumPy's own floats.
    if dtype.kind not in "biufc" or dtype.isbuiltin != 1:
        raise TypeError(
            f"JAX takes no {dtype.name if dtype.isnative else dtype} from NumPy by DLPack; leave like= out "
            f"(jax.numpy.asarray copies arrays of whatever type JAX has)"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(f"JAX has no {dtype.name} while jax_enable_x64 is off; turn it on, or leave like= out")
    return _JaxType(dtype)


def make(shape: tuple[int, ...], dtype: _Type, memory: Any) -> Any:
    """The result: an array of that type over memory, which it keeps."""
    if isinstance(dtype, np.dtype):
        return np.ndarray(shape, dtype, memory)
    if isinstance(dtype, _JaxType):
        return sys.modules["jax"].dlpack.from_dlpack(np.ndarray(shape, dtype.numpy, memory))
    torch = sys.modules["torch"]
    # Of nothing it makes no tensor.
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat if flat.shape == shape else flat.reshape(shape)
