"""An emulated GPU for tests and demonstrations, and what controls it.

The emulated driver takes the real one's place for the whole process: everything that goes through ``cuda.bindings`` or
``cuda.core`` runs on it. It behaves like the real driver where programs trip over it, above all where calls block, and
lets a test decide when each operation of a stream happens. Its speed means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiocuda_copy.testing._emulator import (
    Call,
    Emulator,
    StreamLike,
    Wait,
    current_emulator,
    driver_from_environment,
    emulated,
    use_emulated_driver,
)

if TYPE_CHECKING:
    from aiocuda_copy.testing._device_array import DeviceArray

__all__ = [
    "Call",
    "DeviceArray",
    "Emulator",
    "StreamLike",
    "Wait",
    "current_emulator",
    "driver_from_environment",
    "emulated",
    "use_emulated_driver",
]


def __getattr__(name: str) -> Any:
    # NumPy and cuda.bindings are loaded only for those who use it.
    if name == "DeviceArray":
        from aiocuda_copy.testing._device_array import DeviceArray

        return DeviceArray
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
