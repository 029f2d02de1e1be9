from driver_abi cimport HostFunction, Result, Stream

cdef extern from "host_functions.h" namespace "aiocuda" nogil:
    void aiocuda_host_copy(void* record) noexcept
    void aiocuda_host_signal(void* record) noexcept

cdef extern from "host_call.h" namespace "aiocuda" nogil:
    cdef cppclass HostCall:
        void* owner
        HostCall* next

    cdef cppclass LaunchResult:
        bint enqueuing
        Result code
        int capture_status

    HostCall* new_host_call(HostFunction function, void* address, const void* data, size_t nbytes, void* owner) noexcept
    void free_host_call(HostCall* call) noexcept
    HostCall* take_finished_host_calls() noexcept
    LaunchResult enqueue_host_call(Stream stream, HostCall* call) noexcept
