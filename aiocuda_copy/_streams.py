"""Any stream-like object as the driver's handle."""

from __future__ import annotations

from typing import Any

__all__ = ["resolve_handle"]


def resolve_handle(stream: Any) -> int:
    """The driver's handle of a stream.

    Raises
    ------
    TypeError
        When the object is no stream.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int) and not isinstance(handle, bool):
            return handle
    raise TypeError(f"expected a CUDA stream or an int handle, not {type(stream).__name__}")
