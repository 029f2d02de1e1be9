"""Batches: dicts, lists, tuples, named tuples and dataclasses, nested in any way, with arrays in them."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, MutableMapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

__all__ = ["Side", "array_side", "replace"]

# DLPack's device types: CPU and page-locked; CUDA and managed.
_HOST, _DEVICE = (1, 3), (2, 13)


Side = Literal["host", "device"]


def array_side(obj: Any) -> Side | None:
    """Where an array has its memory; ``None`` for what is no array. No framework is imported, no driver is asked."""
    if isinstance(obj, np.ndarray):
        return "host"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
        on_device: bool = obj.is_cuda  # type: ignore[union-attr]
        return "device" if on_device else "host"
    # Types are asked, not instances: a class with __getattr__ answers to every name.
    kind = type(obj)
    if hasattr(kind, "__cuda_array_interface__") or "__cuda_array_interface__" in getattr(obj, "__dict__", ()):
        return "device"
    if hasattr(kind, "__dlpack_device__"):
        place = int(obj.__dlpack_device__()[0])
        return "device" if place in _DEVICE else "host" if place in _HOST else None
    return None


def replace(obj: Any, function: Callable[[Any], Any]) -> Any:
    """The same structure with ``function(leaf)`` in place of each leaf. What was there is left as it is."""
    made: Any
    if isinstance(obj, MutableMapping):
        # A copy keeps what a subclass is besides its items, such as a default factory.
        made = copy.copy(obj)
        made.update({key: replace(value, function) for key, value in obj.items()})
        return made
    if type(obj) is MappingProxyType:
        return MappingProxyType({key: replace(value, function) for key, value in obj.items()})
    if isinstance(obj, list):
        made = copy.copy(obj)
        made[:] = [replace(value, function) for value in obj]
        return made
    if isinstance(obj, tuple):
        return _tuple_like(obj, [replace(value, function) for value in obj])
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        made = copy.copy(obj)
        for field in dataclasses.fields(obj):
            if hasattr(obj, field.name):
                # Also where it is frozen.
                object.__setattr__(made, field.name, replace(getattr(obj, field.name), function))
        return made
    return function(obj)


def _tuple_like(obj: tuple[Any, ...], values: list[Any]) -> Any:
    made: Any
    try:
        # A subclass's own __new__ may take anything.
        made = tuple.__new__(type(obj), values)
    except TypeError:  # from one that is written in C
        return type(obj)(values)
    if hasattr(obj, "__dict__"):
        made.__dict__.update(vars(obj))
    return made
