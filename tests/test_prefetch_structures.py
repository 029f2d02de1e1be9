"""What prefetch() and collect() leave as it is: containers that share, that are their own copies, or that forbid."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import os
import time
from collections.abc import Iterator, MutableMapping
from typing import Any

import anyio
import numpy as np
import pytest
from calls import one_loop

from aiocuda_copy import collect, prefetch
from aiocuda_copy.testing import DeviceArray, Emulator

pytestmark = one_loop


async def through(item: Any) -> Any:
    """To the device, and back."""
    async with prefetch([item]) as there, collect([await anext(there)]) as back:
        return await anext(back)


def array() -> np.ndarray[Any, Any]:
    return np.arange(6, dtype=np.int16)


class Wrapper(MutableMapping[str, Any]):
    """The usual one."""

    def __init__(self, wrapped: dict[str, Any]) -> None:
        self._wrapped = wrapped

    def __getitem__(self, key: str) -> Any:
        return self._wrapped[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._wrapped[key] = value

    def __delitem__(self, key: str) -> None:
        del self._wrapped[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wrapped)

    def __len__(self) -> int:
        return len(self._wrapped)


class OneAndTheSame(Wrapper):
    def __copy__(self) -> OneAndTheSame:
        return self


class ImmutableDict(dict[str, Any]):
    def __copy__(self) -> ImmutableDict:
        return self


class ReadOnlyDict(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("it is read-only")


class ImmutableList(list[Any]):
    def __copy__(self) -> ImmutableList:
        return self


@dataclasses.dataclass(frozen=True)
class Immutable:
    values: Any
    name: str

    def __copy__(self) -> Immutable:
        return self


@dataclasses.dataclass
class Output(collections.OrderedDict[str, Any]):
    """As the outputs of transformers' models: items that are attributes as well, and no update()."""

    logits: Any = None
    name: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            collections.OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def update(self, *arguments: Any, **named: Any) -> None:
        raise TypeError("there is no update() of an output")

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self) -> Any:
        return type(self), (self.logits, self.name)


@dataclasses.dataclass
class Info:
    code: int
    values: Any


class Status(Info, enum.Enum):
    FINE = 200, np.zeros(3)


async def test_a_copy_that_shares_its_items(gpu: Emulator | None) -> None:
    wrapped = {"x": array(), "name": "batch"}
    item = Wrapper(wrapped)
    back = await through(item)
    assert type(back) is Wrapper
    assert back is not item
    assert np.array_equal(back["x"], array())
    assert back["name"] == "batch"
    assert isinstance(wrapped["x"], np.ndarray)
    assert wrapped["name"] == "batch"
    assert back["x"] is not wrapped["x"]


async def test_a_copy_that_cannot_be_had(gpu: Emulator | None) -> None:
    item = OneAndTheSame({"x": array()})
    before = item["x"]
    with pytest.raises(TypeError, match="OneAndTheSame shares its items with it; use a dict"):
        await through(item)
    assert item["x"] is before


class Views(MutableMapping[str, Any]):
    """Has its items in a place that its copies share, and makes them anew."""

    def __init__(self, **items: Any) -> None:
        self._items = (items,)

    def __getitem__(self, key: str) -> Any:
        value = self._items[0][key]
        return value.view() if isinstance(value, np.ndarray) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "locked":
            raise KeyError(key)
        self._items[0][key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[0][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items[0])

    def __len__(self) -> int:
        return len(self._items[0])


@pytest.mark.parametrize(("name", "error"), [("other", TypeError), ("locked", KeyError)])
async def test_nothing_is_left_in_what_is_shared(gpu: Emulator | None, name: str, error: type[Exception]) -> None:
    item = Views(x=array(), **{name: array()})
    with pytest.raises(error):
        await through(item)
    assert all(isinstance(value, np.ndarray) for value in item.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ImmutableDict(x=array(), name="batch"),
        lambda: ReadOnlyDict(x=array(), name="batch"),
        lambda: ImmutableList([array(), "batch"]),
        lambda: Immutable(array(), "batch"),
    ],
)
async def test_what_is_its_own_copy(gpu: Emulator | None, make: Any) -> None:
    def values(of: Any) -> list[Any]:
        return list(of.values()) if isinstance(of, dict) else list(of) if isinstance(of, list) else [of.values, of.name]

    item = make()
    before = values(item)
    back = await through(item)
    assert type(back) is type(item)
    assert back is not item
    assert np.array_equal(values(back)[0], array())
    assert values(back)[1] == "batch"
    assert all(now is then for now, then in zip(values(item), before, strict=True))


async def test_items_that_are_attributes(gpu: Emulator | None) -> None:
    item = Output(array(), "output")
    back = await through(item)
    assert type(back) is Output
    assert back["logits"] is back.logits
    assert back.logits is not item.logits
    assert np.array_equal(back.logits, array())
    assert back.name == "output"


async def test_containers_without_arrays_are_the_same_ones(gpu: Emulator | None) -> None:
    others = [time.localtime(), os.stat("/"), Status.FINE, ["a"], {"b": 1}, Info(1, "c"), os.environ]
    back = await through({"x": array(), "others": others})
    assert back["others"] is others
    assert await through(others) is others
    assert Status.FINE.code == 200
    assert not Status.FINE.values.any()


async def test_what_looks_like_an_array(gpu: Emulator | None) -> None:
    """A class of arrays is none; and what does not say where it is may be one."""

    class Lost:
        def __dlpack__(self, **options: Any) -> Any:
            raise NotImplementedError

        def __dlpack_device__(self) -> tuple[int, int]:
            raise KeyError("device")

    classes = {"a": DeviceArray, "b": np.ndarray}
    assert await through(classes) is classes
    with pytest.raises(ValueError, match=r"a .*Lost does not say where its memory is: KeyError"):
        await through([Lost()])


async def test_packed_sequences(gpu: Emulator | None) -> None:
    torch = pytest.importorskip("torch")
    packed = torch.nn.utils.rnn.pack_sequence([torch.arange(3), torch.arange(2)])
    async with prefetch([packed], empty=DeviceArray) as there:
        moved = await anext(there)
        assert type(moved) is type(packed)
        assert moved.batch_sizes is packed.batch_sizes
        assert moved.data is not packed.data


async def test_many_values_do_not_hold_the_loop(gpu: Emulator | None) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    tokens = [[7] * 512 for _ in range(64)]
    async with prefetch([{"tokens": tokens, "x": array()}]) as there, anyio.create_task_group() as group:
        group.start_soon(count)
        await anyio.lowlevel.checkpoint()
        before = turns
        assert (await anext(there))["tokens"] is tokens
        group.cancel_scope.cancel()
    assert turns - before >= 64 * 512 // 2048


async def test_copies_of_an_item_are_not_needed(gpu: Emulator | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is replaced nothing is copied."""
    monkeypatch.setattr(copy, "copy", lambda obj: pytest.fail("a copy"))
    item = {"x": [1, 2], "y": Wrapper({"z": 3})}
    async with prefetch([item]) as there:
        assert await anext(there) is item
