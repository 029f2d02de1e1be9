"""What the server computes: a small matrix model on the GPU, and one that pretends on the emulated driver.

Both have the same results, which are known exactly: element ``k`` is ``2 * ((k + seed) % 251)`` as a float.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import numpy as np

from aiocuda_copy import testing

__all__ = ["MAX_NBYTES", "MAX_SEED", "Model", "emulated", "expected", "make_model", "why_not"]

MAX_NBYTES = 64 << 20
# Far from where ``k + seed`` would overflow.
MAX_SEED = (1 << 32) - 1
_PERIOD = 251


class Model(Protocol):
    """Computes in a stream of its own."""

    stream: Any

    def run(self, nbytes: int, seed: int) -> Any:
        """Enqueues the work, and returns the device array of bytes that will hold its result."""

    def copy_blocking(self, array: Any) -> np.ndarray:
        """What a program does that does not await: the thread waits for the stream and for the copy."""


def expected(nbytes: int, seed: int) -> bytes:
    """The result."""
    numbers = 2 * ((np.arange(_PERIOD) + seed) % _PERIOD).astype(np.float32)
    return np.resize(numbers, -(-nbytes // 4)).tobytes()[:nbytes]


def emulated() -> bool:
    """Whether this process uses the emulated driver."""
    testing.driver_from_environment()  # before the first driver call of anyone
    return testing.emulated()


def why_not() -> str | None:
    """A sentence that says why there can be no model here."""
    if emulated() or importlib.util.find_spec("torch"):
        return None
    return (
        "the model needs torch on a real GPU, which is not installed: pip install 'aiocuda-copy[torch]'; "
        "AIOCUDA_COPY_DRIVER=emulated needs neither"
    )


def make_model() -> Model:
    """The model for the driver that this process uses."""
    if reason := why_not():
        raise RuntimeError(reason)
    return _EmulatedModel() if emulated() else _TorchModel()


class _TorchModel:
    # Some 10 ms on an H200 for a result of 16 MiB.
    WIDTH, LAYERS = 4096, 16

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            identity = torch.eye(self.WIDTH, device="cuda")
            self._weights = [identity] * (self.LAYERS - 1) + [2 * identity]
        # The libraries behind torch set themselves up in the first call, which takes a while.
        self.copy_blocking(self.run(1 << 20, 0))

    def run(self, nbytes: int, seed: int) -> Any:
        torch = self._torch
        rows = -(-nbytes // (4 * self.WIDTH))
        with torch.cuda.stream(self.stream):
            numbers = (torch.arange(rows * self.WIDTH, device="cuda") + seed) % _PERIOD
            values = numbers.to(torch.float32).view(rows, self.WIDTH)
            for weights in self._weights:
                values = values @ weights
        return values.view(torch.uint8).view(-1)[:nbytes]

    def copy_blocking(self, array: Any) -> np.ndarray:
        with self._torch.cuda.stream(self.stream):
            return array.cpu().numpy()


class _EmulatedModel:
    """A kernel that takes its time and does nothing; the results have been there all along."""

    KERNEL_MS = 10.0

    def __init__(self) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        device = Device()
        device.set_current()
        self._driver, self._emulator = driver, testing.use_emulated_driver()
        self.stream = device.create_stream()
        results = expected(MAX_NBYTES + 4 * _PERIOD, 0)
        self._results = testing.DeviceArray.from_numpy(np.frombuffer(results, np.uint8))

    def run(self, nbytes: int, seed: int) -> testing.DeviceArray:
        self._emulator.kernel(self.stream, self.KERNEL_MS)
        begin = 4 * (seed % _PERIOD)
        return self._results[begin : begin + nbytes]

    def copy_blocking(self, array: testing.DeviceArray) -> np.ndarray:
        host = np.empty(array.nbytes, np.uint8)
        # Into pageable memory, which the driver lets its caller wait for.
        (code,) = self._driver.cuMemcpyDtoHAsync(host.ctypes.data, array.ptr, array.nbytes, int(self.stream.handle))
        if code:
            raise RuntimeError(f"the copy failed with {code.name}")
        self.stream.sync()
        return host
