"""Streams and events of every kind, and the stream that is meant where none is named."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from aiocuda_copy._regions import Kind, Region
from aiocuda_copy._streams import default_for, event_handle, is_event, resolve_handle


def made(module: str, name: str, **attributes: Any) -> Any:
    """An instance of a stand-in for a framework's class."""
    return type(name, (), {"__module__": module, **attributes})()


def region(kind: Kind, framework: Any = None, device: int = 0) -> Region:
    return Region(1, 1, 1, device, kind, 0, None, None, 1, None, None, None, False, None, framework, 0, 0)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (0x7F00_1234_5678, 0x7F00_1234_5678),
        (made("mine", "Stream", __cuda_stream__=lambda self: (0, 9)), 9),
        (made("mine", "Stream", __cuda_stream__=(0, 9)), 9),
        (made("torch.cuda.streams", "Stream", cuda_stream=11), 11),
        (made("cupy.cuda.stream", "Stream", ptr=12), 12),
        (made("cupy.cuda.stream", "ExternalStream", ptr=13), 13),
    ],
)
def test_streams_of_every_kind(stream: Any, handle: int) -> None:
    assert resolve_handle(stream) == handle


def test_streams_of_cuda_core_and_cuda_bindings() -> None:
    core = pytest.importorskip("cuda.core")
    assert resolve_handle(core.LEGACY_DEFAULT_STREAM) == 1
    assert resolve_handle(core.PER_THREAD_DEFAULT_STREAM) == 2
    from cuda.bindings import driver

    assert resolve_handle(driver.CUstream(77)) == 77
    assert is_event(driver.CUevent(5))
    assert event_handle(driver.CUevent(5)) == 5
    assert not is_event(core.LEGACY_DEFAULT_STREAM)


@pytest.mark.parametrize(
    "stream",
    [
        True,
        None,
        "0",
        1.0,
        object(),
        np.int64(3),
        made("cupy.cuda.stream", "Event", ptr=3),
        made("torch.cuda.streams", "Event", cuda_event=3),
        made("mine", "Buffer", ptr=3, handle=3),
        made("mine", "Stream", __cuda_stream__=lambda self: 9),
        made("mine", "Stream", __cuda_stream__=lambda self: (0, 9, 1)),
    ],
)
def test_what_is_no_stream(stream: Any) -> None:
    with pytest.raises(TypeError, match="__cuda_stream__"):
        resolve_handle(stream)


def test_numpy_integers_are_told_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"pass int\(stream\)"):
        resolve_handle(np.int64(3))


@pytest.mark.parametrize("handle", [-1, 2**64])
def test_ints_that_are_no_handle(handle: int) -> None:
    with pytest.raises(ValueError, match="between 0 and"):
        resolve_handle(handle)


def test_a_version_of_the_protocol_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="version 1"):
        resolve_handle(made("mine", "Stream", __cuda_stream__=lambda self: (1, 9)))


def test_a_graph_builder_and_a_closed_stream_are_refused() -> None:
    builder = made("cuda.core.graph._graph_builder", "GraphBuilder", __cuda_stream__=lambda self: (0, 9))
    with pytest.raises(RuntimeError, match="under capture"):
        resolve_handle(builder)
    # Its handle reads 0, which would mean the default stream.
    closed = made("cuda.core._stream", "Stream", __cuda_stream__=lambda self: (0, 0), is_closed=True)
    with pytest.raises(RuntimeError, match="closed"):
        resolve_handle(closed)


@pytest.mark.parametrize(
    ("event", "handle"),
    [
        (made("torch.cuda.streams", "Event", cuda_event=21), 21),
        (made("torch.cuda.streams", "Event", cuda_event=0), 0),
        (made("cupy.cuda.stream", "Event", ptr=22), 22),
        (made("cuda.core._event", "Event", handle=23, is_closed=False), 23),
    ],
)
def test_events(event: Any, handle: int) -> None:
    assert is_event(event)
    assert event_handle(event) == handle
    with pytest.raises(TypeError, match=r"await synchronize\(event\) before the copy"):
        resolve_handle(event)


@pytest.mark.parametrize("obj", [0, 5, None, object(), made("asyncio.locks", "Event"), made("torch", "Stream")])
def test_what_is_no_event(obj: Any) -> None:
    assert not is_event(obj)
    with pytest.raises(TypeError, match="event"):
        event_handle(obj)


def test_a_closed_event_is_refused() -> None:
    with pytest.raises(RuntimeError, match="closed"):
        event_handle(made("cuda.core._event", "Event", handle=0, is_closed=True))


def test_the_default_is_the_frameworks_current_stream_of_the_regions_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=100 + device))
    )
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(get_current_stream=lambda device: types.SimpleNamespace(ptr=200 + device))
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    host = region(Kind.PAGEABLE, "torch")
    pinned = region(Kind.PINNED, "torch")
    assert default_for([host, region(Kind.DEVICE, "torch", 3)]) == 103
    assert default_for([region(Kind.DEVICE, "cupy", 2), host]) == 202
    assert default_for([region(Kind.MANAGED, "cupy", 1), pinned]) == 201
    assert default_for([region(Kind.DEVICE), region(Kind.DEVICE, "torch", 1)]) == 101
    assert default_for([region(Kind.DEVICE), pinned, host]) == 0
    assert default_for([]) == 0


def test_an_old_cupy_tells_of_the_current_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(ordinal: int) -> Any:
        current.append(ordinal)
        yield
        current.pop()

    cuda = types.SimpleNamespace(Device=device, get_current_stream=lambda: types.SimpleNamespace(ptr=300 + current[-1]))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    assert default_for([region(Kind.DEVICE, "cupy", 4)]) == 304
    assert current == [0]
