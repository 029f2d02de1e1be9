"""Batches: dicts, lists, tuples, named tuples and dataclasses, nested in any way, with arrays in them."""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
from collections.abc import Generator, Iterable, MutableMapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

__all__ = ["Search", "Side", "array_side", "replaced"]

# What is no array, and is common: a batch may have a million numbers beside its arrays.
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
# Values that are looked at before the loop gets its turn: a fraction of a millisecond's work.
_VALUES_A_TURN = 2048

# DLPack's device types: CPU and page-locked; CUDA and managed.
_HOST, _DEVICE = (1, 3), (2, 13)


Side = Literal["host", "device"]


def array_side(obj: Any) -> Side | Literal["nowhere"] | None:
    """Where an array has its memory; ``None`` for what is no array. No framework is imported, no driver is asked."""
    if isinstance(obj, np.ndarray):
        return "host"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, getattr(torch, "Tensor", ())):
        on_device: bool = obj.is_cuda  # type: ignore[union-attr]
        return "device" if on_device else "host"
    # Types are asked, not instances: a class with __getattr__ answers to every name.
    kind = type(obj)
    if isinstance(obj, type):
        return None
    if hasattr(kind, "__cuda_array_interface__") or "__cuda_array_interface__" in getattr(obj, "__dict__", ()):
        return "device"
    if hasattr(kind, "__dlpack_device__"):
        try:
            place = int(obj.__dlpack_device__()[0])
        except Exception as exc:
            raise ValueError(f"a {kind.__qualname__} does not say where its memory is: {exc!r}") from exc
        return "device" if place in _DEVICE else "host" if place in _HOST else None
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(obj, getattr(getattr(jax, "core", None), "Tracer", ())):
        return "nowhere"
    return None


@dataclasses.dataclass(slots=True)
class _Holder:
    """A container with arrays in it, and what is at which of its places."""

    container: Any
    places: list[tuple[Any, Place]]


# The number of an array, or a container.
Place = int | _Holder


class Search:
    """Finds the arrays of a side, and only looks."""

    def __init__(self, side: Side) -> None:
        self.arrays: list[Any] = []
        self._side = side
        self._seen = 0

    def steps(self, obj: Any) -> Generator[None, None, Place | None]:
        """Adds the arrays in something to those found, and returns where they are. Yields now and then."""
        values = _values(obj)
        if values is None:
            # What has its memory nowhere cannot be copied, which an error says.
            if array_side(obj) not in (self._side, "nowhere"):
                return None
            self.arrays.append(obj)
            return len(self.arrays) - 1
        places = []
        for key, value in values:
            self._seen += 1
            if self._seen % _VALUES_A_TURN == 0:
                yield
            if type(value) not in _PLAIN:
                place = yield from self.steps(value)
                if place is not None:
                    places.append((key, place))
        return _Holder(obj, places) if places else None


def _values(obj: Any) -> Iterable[tuple[Any, Any]] | None:
    """What a container has, and where; ``None`` of what is no container."""
    if isinstance(obj, (MutableMapping, MappingProxyType)):
        return ((key, obj[key]) for key in list(obj))  # the loop gets its turn meanwhile
    if isinstance(obj, tuple) and type(obj).__name__ == "PackedSequence":
        # The sizes in torch's belong on the host.
        return [(index, value) for index, value in enumerate(obj) if index != 1]
    if isinstance(obj, (list, tuple)):
        return enumerate(obj)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, (type, enum.Enum)):
        return [(one.name, getattr(obj, one.name)) for one in dataclasses.fields(obj) if hasattr(obj, one.name)]
    return None


def replaced(place: Place, results: list[Any]) -> Any:
    """The same structure with the results in place of the arrays. Containers without arrays are the same ones, and what
    was there is left as it is."""
    if isinstance(place, int):
        return results[place]
    container = place.container
    values = {key: replaced(inner, results) for key, inner in place.places}
    if type(container) in (dict, MappingProxyType):
        made = dict(container)
        made.update(values)
        return made if type(container) is dict else MappingProxyType(made)
    if isinstance(container, MutableMapping):
        return _mapping_like(container, values)
    if isinstance(container, tuple):
        items = list(container)
        for index, value in values.items():
            items[index] = value
        return _tuple_like(container, items)
    made = _copy(container)
    for key, value in values.items():
        if isinstance(container, list):
            list.__setitem__(made, key, value)
        else:
            object.__setattr__(made, key, value)  # also where it is frozen
    return made


def _copy(obj: Any) -> Any:
    """A shallow copy: it keeps what a subclass is besides its items, such as a default factory."""
    try:
        made = copy.copy(obj)
    except TypeError:  # copies of dicts and lists are filled item by item
        made = obj
    if made is not obj:
        return made
    # What calls itself immutable is its own copy, or has none.
    made = obj.__class__.__new__(obj.__class__)
    if isinstance(obj, dict):
        dict.update(made, obj)
    elif isinstance(obj, list):
        list.extend(made, obj)
    else:
        for field in dataclasses.fields(obj):
            if hasattr(obj, field.name):
                object.__setattr__(made, field.name, getattr(obj, field.name))
    if hasattr(obj, "__dict__"):
        made.__dict__.update(vars(obj))
    return made


def _mapping_like(obj: MutableMapping[Any, Any], values: dict[Any, Any]) -> Any:
    before = {key: obj[key] for key in values}
    if isinstance(obj, dict):
        made = _copy(obj)
    else:
        made = copy.copy(obj)
        # What wraps another mapping shares it with its copy.
        for name, value in list(getattr(made, "__dict__", {}).items()):
            if isinstance(value, (MutableMapping, list)):
                made.__dict__[name] = copy.copy(value)
    try:
        for key, value in values.items():
            _set_item(made, key, value)
    finally:
        # Also one that makes its objects anew, as views do, tells where they are.
        shared = [key for key, old in before.items() if obj[key] is not old and _is_at(obj[key], values[key])]
        for key in shared:
            obj[key] = before[key]
    if shared:
        raise TypeError(f"a copy of a {type(obj).__qualname__} shares its items with it; use a dict in its place")
    if dataclasses.is_dataclass(made) and not isinstance(made, type):
        # Some are both, and have each item as an attribute as well.
        for field in dataclasses.fields(made):
            if field.name in values and getattr(obj, field.name, None) is before[field.name]:
                object.__setattr__(made, field.name, values[field.name])
    return made


def _set_item(made: MutableMapping[Any, Any], key: Any, value: Any) -> None:
    try:
        # What a subclass does besides is wanted: some have their items as attributes as well.
        made[key] = value
    except TypeError:  # of one that calls itself immutable
        if not isinstance(made, dict):
            raise
        dict.__setitem__(made, key, value)


def _is_at(found: Any, new: Any) -> bool:
    return found is new or (array_side(new) is not None and array_side(found) == array_side(new))


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
