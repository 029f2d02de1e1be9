"""What prefetch() and collect() take: arguments, items of every shape, and the frameworks that they come from."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from calls import Stream, on_device, one_loop, until

from aiocuda_copy import collect, copy_to_host, pinned_empty, prefetch
from aiocuda_copy.testing import DeviceArray, Emulator


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    array: Any
    name: str
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", [self.array])


@dataclasses.dataclass(slots=True)
class Slotted:
    array: Any


@dataclasses.dataclass
class Lazy:
    array: Any
    later: Any = dataclasses.field(init=False)


class Named(list[Any]):
    name = ""


class Span(tuple[Any, ...]):
    """A tuple that is made of other things than its items."""

    name = ""

    def __new__(cls, first: Any, last: Any) -> Span:
        return super().__new__(cls, (first, last))


def array(value: int = 1) -> np.ndarray[Any, Any]:
    return np.full((2, 3), value, np.int16)


async def sent(item: Any) -> Any:
    async with prefetch([item]) as batches:
        (batch,) = [batch async for batch in batches]
    return batch


async def round_trip(item: Any) -> Any:
    async with collect([await sent(item)]) as results:
        (result,) = [result async for result in results]
    return result


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)


# Arguments.


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda source: prefetch(source, depth=0), ValueError, "depth must be at least 1, not 0"),
        (lambda source: prefetch(source, depth=True), ValueError, "depth"),
        (lambda source: collect(source, depth=1.5), TypeError, "depth must be an int, not float"),
        (lambda source: prefetch(source, device=-1), ValueError, "device"),
        (lambda source: prefetch(source, device=False), ValueError, "device"),
        (lambda source: prefetch(source, device="cpu"), ValueError, "'cpu'"),
        (lambda source: prefetch(source, device=None), TypeError, "NoneType"),
        (lambda source: prefetch(source, stream="a"), TypeError, "stream must be"),
        (lambda source: collect(source, stream=1.5), TypeError, "stream must be"),
        (lambda source: prefetch(source, empty=3), TypeError, "empty must be a callable"),
        (lambda source: prefetch(5), TypeError, "iterable is needed, not int"),
        (lambda source: collect(None), TypeError, "iterable is needed, not NoneType"),
    ],
)
def test_bad_arguments(make: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    source = iter([array()])
    with pytest.raises(error, match=words):
        make(source)
    assert len(list(source)) == 1


@pytest.mark.parametrize("form", ["with", "bare"])
async def test_a_device_that_there_is_not(gpu: Emulator | None, form: str) -> None:
    source = iter([array()])
    batches = prefetch(source, device="cuda:99")
    with pytest.raises(ValueError, match="no device 99"):
        await (batches.__aenter__() if form == "with" else anext(batches))
    assert len(list(source)) == 1


# Items.


@one_loop
async def test_structures(gpu: Emulator | None) -> None:
    marker = object()
    item = {"x": array(1), "list": [array(2), (array(3), marker)], 5: Pair(array(4), "text"), "none": None}
    result = await round_trip(item)
    assert list(result) == ["x", "list", 5, "none"]
    assert same(result["x"], array(1))
    assert same(result["list"][0], array(2))
    assert type(result["list"][1]) is tuple
    assert same(result["list"][1][0], array(3))
    assert result["list"][1][1] is marker
    assert type(result[5]) is Pair
    assert same(result[5].first, array(4))
    assert result[5].second == "text"
    assert result["none"] is None
    # The item itself is as it was.
    assert same(item["x"], array(1))


@one_loop
async def test_dataclasses(gpu: Emulator | None) -> None:
    item = Frozen(array(1), "a name")
    result = await round_trip({"frozen": item, "slotted": Slotted(array(2)), "type": Slotted})
    assert type(result["frozen"]) is Frozen
    assert result["frozen"].name == "a name"
    assert same(result["frozen"].array, array(1))
    assert same(result["frozen"].derived[0], array(1))
    assert same(result["slotted"].array, array(2))
    assert result["type"] is Slotted
    assert same(item.array, array(1))


@one_loop
async def test_subclasses_stay_what_they_are(gpu: Emulator | None) -> None:
    grouped = collections.defaultdict(list, {"a": [array(1)]})
    ordered = collections.OrderedDict([("b", array(2)), ("a", array(3))])
    named = Named([array(4)])
    named.name = "mine"
    result = await round_trip([grouped, ordered, named, collections.UserDict({"c": array(5)})])
    assert result[0].default_factory is list
    assert same(result[0]["a"][0], array(1))
    assert list(result[1]) == ["b", "a"]
    assert same(result[1]["a"], array(3))
    assert (type(result[2]), result[2].name) == (Named, "mine")
    assert same(result[2][0], array(4))
    assert type(result[3]) is collections.UserDict
    assert same(result[3]["c"], array(5))


@one_loop
async def test_subclasses_with_ways_of_their_own(gpu: Emulator | None) -> None:
    span = Span(array(1), [array(2)])
    span.name = "mine"
    result = await round_trip([span, Lazy(array(3)), types.MappingProxyType({"a": array(4)})])
    assert (type(result[0]), result[0].name) == (Span, "mine")
    assert same(result[0][0], array(1))
    assert same(result[0][1][0], array(2))
    assert same(result[1].array, array(3))
    assert not hasattr(result[1], "later")
    assert type(result[2]) is types.MappingProxyType
    assert same(result[2]["a"], array(4))
    assert same(span[0], array(1))


@one_loop
async def test_what_a_generator_raises_when_it_is_closed_leaves_as_it_is(gpu: Emulator | None) -> None:
    class Stop(BaseException):
        pass

    def items() -> Iterator[Any]:
        try:
            yield array(1)
            yield array(2)
        finally:
            raise Stop

    batches = prefetch(items(), depth=1)
    await anext(batches)
    with pytest.raises(Stop):
        await batches.aclose()


@one_loop
@pytest.mark.parametrize(
    "item",
    [
        1,
        1.5,
        1j,
        True,
        None,
        "text",
        b"bytes",
        bytearray(3),
        np.float32(1.5),
        {1, 2},
        range(3),
        types.SimpleNamespace(),
    ],
    ids=repr,
)
async def test_what_is_no_array_passes_through(gpu: Emulator | None, item: Any) -> None:
    assert await sent(item) is item
    assert await round_trip(item) is item


@one_loop
async def test_what_is_there_already_passes_through(gpu: Emulator | None) -> None:
    device, host = on_device(9, 1), array()
    assert await sent(device) is device
    async with collect([host]) as results:
        assert await anext(results) is host


@one_loop
async def test_many_arrays_in_an_item(gpu: Emulator | None) -> None:
    result = await round_trip([array(value) for value in range(100)])
    assert all(same(found, array(value)) for value, found in enumerate(result))


@one_loop
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint64, np.float16, np.complex128, "datetime64[s]", "S5"])
async def test_types_and_shapes(gpu: Emulator | None, dtype: Any) -> None:
    for shape in ((), (5,), (2, 3, 4)):
        item = np.zeros(shape, dtype)
        device = await sent(item)
        assert (device.shape, device.dtype, device.nbytes) == (shape, np.dtype(dtype), item.nbytes)
        assert same(await copy_to_host(device), item) or shape == ()
        assert repr(device).startswith("<BatchArray at 0x")


@one_loop
async def test_strided_and_page_locked_sources(gpu: Emulator | None) -> None:
    strided = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, 1:4]
    locked = pinned_empty((3, 4), np.float32)
    locked[:] = 7
    result = await round_trip({"strided": strided, "locked": locked})
    assert same(result["strided"], np.ascontiguousarray(strided))
    assert (result["locked"] == 7).all()


@one_loop
async def test_a_length(gpu: Emulator | None) -> None:
    assert len(await sent(array())) == 2


# torch. On the emulated driver it has no device memory, so somebody else has to make room.


class Squares:
    """A data set of torch's kind."""

    def __init__(self, error_at: int = -1) -> None:
        self.error_at = error_at

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        if index == self.error_at:
            raise KeyError("a broken sample")
        return {"x": torch.full((8,), index, dtype=torch.float32), "label": index * index, "name": f"sample {index}"}


# Forking beside threads is what torch does, and what Python warns of since 3.12.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@forks
@pytest.mark.parametrize("workers", [0, 2])
async def test_torch_data_loader(gpu: Emulator | None, workers: int) -> None:
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(Squares(), batch_size=4, num_workers=workers)
    async with prefetch(loader, empty=DeviceArray) as batches:
        seen = [batch async for batch in batches]
    assert len(seen) == 6
    for number, batch in enumerate(seen):
        first = 4 * number
        assert batch["x"].to_numpy()[:, 0].tolist() == [first, first + 1, first + 2, first + 3]
        assert batch["x"].dtype == np.float32
        assert batch["label"].to_numpy().tolist() == [n * n for n in range(first, first + 4)]
        assert batch["name"] == [f"sample {n}" for n in range(first, first + 4)]


async def test_an_error_in_a_data_loader(gpu: Emulator | None) -> None:
    # Without workers: torch takes seconds to get rid of each one that has failed.
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(Squares(error_at=9), batch_size=4)
    async with prefetch(loader, empty=DeviceArray) as batches:
        for number in range(2):
            assert (await anext(batches))["name"][0] == f"sample {4 * number}"
        with pytest.raises(KeyError, match="a broken sample"):
            await anext(batches)


@forks
async def test_leaving_a_data_loader_early(gpu: Emulator | None) -> None:
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(Squares(), batch_size=4, num_workers=2)
    async with prefetch(loader, empty=DeviceArray) as batches:
        await anext(batches)
    # Its workers have ended, and it can be iterated over again.
    async with prefetch(loader, empty=DeviceArray) as batches:
        assert len([batch async for batch in batches]) == 6


@one_loop
async def test_tensors_that_cannot_be_copied(gpu: Emulator | None) -> None:
    torch = pytest.importorskip("torch")
    for tensor, words in (
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conj"),
    ):
        async with prefetch([torch.ones(3), {"bad": tensor}], empty=DeviceArray) as batches:
            assert (await anext(batches)).to_numpy().tolist() == [1, 1, 1]
            with pytest.raises(ValueError, match=words):
                await anext(batches)


@one_loop
@pytest.mark.filterwarnings("ignore:CUDA initialization")  # by one that has CUDA and finds no driver that it knows
async def test_tensors_of_a_torch_without_cuda(gpu: Emulator | None) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    async with prefetch([torch.ones(3)], device="cuda") as batches:
        with pytest.raises(ValueError, match=r"this torch finds no CUDA device .*empty="):
            await anext(batches)


@one_loop
async def test_bfloat16_for_whoever_has_a_type_for_it(gpu: Emulator | None) -> None:
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    asked: list[Any] = []

    def empty(shape: Any, dtype: Any) -> DeviceArray:
        asked.append(dtype)
        return DeviceArray(shape, np.uint16)

    async with prefetch([torch.ones(3, dtype=torch.bfloat16)], empty=empty) as batches:
        assert (await anext(batches)).to_numpy().tolist() == [0x3F80] * 3
    assert asked == [np.dtype(ml_dtypes.bfloat16)]


@one_loop
@pytest.mark.parametrize("given", [False, True])
async def test_tensors_are_made_by_torch_in_one_stream(
    emulated_gpu: Emulator, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """By a stand-in for its CUDA side: the stream is the given one, or that which is current when the first comes."""
    torch = pytest.importorskip("torch")
    streams, entered, made = [Stream(), Stream()], [], []

    @contextlib.contextmanager
    def inside(stream: Any) -> Iterator[None]:
        entered.append(stream.__cuda_stream__()[1])
        yield

    def empty(shape: Any, *, dtype: Any, device: Any) -> DeviceArray:
        made.append((tuple(shape), dtype, str(device), torch.is_inference_mode_enabled()))
        return DeviceArray(tuple(shape), np.float32)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: streams[1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch, "empty", empty)
    items = [torch.full((2, 3), float(value)) for value in range(3)]
    with torch.inference_mode():
        async with prefetch(items, stream=streams[1].handle if given else None) as batches:
            seen = []
            async for batch in batches:
                seen.append(batch.to_numpy()[0, 0])
                monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[1])
    assert seen == [0, 1, 2]
    assert entered == [streams[given].handle] * 3
    assert made == [((2, 3), torch.float32, "cuda:0", False)] * 3


def tensors(torch: Any, count: int = 6, nbytes: int = 1 << 22) -> Iterator[Any]:
    for value in range(count):
        yield {"x": torch.full((nbytes,), value, dtype=torch.uint8), "y": (torch.tensor([value]), value)}


@pytest.mark.real_gpu
@pytest.mark.parametrize("given", [False, True])
async def test_torch_tensors_become_tensors(given: bool) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    sums = []
    async with prefetch(tensors(torch), device=torch.device("cuda"), stream=stream if given else None) as batches:
        async for batch in batches:
            assert batch["x"].device == torch.device("cuda", 0)
            assert not batch["x"].is_inference()
            with torch.cuda.stream(stream if given else torch.cuda.current_stream()):
                sums.append((batch["x"].sum(), batch["y"][0] + 0, batch["y"][1]))
    stream.synchronize()
    assert [tuple(map(int, each)) for each in sums] == [(value << 22, value, value) for value in range(6)]


@pytest.mark.real_gpu
async def test_memory_of_a_dropped_tensor_is_not_overwritten() -> None:
    torch = pytest.importorskip("torch")
    stream, kept = torch.cuda.Stream(), []
    async with prefetch(tensors(torch, 40), stream=stream, device="cuda:0") as batches:
        async for batch in batches:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                kept.append(batch["x"].amin())
                kept.append(batch["x"].amax())
            del batch
    torch.cuda.synchronize()
    assert list(map(int, kept)) == [value for value in range(40) for _ in range(2)]


@pytest.mark.real_gpu
async def test_inside_of_what_is_the_threads_own() -> None:
    """Inference mode and the current stream belong to the thread, and so to the task beside the consumer."""
    torch = pytest.importorskip("torch")
    async with prefetch(tensors(torch)) as batches:
        with torch.inference_mode():
            await until(lambda: len(batches._under_way) > 0)
            seen = [batch["x"] async for batch in batches]
    assert not any(tensor.is_inference() for tensor in seen)


@pytest.mark.real_gpu
@forks
async def test_a_pinning_data_loader() -> None:
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(Squares(), batch_size=4, num_workers=2, pin_memory=True)
    async with prefetch(loader) as batches:
        seen = [batch async for batch in batches]
    assert [int(batch["x"].sum()) for batch in seen] == [8 * sum(range(n, n + 4)) for n in range(0, 24, 4)]


@pytest.mark.real_gpu
async def test_results_of_torch() -> None:
    torch = pytest.importorskip("torch")

    async def results() -> AsyncIterator[Any]:
        for value in range(6):
            torch.cuda._sleep(1_000_000)
            yield {"y": torch.full((1 << 20,), value, device="cuda"), "host": torch.tensor([value])}

    async with collect(results()) as hosts:
        seen = [host async for host in hosts]
    for value, host in enumerate(seen):
        assert isinstance(host["y"], np.ndarray)
        assert (host["y"] == value).all()
        assert host["host"].item() == value


@pytest.mark.real_gpu
async def test_room_made_by_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    async with prefetch((np.full(1 << 20, value, np.float32) for value in range(6)), empty=cupy.empty) as batches:
        assert [float(batch.max()) async for batch in batches] == [0, 1, 2, 3, 4, 5]


@pytest.mark.real_gpu
async def test_frameworks_take_our_own_arrays() -> None:
    torch = pytest.importorskip("torch")
    async with prefetch(np.full(1 << 20, value, np.float32) for value in range(6)) as batches:
        assert [float(torch.as_tensor(batch, device="cuda").mean()) async for batch in batches] == [0, 1, 2, 3, 4, 5]
