"""What arrays say of their memory, what the driver says, and how two regions are cut for a copy."""

from __future__ import annotations

import array
import ctypes
import gc
import sys
import types
import weakref
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiocuda_copy._exports import Export, export
from aiocuda_copy._layout import layout2d, pair
from aiocuda_copy._regions import Kind, classify
from aiocuda_copy._results import result_spec

PAGEABLE = (0, 0, False, 0, 0, 0)
BASE = 0x7F00_0000_0000


def device_memory(nbytes: int = 1 << 20, ordinal: int = 0) -> tuple[int, int, bool, int, int, int]:
    return (0xC0DE, 2, False, ordinal, BASE, nbytes)


class DeviceArray:
    """Claims device memory by the CUDA array interface, as much as a test wants."""

    def __init__(self, shape: tuple[int, ...] = (4, 8), typestr: str = "<f4", **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (BASE, False),
            "strides": None,
            "version": 3,
            "stream": None,
        } | changes


class DLPackOnly:
    """A producer that knows DLPack and nothing else, and remembers what it was asked for."""

    def __init__(self, base: np.ndarray, device: tuple[int, int] = (1, 0), *, versioned: bool = True) -> None:
        self.base, self.device, self.versioned = base, device, versioned
        self.asked: list[dict[str, Any]] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **how: Any) -> object:
        self.asked.append(how)
        return self.base.__dlpack__(max_version=(1, 0)) if self.versioned else self.base.__dlpack__()


# Host memory.


@pytest.mark.parametrize(
    "obj",
    [
        bytearray(24),
        array.array("d", [1, 2, 3]),
        (ctypes.c_double * 3)(),
        memoryview(bytearray(24)).cast("d"),
        np.zeros(3),
        np.zeros((3, 1, 1)),
        np.zeros(3, "datetime64[s]"),
        np.zeros(3, "f4,i4"),
        np.zeros(3, ">f8"),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_host_memory_of_every_kind(obj: Any) -> None:
    found = export(obj, role="destination")
    expected = np.frombuffer(obj, np.uint8) if not isinstance(obj, np.ndarray) else obj
    assert found.address == expected.__array_interface__["data"][0]
    assert (found.nbytes, found.extent, found.strides, found.side) == (24, 24, None, "host")
    assert not found.readonly
    region = classify(found, PAGEABLE)
    assert (region.kind, region.device, region.context) == (Kind.PAGEABLE, -1, 0)


def test_the_buffer_export_is_held() -> None:
    buffer = bytearray(16)
    found = export(buffer, role="source")
    with pytest.raises(BufferError):
        buffer.append(0)
    del found
    gc.collect()
    buffer.append(0)


def test_a_view_that_the_caller_releases_stays_valid() -> None:
    buffer = bytearray(16)
    view = memoryview(buffer)
    found = export(view, role="source")
    view.release()
    with pytest.raises(BufferError):
        buffer.append(0)
    assert found.nbytes == 16


def test_the_array_is_held() -> None:
    class Array(np.ndarray):
        pass

    data = np.zeros(8).view(Array)
    alive = weakref.ref(data)
    found: Export | None = export(data, role="source")
    del data
    gc.collect()
    assert alive() is not None
    del found
    gc.collect()
    assert alive() is None


def frozen(data: np.ndarray) -> np.ndarray:
    data.flags.writeable = False
    return data


@pytest.mark.parametrize(
    "obj",
    [
        b"abcd",
        memoryview(bytearray(4)).toreadonly(),
        frozen(np.zeros(4)),
        np.frombuffer(b"abcd", np.uint8),
        frozen(np.zeros(4, "datetime64[s]")),
        DeviceArray(data=(BASE, True)),
        DLPackOnly(frozen(np.zeros(4))),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_is_read_only_is_a_source_but_no_destination(obj: Any) -> None:
    assert export(obj, role="source").readonly
    with pytest.raises(ValueError, match="read-only"):
        export(obj, role="destination")


@pytest.mark.parametrize(
    ("obj", "hint"),
    [
        (7, r"Buffer\.from_handle"),
        (True, "numpy.asarray"),
        (1.5, "numpy.asarray"),
        (np.float32(1), "numpy.asarray"),
        (np.int64(BASE), "numpy.asarray"),
        ([1, 2], "numpy.asarray"),
        ("text", "encode"),
        (None, "not NoneType"),
        (object(), "not object"),
        (ctypes.c_void_p, "__cuda_array_interface__"),
        (np.array([object()]), "Python objects"),
        (np.zeros(2, [("a", "i4"), ("b", "O")]), "Python objects"),
        ((ctypes.py_object * 2)(), "Python objects"),
        (DeviceArray(typestr="|O"), "Python objects"),
    ],
)
def test_what_is_no_memory_is_a_type_error_that_says_what_is(obj: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        export(obj, role="source")


def test_a_name_with_an_o_in_a_structure_is_no_object() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("OO", ctypes.c_int), ("b", ctypes.c_int))

    found = export((Pair * 3)(), role="destination")
    assert (found.nbytes, found.dtype) == (24, None)
    assert result_spec(found) == ((24,), np.dtype(np.uint8))


def test_an_object_that_answers_to_every_name_is_refused() -> None:
    class Any:
        def __getattr__(self, name: str) -> object:
            return self

    with pytest.raises(TypeError, match="must be"):
        export(Any(), role="source")


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(ValueError, match="masked"):
        export(np.ma.masked_array([1, 2], [True, False]), role="source")


# Strides.


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (np.zeros((4, 4))[::-1], "negative"),
        (np.zeros((4, 4)).T, "permuted"),
        (np.zeros((2, 3, 4)).transpose(1, 0, 2), "permuted"),
        (np.broadcast_to(np.zeros(4), (3, 4)), "broadcast"),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(8), 3), "overlapping"),
        (np.asfortranarray(np.zeros((3, 4))), "permuted"),
    ],
)
def test_strides_that_cannot_be_copied_say_what_to_do(data: np.ndarray, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{reason}.*ascontiguousarray.*contiguous\(\)"):
        export(data, role="source")
    same = DeviceArray(data.shape, "<f8", strides=data.strides)
    with pytest.raises(ValueError, match=reason):
        export(same, role="source")


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (3, 0, 2)])
@pytest.mark.parametrize("stride", [-8, 0, 3, 1 << 40])
def test_empty_arrays_are_taken_whatever_their_strides(shape: tuple[int, ...], stride: int) -> None:
    strides = (stride,) * len(shape)
    found = export(DeviceArray(shape, data=(0, False), strides=strides), role="destination")
    assert (found.address, found.nbytes, found.extent, found.shape, found.strides) == (0, 0, 0, shape, None)
    assert classify(found, PAGEABLE).kind is Kind.DEVICE
    assert pair(found, export(bytearray(), role="source")).contiguous


def test_strides_of_axes_of_length_one_say_nothing() -> None:
    found = export(DeviceArray((4, 1, 8), strides=(32, -5, 4)), role="source")
    assert found.strides is None
    assert export(DeviceArray((1, 8), strides=(0, 4)), role="source").strides is None


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda a: a[::2], (8, 8, 1, 16, 0)),
        (lambda a: a.reshape(4, 4)[:, 1:3], (16, 4, 1, 32, 0)),
        (lambda a: a.reshape(4, 4)[::2], (32, 2, 1, 64, 0)),
        (lambda a: a.reshape(4, 4)[::2, ::2], (8, 2, 2, 16, 64)),
        (lambda a: a.reshape(2, 2, 4)[:, :, 1:3], (16, 4, 1, 32, 0)),
        (lambda a: a.reshape(2, 4, 2)[:, 1:3, :1], (8, 2, 2, 16, 64)),
        (lambda a: a.reshape(4, 2, 2), (128, 1, 1, 0, 0)),
    ],
)
def test_sub_rectangles(view: Any, expected: tuple[int, ...]) -> None:
    assert tuple(layout2d(export(view(np.zeros(16)), role="source"))) == expected


def test_too_many_levels_say_what_to_do() -> None:
    data = export(np.zeros((4, 4, 4, 4))[:, ::2, ::2, ::2], role="source")
    with pytest.raises(ValueError, match=r"3-D copy can express.*ascontiguousarray"):
        pair(data, export(np.zeros((4, 2, 2, 2)), role="destination"))


def test_sizes_must_match_and_both_are_named() -> None:
    src, dst = export(np.zeros((2, 3)), role="source"), export(bytearray(47), role="destination")
    with pytest.raises(ValueError, match=r"sizes must match: the source has 48 bytes \(shape \(2, 3\).*47"):
        pair(src, dst)


def test_rows_that_are_too_far_apart_for_the_driver_are_refused() -> None:
    src = export(DeviceArray((2, 8), strides=(1 << 31, 4)), role="source")
    with pytest.raises(ValueError, match="copy row by row"):
        pair(src, export(np.zeros(16, "f4"), role="destination"))


def test_sizes_beyond_four_gibibytes_do_not_wrap() -> None:
    found = export(DeviceArray(((1 << 32) + 1,), "|u1"), role="source")
    assert found.nbytes == (1 << 32) + 1
    assert pair(found, found).width == (1 << 32) + 1


def copied(src: np.ndarray, dst: np.ndarray) -> None:
    """A copy by the rectangles, byte by byte through the addresses: the reference that the device follows."""
    one, two = export(src, role="source"), export(dst, role="destination")
    cut = pair(one, two)
    if one.strides is not None:
        assert one.nbytes < one.extent
    assert cut.width * cut.height * cut.depth == one.nbytes
    for src_offset, dst_offset in cut.rows():
        assert 0 <= src_offset <= one.extent - cut.width
        assert 0 <= dst_offset <= two.extent - cut.width
        ctypes.memmove(two.address + dst_offset, one.address + src_offset, cut.width)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A view of that shape into something larger."""
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in shape]
    offsets = [draw(st.integers(0, 2)) for _ in shape]
    outer = tuple(
        offset + n * step + draw(st.sampled_from([0, 0, 1]))
        for n, step, offset in zip(shape, steps, offsets, strict=True)
    )
    base = np.zeros(outer, dtype)
    cuts = tuple(slice(offset, offset + n * step, step) for n, step, offset in zip(shape, steps, offsets, strict=True))
    return base[cuts]


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5))
def test_copies_by_rectangles_are_numpys_copies(data: st.DataObject, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "<i4", "<f8", "V3"])))
    src = data.draw(views(shape, dtype))
    contents = np.random.default_rng(1).integers(0, 256, src.nbytes, np.uint8)
    src[...] = contents.view(dtype).reshape(shape)
    form = data.draw(st.sampled_from(["same shape", "flat", "bytes"]))
    if form == "same shape":
        dst = data.draw(views(shape, dtype))
    else:
        dst = np.zeros(src.size, dtype) if form == "flat" else np.zeros(src.nbytes, np.uint8)
    try:
        copied(src, dst)
    except ValueError as exc:
        assert "3-D" in str(exc)  # noqa: PT017
        assume(False)
    assert np.ascontiguousarray(dst).tobytes() == src.tobytes()


@given(data=st.data(), rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_a_matrix_is_always_copied(data: st.DataObject, rows: int, columns: int) -> None:
    src, dst = (data.draw(views((rows, columns), np.dtype("<i2"))) for _ in range(2))
    src[...] = np.arange(rows * columns).reshape(rows, columns)
    copied(src, dst)
    assert np.array_equal(src, dst)


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=6), split=st.sampled_from([1, 2, 4]))
def test_item_sizes_may_differ(data: st.DataObject, shape: tuple[int, ...], split: int) -> None:
    src = data.draw(views(shape, np.dtype("<u4")))
    src[...] = np.arange(src.size).reshape(shape)
    dst = np.zeros((src.size, 4 // split + 1), f"V{split}")[:, : 4 // split]
    try:
        copied(src, dst)
    except ValueError as exc:
        assert "3-D" in str(exc)  # noqa: PT017
        assume(False)
    assert np.ascontiguousarray(dst).tobytes() == src.tobytes()


# The device's side.


def test_the_cuda_array_interface() -> None:
    obj = DeviceArray(stream=2)
    found = export(obj, role="destination")
    assert (found.address, found.nbytes, found.shape, found.dtype) == (BASE, 128, (4, 8), np.dtype("f4"))
    assert (found.side, found.stream, found.owner) == ("device", 2, obj)
    region = classify(found, device_memory(ordinal=3))
    assert (region.kind, region.device, region.context) == (Kind.DEVICE, 3, 0xC0DE)
    assert (region.stream, region.range_start, region.range_nbytes) == (2, BASE, 1 << 20)
    assert result_spec(region) == ((4, 8), np.dtype("f4"))


@pytest.mark.parametrize("stream", [0, -1, True, "1"])
def test_streams_that_the_protocol_forbids(stream: Any) -> None:
    with pytest.raises(ValueError, match="names the stream"):
        export(DeviceArray(stream=stream), role="source")


def test_a_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="mask"):
        export(DeviceArray(mask=DeviceArray()), role="source")


def test_a_null_address_is_for_empty_arrays_only() -> None:
    with pytest.raises(ValueError, match="null"):
        export(DeviceArray(data=(0, False)), role="source")
    assert export(DeviceArray((0,), data=(None, False)), role="source").nbytes == 0


def test_an_extent_beyond_the_allocation() -> None:
    with pytest.raises(ValueError, match=r"claims 128 bytes.*ends after 100"):
        classify(export(DeviceArray(), role="source"), device_memory(100))
    classify(export(DeviceArray(), role="source"), device_memory(128))
    strided = export(DeviceArray((2, 8), strides=(100, 4)), role="source")
    classify(strided, device_memory(132))
    with pytest.raises(ValueError, match="claims 132"):
        classify(strided, device_memory(131))


def test_host_memory_may_go_on_in_the_next_registration() -> None:
    data = np.zeros(100, np.uint8)
    found = export(data, role="source")
    region = classify(found, (1, 1, False, 0, found.address, 10))
    assert (region.kind, region.range_nbytes) == (Kind.PINNED, 10)


def test_managed_memory_on_either_side() -> None:
    managed = (1, 2, True, 0, BASE, 1 << 20)
    assert classify(export(DeviceArray(), role="source"), managed).kind is Kind.MANAGED
    data = np.zeros(8)
    found = export(data, role="source")
    assert classify(found, (1, 2, True, 0, found.address, 64)).kind is Kind.MANAGED


@pytest.mark.parametrize(
    ("obj", "attributes", "reason"),
    [
        (DeviceArray(), PAGEABLE, "does not know"),
        (DLPackOnly(np.zeros(4), (13, 0)), PAGEABLE, "does not know"),
        (DeviceArray(), (1, 1, False, 0, BASE, 4096), "page-locked host memory"),
        (np.zeros(4), (1, 2, False, 0, 0, 0), "is device memory"),
        (DeviceArray(), (1, 3, False, 0, BASE, 4096), "of a type"),
    ],
)
def test_object_and_driver_disagree(obj: Any, attributes: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        classify(export(obj, role="source"), attributes)


# DLPack.


def test_dlpack_on_the_host() -> None:
    data = np.arange(12.0).reshape(3, 4)
    producer = DLPackOnly(data[:, 1:3])
    found = export(producer, role="destination")
    assert (found.address, found.shape, found.strides) == (data.ctypes.data + 8, (3, 2), (32, 8))
    assert (found.side, found.dtype, found.readonly) == ("host", np.dtype("f8"), False)
    assert [how["stream"] for how in producer.asked] == [None]
    assert export(DLPackOnly(data, versioned=False), role="destination").nbytes == 96


def test_dlpack_producers_are_told_the_stream_of_the_copy() -> None:
    host = np.zeros(4)
    for stream, told in ((None, 1), (0, 1), (1, 1), (2, 2), (0xBEEF, 0xBEEF)):
        producer = DLPackOnly(host, (2, 5))
        found = export(producer, role="source", stream=stream)
        assert [how["stream"] for how in producer.asked] == [told]
        assert (found.side, found.device) == ("device", 5)


def test_a_cuda_array_interface_without_streams_gives_way_to_dlpack() -> None:
    class Both(DLPackOnly):
        __cuda_array_interface__: Any = DeviceArray(version=2).__cuda_array_interface__

    producer = Both(np.zeros(4), (2, 0))
    assert export(producer, role="source", stream=7).nbytes == 32
    assert producer.asked[0]["stream"] == 7
    Both.__cuda_array_interface__ = DeviceArray().__cuda_array_interface__
    assert export(Both(np.zeros(4), (2, 0)), role="source").address == BASE


def test_dlpack_on_another_kind_of_device() -> None:
    with pytest.raises(ValueError, match="type 10"):
        export(DLPackOnly(np.zeros(4), (10, 0)), role="source")


@pytest.mark.parametrize("error", [BufferError, AttributeError, KeyError, OverflowError])
def test_a_dlpack_producer_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error("it is on loan")

    for name in ("__dlpack__", "__dlpack_device__"):
        monkeypatch.setattr(DLPackOnly, name, refuse)
        with pytest.raises(ValueError, match="it is on loan"):
            export(DLPackOnly(np.zeros(4)), role="source")


def test_a_dlpack_producer_without_a_capsule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DLPackOnly, "__dlpack__", lambda *_, **__: None)
    with pytest.raises(ValueError, match="returned no capsule"):
        export(DLPackOnly(np.zeros(4)), role="source")


# Buffers of cuda.core, without a driver.


def test_a_buffer_of_cuda_core() -> None:
    core = pytest.importorskip("cuda.core")
    memory = np.zeros(64, np.uint8)
    buffer = core.Buffer.from_handle(memory.ctypes.data, 64, owner=memory)
    found = export(buffer, role="destination")
    assert (found.address, found.nbytes, found.shape, found.side) == (memory.ctypes.data, 64, None, "unknown")
    assert found.owner is buffer
    region = classify(found, (1, 1, False, 0, found.address, 64))
    assert region.kind is Kind.PINNED
    assert result_spec(region) == ((64,), np.dtype(np.uint8))
    assert pair(found, export(np.zeros(8), role="source")).width == 64
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        export(buffer, role="source")


# torch, by a stand-in and for real.


class FakeStorage:
    def data_ptr(self) -> int:
        return BASE

    def nbytes(self) -> int:
        return 128


class FakeTensor:
    layout = "torch.strided"
    requires_grad = False

    def __init__(self, shape: tuple[int, ...] = (4, 8), dtype: str = "float32", place: str = "cuda", **changes: Any):
        self.shape, self.dtype, self.device = shape, f"torch.{dtype}", types.SimpleNamespace(type=place, index=1)
        self.storage = FakeStorage()
        self.__dict__.update(changes)

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def element_size(self) -> int:
        return {"bfloat16": 2, "float8_e4m3fn": 1, "complex32": 4}.get(self.dtype[6:], 4)

    def is_contiguous(self) -> bool:
        return not hasattr(self, "strides")

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def data_ptr(self) -> int:
        return BASE

    def untyped_storage(self) -> FakeStorage:
        return self.storage


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=FakeTensor))


@pytest.mark.usefixtures("fake_torch")
def test_a_tensor() -> None:
    tensor = FakeTensor((4, 6), strides=(8, 1))
    found = export(tensor, role="destination")
    assert (found.address, found.nbytes, found.extent, found.strides) == (BASE, 96, 120, (32, 4))
    assert (found.framework, found.device, found.side, found.dtype) == ("torch", 1, "device", np.dtype("f4"))
    assert tensor.storage in found.owner  # type: ignore[operator]
    assert export(FakeTensor(place="cpu"), role="source").side == "host"


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize(
    ("changes", "role", "reason"),
    [
        ({"layout": "torch.sparse_coo"}, "source", "to_dense"),
        ({"is_conj": lambda: True}, "source", "resolve_conj"),
        ({"requires_grad": True}, "destination", "detach"),
        ({"place": "mps"}, "source", "CUDA and CPU"),
        ({"shape": (4, 9)}, "source", "too little"),
        ({"data_ptr": lambda: 64}, "source", "no memory"),
        ({"data_ptr": lambda: BASE + 4}, "destination", "too little"),
    ],
)
def test_tensors_that_are_refused(changes: Any, role: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        export(FakeTensor(**changes), role=role)


@pytest.mark.usefixtures("fake_torch")
def test_types_that_numpy_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    brain = export(FakeTensor(dtype="bfloat16"), role="source")
    assert (brain.dtype, brain.nbytes) == (None, 64)
    assert result_spec(brain) == ((4, 8), np.dtype(ml_dtypes.bfloat16))
    eight = export(FakeTensor(dtype="float8_e4m3fn"), role="source")
    assert result_spec(eight)[1] == np.dtype(ml_dtypes.float8_e4m3fn)
    half = export(FakeTensor(dtype="complex32"), role="source")
    with pytest.raises(TypeError, match="no type for complex32; pass like='torch' or a destination of 128 bytes"):
        result_spec(half, "numpy")
    with pytest.raises(TypeError, match="no type for complex32; view it as bytes"):
        result_spec(half)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match=r"pip install 'aiocuda-copy\[dtypes\]'"):
        result_spec(brain)


def test_real_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((4, 6), dtype=torch.bfloat16)
    found = export(tensor, role="destination")
    assert (found.address, found.nbytes, found.type_name) == (tensor.data_ptr(), 48, "bfloat16")
    assert export(tensor[:, 1:3], role="source").strides == (12, 2)
    with pytest.raises(ValueError, match="permuted"):
        export(tensor.t(), role="source")
    with pytest.raises(ValueError, match="resolve_conj"):
        export(torch.zeros(3, dtype=torch.complex64).conj(), role="source")
    with pytest.raises(ValueError, match="detach"):
        export(torch.nn.Parameter(torch.zeros(3)), role="destination")
    with pytest.raises(ValueError, match="to_dense"):
        export(torch.zeros(3).to_sparse(), role="source")
    parameter = torch.nn.Parameter(torch.zeros(1000))
    held = export(parameter, role="source")
    parameter.data = torch.ones(1000)
    assert held.owner[1].data_ptr() == held.address  # type: ignore[index]
    assert held.address != parameter.data_ptr()
