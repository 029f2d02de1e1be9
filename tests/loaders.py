"""What loaders are tested with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from calls import SMALL, on_device, turns

from aiocuda_copy import copy_to_host

__all__ = ["DeviceSource", "Source", "value"]


class Source:
    """Host arrays of one value each, 0, 1, 2 and so on; tells how many were taken and whether it was closed."""

    def __init__(self, count: int = 6, nbytes: int = SMALL, error: Exception | None = None) -> None:
        self.count, self.nbytes, self.error = count, nbytes, error
        self.taken = 0
        self.closed = False

    def item(self, index: int) -> Any:
        return np.full(self.nbytes, index, np.uint8)

    def sync(self) -> Iterator[Any]:
        try:
            for index in range(self.count):
                self.taken += 1
                yield self.item(index)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True

    async def asynchronous(self) -> AsyncIterator[Any]:
        try:
            for index in range(self.count):
                self.taken += 1
                await turns(1)
                yield self.item(index)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True

    def of(self, kind: str) -> Any:
        return self.sync() if kind == "sync" else self.asynchronous()


class DeviceSource(Source):
    def item(self, index: int) -> Any:
        return on_device(self.nbytes, index)


async def value(array: Any) -> int:
    """The one value that an array is full of."""
    host = array if isinstance(array, np.ndarray) else await copy_to_host(array)
    assert (host == host.flat[0]).all()
    return int(host.flat[0])
