# cython: language_level=3
# distutils: language=c++
"""The thin Python face of the native layer."""

from libc.stdint cimport uintptr_t

cimport driver_abi as abi


def bind(str name, uintptr_t address):
    """Hands an entry point of the driver to the native layer."""
    if not abi.bind(name.encode(), <void*>address):
        raise KeyError(name)


def init():
    """Initialises the driver; returns its code."""
    cdef abi.Result result
    with nogil:
        result = abi.driver.init(0)
    return result


def driver_version():
    """The CUDA version that the driver supports."""
    cdef int version = 0
    abi.driver.driver_get_version(&version)
    return version


def error_name(abi.Result code):
    """The driver's name of a code."""
    cdef const char* name = NULL
    if abi.driver.get_error_name != NULL and abi.driver.get_error_name(code, &name) == 0 and name != NULL:
        return name.decode()
    return f"CUDA_ERROR_{code}"
