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


# What the driver knows about memory.

from cpython.buffer cimport PyBUF_RECORDS_RO, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t


cdef extern from "memory.h" namespace "aiocuda" nogil:
    cdef cppclass MemoryInfo:
        void* context
        int memory_type
        bint managed
        int ordinal
        uint64_t range_start
        uint64_t range_nbytes
        abi.Result result
    MemoryInfo describe(uint64_t address) noexcept


cdef tuple memory_info_tuple(MemoryInfo info):
    if info.result != 0:
        raise_driver_error(info.result, "cuPointerGetAttributes")
    return (
        <uintptr_t>info.context, info.memory_type, info.managed, info.ordinal, info.range_start, info.range_nbytes
    )


cdef int raise_driver_error(abi.Result code, str operation) except -1:
    from aiocuda_copy._errors import CudaError

    raise CudaError(code, error_name(code), operation)


def pointer_attributes(uint64_t address):
    """(context, memory_type, is_managed, ordinal, range_start, range_nbytes); all zero for pageable memory."""
    cdef MemoryInfo info
    with nogil:
        info = describe(address)
    return memory_info_tuple(info)


def pointer_attributes_pair(uint64_t first, uint64_t second):
    """The attributes of two addresses, for one release of the GIL."""
    cdef MemoryInfo one, two
    with nogil:
        one = describe(first)
        two = describe(second)
    return memory_info_tuple(one), memory_info_tuple(two)


def buffer_address(obj):
    """The address of an object's buffer, which the caller keeps exported or alive."""
    cdef Py_buffer view
    PyObject_GetBuffer(obj, &view, PyBUF_RECORDS_RO)
    try:
        return <uintptr_t>view.buf
    finally:
        PyBuffer_Release(&view)
