"""The emulated driver's own functions (``_native/emulator/controls.h``), as ctypes sees them."""

from __future__ import annotations

import ctypes
import importlib
import os
from ctypes import c_bool, c_char, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path


class EmuWait(ctypes.Structure):
    _fields_ = [("thread_id", c_uint64), ("entry_point", c_char * 48), ("reason", c_char * 32)]


class EmuCall(ctypes.Structure):
    _fields_ = [("thread_id", c_uint64), ("entry_point", c_char * 48), ("result", c_int)]


class EmuLive(ctypes.Structure):
    _fields_ = [
        (name, c_uint64)
        for name in (
            "streams",
            "events",
            "device_allocations",
            "managed_allocations",
            "host_allocations",
            "registrations",
            "contexts",
            "graphs",
            "user_objects",
        )
    ]


# name -> (result type, argument types)
_PROTOTYPES: dict[str, tuple[type | None, list[type]]] = {
    "emu_configure": (c_bool, [c_int, c_int, c_uint64]),
    "emu_reset": (None, []),
    "emu_hold": (c_bool, [c_size_t]),
    "emu_release": (c_bool, [c_size_t]),
    "emu_hold_all": (None, []),
    "emu_release_all": (None, []),
    "emu_step": (c_int64, [c_size_t, c_uint64]),
    "emu_busy_streams": (c_size_t, [c_void_p, c_size_t]),
    "emu_pending": (c_int64, [c_size_t, c_char_p, c_size_t]),
    "emu_await_begun": (c_bool, [c_size_t, c_double]),
    "emu_settle": (None, []),
    "emu_kernel": (c_int, [c_size_t, c_double]),
    "emu_entry_points": (c_size_t, [c_char_p, c_size_t]),
    "emu_kinds": (c_size_t, [c_char_p, c_size_t]),
    "emu_fail_call": (None, [c_char_p, c_uint64, c_int]),
    "emu_fail_operation": (None, [c_char_p, c_uint64, c_int]),
    "emu_fault": (c_bool, [c_int, c_int]),
    "emu_stall_host_functions": (None, [c_bool]),
    "emu_drop_host_functions": (None, [c_uint64]),
    "emu_linger": (None, [c_uint64]),
    "emu_limit_memory": (None, [c_uint64, c_uint64]),
    "emu_pinned_nbytes": (c_uint64, []),
    "emu_throttle": (None, [c_double, c_double, c_double]),
    "emu_hold_pinning": (None, [c_bool]),
    "emu_virtual_clock": (None, [c_bool]),
    "emu_calls": (c_uint64, [c_char_p]),
    "emu_log_calls": (None, [c_bool]),
    "emu_call_log": (c_size_t, [c_void_p, c_size_t]),
    "emu_waits": (c_size_t, [c_void_p, c_size_t]),
    "emu_await_waiting": (c_bool, [c_uint64, c_double]),
    "emu_live": (None, [c_void_p]),
    "emu_read": (c_bool, [c_uint64, c_void_p, c_size_t]),
    "emu_write": (c_bool, [c_uint64, c_char_p, c_size_t]),
}


def library_path() -> Path:
    """Where the emulated driver was installed: beside the native module."""
    path = os.environ.get("AIOCUDA_COPY_EMULATED_DRIVER")  # a build with a sanitizer, say
    if path:
        return Path(path)
    native = importlib.import_module("aiocuda_copy._native")
    return Path(str(native.__file__)).with_name("libaiocuda_emulated_driver.so")


def loaded_driver() -> ctypes.CDLL | None:
    """The CUDA driver that this process has loaded, whichever it is."""
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def refuse_real_driver() -> None:
    """Raises where the environment has put the emulated driver in the place of the real one, which is asked for.

    Raises
    ------
    ValueError
        If it has.
    """
    if hasattr(loaded_driver(), "emu_configure"):
        raise ValueError(
            "the real driver is asked for, but this process has loaded the emulated one: unset AIOCUDA_COPY_DRIVER"
        )


def load() -> ctypes.CDLL:
    """Load the emulated driver, under the real one's name."""
    loaded = loaded_driver()
    if loaded is not None and not hasattr(loaded, "emu_configure"):
        raise RuntimeError(
            "the real CUDA driver is already loaded in this process; call use_emulated_driver(), or set "
            "AIOCUDA_COPY_DRIVER=emulated, before anything makes a CUDA call"
        )
    library = ctypes.CDLL(str(library_path()))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
