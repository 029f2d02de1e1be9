# What the driver knows about memory.

cdef extern from "memory.h" namespace "aiocuda" nogil:
    int native_current_device "aiocuda::current_device" () noexcept
    abi.Result native_register_host "aiocuda::register_host" (void* address, size_t nbytes, unsigned flags, int device)
    abi.Result native_unregister_host "aiocuda::unregister_host" (void* address, int device)
    void* native_map_host "aiocuda::map_host" (size_t nbytes)
    void native_unmap_host "aiocuda::unmap_host" (void* address, size_t nbytes)
    void native_zero_host "aiocuda::zero_host" (void* address, size_t nbytes)
    void native_inherit_host "aiocuda::inherit_host" (void* address, size_t nbytes, bint inherited)


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


def pointer_attributes_many(list addresses):
    """The attributes of many addresses, for one release of the GIL."""
    cdef vector[uint64_t] asked
    cdef vector[MemoryInfo] found
    cdef size_t i
    cdef size_t n = len(addresses)
    asked.reserve(n)
    for address in addresses:
        asked.push_back(address)
    found.resize(n)
    with nogil:
        for i in range(n):
            found[i] = describe(asked[i])
    return [memory_info_tuple(found[i]) for i in range(n)]


def buffer_address(obj):
    """The address of an object's buffer, which the caller keeps exported or alive."""
    cdef Py_buffer view
    PyObject_GetBuffer(obj, &view, PyBUF_RECORDS_RO)
    try:
        return <uintptr_t>view.buf
    finally:
        PyBuffer_Release(&view)


# Page-locked host memory.

def current_device():
    """The device of this thread's current context; -1 where there is none."""
    cdef int device
    with nogil:
        device = native_current_device()
    return device


def host_register(uintptr_t address, size_t nbytes, unsigned flags, int device=-1):
    """Page-locks memory in the primary context of a device; returns the driver's code."""
    cdef abi.Result result
    with nogil:
        result = native_register_host(<void*>address, nbytes, flags, device)
    return result


def host_unregister(uintptr_t address, int device=-1):
    """Lets go of page-locked memory; returns the driver's code."""
    cdef abi.Result result
    with nogil:
        result = native_unregister_host(<void*>address, device)
    return result


def map_host(size_t nbytes):
    """The address of fresh zeroed memory; 0 where there is none."""
    cdef void* address
    with nogil:
        address = native_map_host(nbytes)
    return <uintptr_t>address


def unmap_host(uintptr_t address, size_t nbytes):
    with nogil:
        native_unmap_host(<void*>address, nbytes)


def zero_host(uintptr_t address, size_t nbytes):
    with nogil:
        native_zero_host(<void*>address, nbytes)


def inherit_host(uintptr_t address, size_t nbytes, bint inherited):
    """Whether the children of a fork get a copy of mapped memory."""
    with nogil:
        native_inherit_host(<void*>address, nbytes, inherited)


@cython.final
@cython.no_gc
cdef class HostBlock:
    """Writable memory that goes home when the last view of it is gone, from whichever thread that happens."""

    cdef readonly uintptr_t address
    cdef readonly size_t nbytes
    cdef object home
    cdef object token
    cdef object __weakref__

    def __cinit__(self, uintptr_t address, size_t nbytes, home, token):
        self.address = address
        self.nbytes = nbytes
        self.home = home
        self.token = token

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, <void*>self.address, <Py_ssize_t>self.nbytes, 0, flags)

    def __del__(self):
        self.home(self.token)


@cython.final
cdef class PoolAccount:
    """What a pool holds and may hold, and how it fared. Each method is atomic: it runs no Python code."""

    cdef readonly long long limit_nbytes
    cdef readonly long long held_nbytes
    cdef readonly long long hits
    cdef readonly long long misses
    cdef readonly long long refusals

    def __cinit__(self, long long limit_nbytes):
        self.limit_nbytes = limit_nbytes

    def set_limit(self, long long limit_nbytes):
        self.limit_nbytes = limit_nbytes

    def reserve(self, long long nbytes):
        if nbytes > self.limit_nbytes - self.held_nbytes:
            return False
        self.held_nbytes += nbytes
        return True

    def release(self, long long nbytes):
        self.held_nbytes -= nbytes

    def shrink(self, long long refused_nbytes):
        """Of a reservation that the driver refused half is tried next time."""
        self.held_nbytes -= refused_nbytes
        self.limit_nbytes = min(self.limit_nbytes, self.held_nbytes + refused_nbytes // 2)

    def hit(self):
        self.hits += 1

    def miss(self):
        self.misses += 1

    def refuse(self):
        self.refusals += 1
