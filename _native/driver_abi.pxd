cdef extern from "driver_abi.h" namespace "aiocuda::abi" nogil:
    ctypedef int Result
    ctypedef void* Stream
    ctypedef void* Context
    ctypedef void* Event
    ctypedef unsigned long long DevicePointer
    ctypedef void (*HostFunction)(void*) noexcept nogil
    bint bind(const char* name, void* address)
    bint has_batch()
    int kDeviceIntegrated
    int kMemoryDevice
    int kMemoryHost

    cdef struct MemoryLocation:
        int type
        int id

    cdef struct CopyAttributes:
        int source_access_order
        MemoryLocation source_hint
        MemoryLocation destination_hint
        unsigned flags

    cdef cppclass Driver:
        Result (*init)(unsigned) noexcept nogil
        Result (*get_error_name)(Result, const char**) noexcept nogil
        Result (*driver_get_version)(int*) noexcept nogil
        Result (*context_get_current)(Context*) noexcept nogil
        Result (*device_get)(int*, int) noexcept nogil
        Result (*device_get_count)(int*) noexcept nogil
        Result (*device_get_attribute)(int*, int, int) noexcept nogil
        Result (*stream_is_capturing)(Stream, int*) noexcept nogil
        Result (*launch_host_function)(Stream, HostFunction, void*) noexcept nogil
    Driver driver
