"""The only importer of ``cuda.bindings``: finds the driver's entry points and hands them to the native layer.

Nothing happens at import. The first call of :func:`ensure` loads the driver (the emulated one where the environment
asks for it), so that a pre-fork server can import the package in its parent.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from . import _native
from ._errors import CudaError, ForkedError

__all__ = ["check", "context_of", "ensure", "error", "error_of_core", "refuse_fork", "usable", "version"]


@dataclass(frozen=True)
class _EntryPoint:
    """A row of the table: the driver's name, the API version whose signature ``driver_abi.h`` declares."""

    name: str
    version: int
    required: bool = True
    bound_as: str | None = None


_ENTRY_POINTS = (
    _EntryPoint("cuInit", 12000),
    _EntryPoint("cuGetErrorName", 12000),
    _EntryPoint("cuDriverGetVersion", 12000),
    _EntryPoint("cuDeviceGet", 12000),
    _EntryPoint("cuDeviceGetCount", 12000),
    _EntryPoint("cuDeviceGetAttribute", 12000),
    _EntryPoint("cuDevicePrimaryCtxRetain", 12000),
    _EntryPoint("cuCtxGetCurrent", 12000),
    _EntryPoint("cuCtxSetCurrent", 12000),
    _EntryPoint("cuCtxPushCurrent", 12000),
    _EntryPoint("cuCtxPopCurrent", 12000),
    _EntryPoint("cuCtxGetDevice", 12000),
    _EntryPoint("cuThreadExchangeStreamCaptureMode", 12000),
    _EntryPoint("cuStreamCreate", 12000),
    _EntryPoint("cuStreamDestroy", 12000),
    _EntryPoint("cuStreamGetFlags", 12000),
    _EntryPoint("cuStreamGetId", 12000),
    _EntryPoint("cuStreamQuery", 12000),
    _EntryPoint("cuStreamWaitEvent", 12000),
    _EntryPoint("cuStreamIsCapturing", 12000),
    _EntryPoint("cuStreamGetCtx", 12000),
    _EntryPoint("cuStreamWriteValue32", 12000),
    _EntryPoint("cuEventCreate", 12000),
    _EntryPoint("cuEventDestroy", 12000),
    _EntryPoint("cuEventRecord", 12000),
    _EntryPoint("cuEventQuery", 12000),
    _EntryPoint("cuLaunchHostFunc", 12000),
    _EntryPoint("cuMemcpyAsync", 12000),
    _EntryPoint("cuMemcpyDtoHAsync", 12000),
    _EntryPoint("cuMemcpyHtoDAsync", 12000),
    _EntryPoint("cuMemcpy3DAsync", 12000),
    _EntryPoint("cuMemHostRegister", 12000),
    _EntryPoint("cuMemHostUnregister", 12000),
    _EntryPoint("cuPointerGetAttributes", 12000),
    # For batches of small copies; cuFuncLoad makes lazy loading happen now rather than at the first launch.
    _EntryPoint("cuModuleLoadData", 12000, required=False),
    _EntryPoint("cuModuleGetFunction", 12000, required=False),
    _EntryPoint("cuFuncLoad", 12040, required=False),
    _EntryPoint("cuLaunchKernel", 12000, required=False),
    _EntryPoint("cuMemAllocAsync", 12000, required=False),
    _EntryPoint("cuStreamCreateWithPriority", 12000, required=False),
    _EntryPoint("cuCtxEnablePeerAccess", 12000, required=False),
    # Two signatures of one name: CUDA 13 dropped the failing index.
    _EntryPoint("cuMemcpyBatchAsync", 12080, required=False, bound_as="cuMemcpyBatchAsync_12080"),
    _EntryPoint("cuMemcpyBatchAsync", 13000, required=False, bound_as="cuMemcpyBatchAsync_13000"),
)

# At exit the engines' threads get so long to end; then the process ends under them.
_EXIT_SECONDS = 2.0

_lock = threading.Lock()
_bound = False
_forked = False
_exiting = False


def _mark_forked() -> None:
    global _forked
    _forked = _bound
    _native.set_usable(False)


os.register_at_fork(after_in_child=_mark_forked)


def _exit() -> None:
    global _exiting
    if _bound and not _forked:
        _exiting = True
        _native.set_usable(False)
        _native.stop_engines(_EXIT_SECONDS)


def refuse_fork() -> None:
    """Raises ``ForkedError`` in a child whose parent had used the driver through this package."""
    if _forked:
        raise ForkedError(
            "the parent process had used CUDA through aiocuda_copy before the fork, and CUDA does not work in a forked "
            "child; start workers with the 'spawn' method, or fork before the first copy"
        )


def usable() -> bool:
    """Whether a finalizer may still call the driver: not in a forked child, nor when the interpreter is exiting."""
    return not _forked and not _exiting


def ensure() -> None:
    """Binds the native layer to the driver, once a process.

    Raises
    ------
    ForkedError
        In a child whose parent had used the driver through this package.
    CudaError
        When there is no driver, it is too old, or it finds no device.
    """
    if _forked:
        refuse_fork()
    if not _bound:
        _bind()
    if _exiting:
        raise RuntimeError("the interpreter is exiting, and the engines have stopped")


def _bind() -> None:
    global _bound
    with _lock:
        if _bound:
            return
        if os.environ.get("AIOCUDA_COPY_DRIVER"):
            from .testing import driver_from_environment

            driver_from_environment()
        from cuda.bindings import driver

        for row in _ENTRY_POINTS:
            result, address = _get_address(driver, row)
            if int(result) or not address:
                if row.required:
                    raise CudaError(500, "CUDA_ERROR_NOT_FOUND", f"cuGetProcAddress({row.name!r}, {row.version})")
                continue
            _native.bind(row.bound_as or row.name, int(address))
        check(_native.init(), "cuInit")
        atexit.register(_exit)
        _bound = True
        _native.set_usable(True)


def _get_address(driver: object, row: _EntryPoint) -> tuple[int, int]:
    try:
        result, address, *_ = driver.cuGetProcAddress(row.name.encode(), row.version, 0)  # type: ignore[attr-defined]
    except RuntimeError as exc:  # cuda.bindings found no libcuda.so.1
        raise no_driver(exc) from exc
    # Of what it does not have some bindings give None.
    return int(result), int(address or 0)


def no_driver(exc: Exception) -> CudaError:
    """The exception where the bindings find no driver to load."""
    hint = "without a GPU, set AIOCUDA_COPY_DRIVER=emulated to use the emulated driver"
    return CudaError(100, "CUDA_ERROR_NO_DEVICE", f"loading the CUDA driver ({exc}; {hint})")


def error(code: int, operation: str) -> CudaError:
    """The exception for a driver's code."""
    return CudaError(code, _native.error_name(code), operation)


def error_of_core(exc: Exception, operation: str) -> CudaError:
    """The exception for one of cuda.core's, whose message begins with the code's name."""
    from cuda.bindings import driver

    name = str(exc).partition(":")[0]
    code = getattr(driver.CUresult, name, driver.CUresult.CUDA_ERROR_UNKNOWN)
    return error(int(code), operation)


def check(code: int, operation: str) -> None:
    """Raises the exception for a code that is not ``CUDA_SUCCESS``."""
    if code:
        raise error(code, operation)


@contextmanager
def context_of(device: int) -> Iterator[None]:
    """Makes a device's primary context the thread's current one, for the time being; nothing that is done in it breaks
    a capture of somebody else's."""
    from cuda.bindings import driver

    code, context = _native.primary_context(device)
    check(code, "cuDevicePrimaryCtxRetain")
    check(int(driver.cuCtxPushCurrent(context)[0]), "cuCtxPushCurrent")
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = driver.cuThreadExchangeStreamCaptureMode(relaxed)[1]
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)
        driver.cuCtxPopCurrent()


def version() -> int:
    """The CUDA version that the driver supports, such as 13000."""
    ensure()
    return _native.driver_version()
