"""Tensors of every type, and how a test looks at them."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from kinds import pattern

from aiocuda_copy._copies import _default_copier

TORCH_TYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
# Only torch itself has them.
NOT_NUMPYS = ["complex32"]

ignores_half_complex = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def import_jax() -> Any:
    """The module, or the test is skipped. It would take most of a GPU's memory when it is first used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = pytest.importorskip("jax")
    module.devices()
    return module


def random_tensor(torch: Any, name: str, nbytes: int = 96, device: str = "cpu") -> Any:
    """Any bits at all, NaNs among them, but for bools."""
    data = torch.from_numpy(pattern(nbytes) & 1 if name == "bool" else pattern(nbytes))
    return data.view(getattr(torch, name)).reshape(2, -1).to(device)


def bits(tensor: Any) -> bytes:
    """What a tensor's memory holds."""
    contiguous = tensor.detach().cpu().contiguous()
    return bytes(contiguous.reshape(-1).view(sys.modules["torch"].uint8).numpy())


def check_nothing_in_flight() -> None:
    assert _default_copier().stats().in_flight == 0
