"""What an await of four bytes costs, by whose array they are."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ... import copy_to_host
from ._latency import alone
from ._machine import Machine
from ._peers import how_to_install
from ._registry import OWN, Figure, Skipped, case

__all__ = ["BUFFER", "CUPY", "FRAMEWORKS", "TENSOR"]

FRAMEWORKS = "await of 4 bytes from arrays of frameworks, idle stream"

BUFFER = f"{OWN}, a cuda.core.Buffer"
TENSOR = f"{OWN}, a torch tensor"
CUPY = f"{OWN}, a CuPy array"


def _imported(machine: Machine, name: str) -> Any:
    if machine.emulated:
        raise Skipped(f"{name} needs a real device")
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise Skipped(f"{name} cannot be imported ({exc}): {how_to_install(name)}") from None


async def _alone(machine: Machine, source: Any, **options: Any) -> list[Figure]:
    target = machine.small_pinned
    machine.stream.synchronize()
    return await alone(machine, lambda: copy_to_host(source, target, **options))


async def _new(machine: Machine, source: Any, **options: Any) -> list[Figure]:
    machine.stream.synchronize()
    return await alone(machine, lambda: copy_to_host(source, **options))


@case(FRAMEWORKS, by=BUFFER)
async def buffer(machine: Machine) -> list[Figure]:
    return await _alone(machine, machine.small, stream=machine.stream.handle)


@case(FRAMEWORKS, by=f"{BUFFER}, to a new array")
async def buffer_to_new(machine: Machine) -> list[Figure]:
    return await _new(machine, machine.small, stream=machine.stream.handle)


# Of these two the library asks for the current stream.


@case(FRAMEWORKS, by=TENSOR)
async def tensor(machine: Machine) -> list[Figure]:
    torch = _imported(machine, "torch")
    with torch.cuda.stream(torch.cuda.ExternalStream(machine.stream.handle)):
        return await _alone(machine, torch.zeros(4, dtype=torch.uint8, device="cuda"))


@case(FRAMEWORKS, by=f"{TENSOR}, to a new one")
async def tensor_to_new(machine: Machine) -> list[Figure]:
    torch = _imported(machine, "torch")
    with torch.cuda.stream(torch.cuda.ExternalStream(machine.stream.handle)):
        return await _new(machine, torch.zeros(4, dtype=torch.uint8, device="cuda"), like="torch")


@case(FRAMEWORKS, by=CUPY)
async def cupy_array(machine: Machine) -> list[Figure]:
    cupy = _imported(machine, "cupy")
    with cupy.cuda.ExternalStream(machine.stream.handle):
        return await _alone(machine, cupy.zeros(4, "u1"))


@case(FRAMEWORKS, by=f"{OWN}, a Numba array")
async def numba_array(machine: Machine) -> list[Figure]:
    array = _imported(machine, "numba.cuda").device_array(4, "u1")
    return await _alone(machine, array, stream=machine.stream.handle)


@case(FRAMEWORKS, by=f"{OWN}, an RMM buffer")
async def rmm_buffer(machine: Machine) -> list[Figure]:
    return await _alone(machine, _imported(machine, "rmm").DeviceBuffer(size=4), stream=machine.stream.handle)


class _Lender:
    """What has DLPack and nothing else."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __dlpack__(self, **options: Any) -> Any:
        return self._buffer.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._buffer.__dlpack_device__()


@case(FRAMEWORKS, by=f"{OWN}, what has only DLPack")
async def lender(machine: Machine) -> list[Figure]:
    return await _alone(machine, _Lender(machine.small), stream=machine.stream.handle)


@case(FRAMEWORKS, by=f"{OWN}, a JAX array")
async def jax_array(machine: Machine) -> list[Figure]:
    # Else it takes most of the memory for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = _imported(machine, "jax")
    if jax.default_backend() != "gpu":
        raise Skipped("this JAX sees no GPU")
    array = jax.numpy.zeros(4, "uint8").block_until_ready()
    return await _alone(machine, array, stream=machine.stream.handle)
