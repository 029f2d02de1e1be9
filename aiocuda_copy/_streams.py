"""Any stream-like to a handle, and the stream that is meant where none is named.

No driver call and no import of a framework that the object does not come from. Keeping the stream object alive is the
caller's business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from . import _native
from ._regions import Kind, Region

__all__ = [
    "LEGACY_DEFAULT",
    "PER_THREAD_DEFAULT",
    "default_for",
    "device_named_by",
    "event_handle",
    "is_event",
    "resolve_handle",
]

LEGACY_DEFAULT, PER_THREAD_DEFAULT = 0, 2

_ACCEPTED = (
    "an object with __cuda_stream__ (a cuda.core Stream), a torch or CuPy stream, or an int handle (0, 1 and 2 are the "
    "driver's special ones)"
)


def device_named_by(stream: Any) -> int | None:
    """The device of a stream object of torch's or CuPy's; ``None`` for others. Of a default stream the handle does not
    tell: it is the same on every device."""
    for name in ("device_index", "device_id"):
        ordinal = getattr(stream, name, None)
        if type(ordinal) is int and ordinal >= 0:
            return ordinal
    return None


def resolve_handle(stream: Any) -> int:
    """The driver's handle of a stream.

    Parameters
    ----------
    stream
        Anything with ``__cuda_stream__``, a ``cuda.core.Stream``, a torch or CuPy stream, or an int handle.

    Raises
    ------
    TypeError
        For anything else.
    ValueError
        For an int that is no handle, or a version of the protocol that is not known.
    RuntimeError
        For a graph builder, whose stream is under capture, and for a closed stream.
    """
    known = _native.known_handle(stream)
    if known is not None:
        return known
    kind = type(stream)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return _checked(stream)
    if kind.__name__ == "GraphBuilder" and _package(kind) == "cuda":
        raise RuntimeError(
            "a GraphBuilder is a stream under capture, which cannot be waited for: copy before the graph is built, or "
            "add a memcpy node to it"
        )
    if hasattr(kind, "__cuda_stream__") or "__cuda_stream__" in getattr(stream, "__dict__", ()):
        if getattr(stream, "is_closed", False) is True:
            raise RuntimeError(f"the stream ({_name(kind)}) has been closed")
        answer = stream.__cuda_stream__
        # An attribute in the protocol's first draft.
        if not callable(answer):
            return _from_protocol(answer, kind)
        if callable(getattr(kind, "__cuda_stream__", None)):
            _native.know_stream_type(kind, _from_protocol)
        return _from_protocol(answer(), kind)
    package = _package(kind)
    if hasattr(kind, "cuda_stream") or package == "torch":
        handle = getattr(stream, "cuda_stream", None)
        if isinstance(handle, int):
            return _checked(handle)
    if package in ("cupy", "cupy_backends") and not is_event(stream):
        handle = getattr(stream, "ptr", None)
        if isinstance(handle, int):
            return _checked(handle)
    if package == "cuda" and kind.__name__ in ("CUstream", "cudaStream_t"):
        return _checked(int(stream))
    hint = "; pass int(stream)" if hasattr(kind, "__index__") and not isinstance(stream, bool) else ""
    if is_event(stream):
        hint = "; await synchronize(event) before the copy"
    raise TypeError(f"stream must be {_ACCEPTED}, not {_name(kind)}{hint}")


def _checked(handle: int) -> int:
    handle = int(handle)
    if not 0 <= handle < 2**64:
        raise ValueError(f"a stream's handle is between 0 and 2**64 - 1, not {handle}")
    return handle


def _from_protocol(answer: Any, kind: type) -> int:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(f"__cuda_stream__ of {_name(kind)} must give (version, handle), not {answer!r}")
    version, handle = answer
    if version != 0:
        raise ValueError(f"__cuda_stream__ of {_name(kind)} speaks version {version} of the protocol; 0 is known")
    return _checked(handle)


def default_for(regions: Iterable[Region]) -> int:
    """The stream that ``stream=None`` means for a copy between these regions.

    It is the current stream of the framework that the device side comes from, on the device of the region, not on the
    current one; else the legacy default stream. Of two device sides the first that has a framework counts.
    """
    for region in regions:
        if region.framework is None or region.kind not in (Kind.DEVICE, Kind.MANAGED):
            continue
        framework = sys.modules.get(region.framework)
        if framework is None:
            continue
        if region.framework == "torch":
            return _checked(framework.cuda.current_stream(region.device).cuda_stream)
        return _cupy_current(framework, region.device)
    return LEGACY_DEFAULT


def _cupy_current(cupy: Any, device: int) -> int:
    try:
        stream = cupy.cuda.get_current_stream(device)
    except TypeError:  # before CuPy 11 it told of the current device only
        with cupy.cuda.Device(device):
            stream = cupy.cuda.get_current_stream()
    return _checked(stream.ptr)


def is_event(obj: object) -> bool:
    """Whether ``synchronize`` was given an event: cuda.core's, torch's or CuPy's. An int is a stream."""
    kind = type(obj)
    for base in kind.__mro__:
        if base.__name__ == "Event" and _package(base) in ("cuda", "torch", "cupy", "cupy_backends"):
            return True
    return kind.__name__ in ("CUevent", "cudaEvent_t") and _package(kind) == "cuda"


def event_handle(event: Any) -> int:
    """The driver's handle of an event; 0 for one that torch has not recorded yet, which counts as done.

    Raises
    ------
    TypeError
        For what is no event.
    RuntimeError
        For a closed event.
    """
    kind = type(event)
    if is_event(event):
        if getattr(event, "is_closed", False) is True:
            raise RuntimeError(f"the event ({_name(kind)}) has been closed")
        for attribute in ("cuda_event", "ptr", "event_id", "handle"):
            handle = getattr(event, attribute, None)
            if handle is not None:
                return int(handle)
        if _package(kind) == "cuda":
            return int(event)
    raise TypeError(f"an event of cuda.core, torch.cuda or cupy.cuda is needed, not {_name(kind)}")


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
