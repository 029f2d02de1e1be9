"""The errors that the public functions raise beside TypeError and ValueError."""

from __future__ import annotations

import contextlib

__all__ = ["ClosedError", "CudaError", "ForkedError", "let_go_of_buffers"]

# Codes after which a context is unusable for the rest of the process, from the driver's documentation of CUresult:
# each of them says that the process must be relaunched or the context destroyed.
_STICKY_CODES = frozenset({46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})


_PACKAGE = __name__.partition(".")[0] + "."


class CudaError(RuntimeError):
    """A call or an operation failed in the CUDA driver.

    Attributes
    ----------
    code : int
        The driver's ``CUresult``.
    name : str
        Its name, such as ``"CUDA_ERROR_ILLEGAL_ADDRESS"``.
    operation : str
        What was being done, such as ``"cuMemcpyDtoHAsync"`` or ``"copy_to_host"``.
    sticky : bool
        Whether the context is lost: every later call fails with the same code, and only a new process helps.
    """

    code: int
    name: str
    operation: str
    sticky: bool

    def __init__(self, code: int, name: str, operation: str) -> None:
        self.code = int(code)
        self.name = name
        self.operation = operation
        self.sticky = self.code in _STICKY_CODES
        hint = "; the CUDA context is lost, restart the process" if self.sticky else ""
        super().__init__(f"{operation} failed with {name} ({self.code}){hint}")

    def __reduce__(self) -> tuple[type[CudaError], tuple[int, str, str]]:
        return type(self), (self.code, self.name, self.operation)


class ClosedError(RuntimeError):
    """The copier has been closed."""


class ForkedError(RuntimeError):
    """The parent process had used CUDA through this package before it forked; the child cannot."""


def let_go_of_buffers(error: BaseException) -> None:
    """Empties this package's frames in the traceback of an error that is about to leave it.

    A caller who keeps the error would else keep the buffers exported that those frames had taken hold of. The frames
    of others, such as a callback's, are left to debuggers.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # Trio raises a cancellation where it comes from, whose frames may only rest.
        if isinstance(one, Exception):
            chain += (one.__cause__, one.__context__)
        traceback = one.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
                with contextlib.suppress(RuntimeError):  # it still runs, and will let go by itself
                    frame.clear()
            traceback = traceback.tb_next
