# cython: language_level=3
# distutils: language=c++
"""The thin Python face of the native layer."""

import enum
import sys
import weakref
from functools import partial
from asyncio import _get_running_loop, current_task

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_RECORDS_RO,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.dict cimport PyDict_Next
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from cpython.ref cimport Py_DECREF, Py_INCREF
from cpython.weakref cimport PyWeakref_NewRef
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport strchr, strlen
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

cimport numpy as np

cimport driver_abi as abi
cimport engine as core
cimport host_functions as host
from engine cimport MemoryInfo, describe

np.import_array()

# Results that are no driver's code, see admission.h and operation.h.
CAPTURING = -2
CANCELLED = -1


def bind(str name, uintptr_t address):
    """Hands an entry point of the driver to the native layer."""
    if not abi.bind(name.encode(), <void*>address):
        raise KeyError(name)


cdef bint driver_is_usable = False


def set_usable(bint usable):
    """Says whether the driver may be called from now on without asking whether it may."""
    global driver_is_usable
    driver_is_usable = usable


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


def host_copy_address():
    """The address of the host function that copies."""
    return <uintptr_t>&host.aiocuda_host_copy


def host_signal_address():
    """The address of the host function that signals."""
    return <uintptr_t>&host.aiocuda_host_signal


def contiguous_span(object exporter, bint writable):
    """The address and size of an object's memory, or ``None`` for an object without the buffer protocol.

    The exporter itself raises where it cannot give such a view.
    """
    cdef Py_buffer view
    if not PyObject_CheckBuffer(exporter):
        return None
    PyObject_GetBuffer(exporter, &view, PyBUF_ANY_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0))
    try:
        return <uintptr_t>view.buf, view.len
    finally:
        PyBuffer_Release(&view)


cdef int _drop_finished_host_calls() except -1:
    cdef host.HostCall* call = host.take_finished_host_calls()
    cdef host.HostCall* following
    while call != NULL:
        following = call.next
        Py_DECREF(<object>call.owner)
        host.free_host_call(call)
        call = following
    return 0


def launch_host_func(uintptr_t stream, uintptr_t function, uintptr_t address, object data, object owner):
    """Enqueues a host function; returns whether it came to that, the driver's code and the stream's capture status.

    ``data`` is ``None``, and the function gets ``address``, or bytes that are copied. ``owner`` is kept until the
    function has run. Nothing is kept when the stream is being captured or the driver refuses.
    """
    cdef Py_buffer view
    cdef host.HostCall* call
    cdef host.LaunchResult result
    cdef void* kept = NULL if owner is None else <void*>owner
    if data is None:
        call = host.new_host_call(<abi.HostFunction>function, <void*>address, NULL, 0, kept)
    else:
        PyObject_GetBuffer(data, &view, PyBUF_C_CONTIGUOUS)
        call = host.new_host_call(<abi.HostFunction>function, NULL, view.buf, view.len, kept)
        PyBuffer_Release(&view)
    if call == NULL:
        raise MemoryError("no memory for the copy of user_data")
    if kept != NULL:
        Py_INCREF(owner)
    with nogil:
        result = host.enqueue_host_call(<abi.Stream>stream, call)
    if not result.enqueuing or result.code != 0:
        host.free_host_call(call)
        if kept != NULL:
            Py_DECREF(owner)
    _drop_finished_host_calls()
    return result.enqueuing, result.code, result.capture_status


include "memory.pxi"
include "ticket.pxi"
include "engine.pxi"
include "wait.pxi"
include "kinds.pxi"
include "lenders.pxi"
include "plain.pxi"
include "plain_batch.pxi"
include "objects.pxi"
