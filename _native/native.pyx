# cython: language_level=3
# distutils: language=c++
"""The thin Python face of the native layer."""

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_RECORDS_RO,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool

cimport driver_abi as abi
cimport engine as core
cimport host_functions as host

# Results that are no driver's code, see admission.h and operation.h.
CAPTURING = -2
CANCELLED = -1


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


# What the driver knows about memory.

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


# The engine.


cdef class Quota:
    """What one copier may use at a time, and what it has done."""
    cdef core.Quota* _quota

    def __cinit__(self, *, size_t slots, size_t slot_nbytes, size_t workers, bint host_function_hints):
        self._quota = new core.Quota()
        self._quota.slots = slots
        self._quota.slot_nbytes = slot_nbytes
        self._quota.workers = workers
        self._quota.host_function_hints = host_function_hints

    def __dealloc__(self):
        release_quota(self._quota)

    def counters(self):
        """submitted, completed, failed, cancelled, inline, parked, slots in use, busy seconds, bytes by route, small."""
        cdef core.Quota* q = self._quota
        return (
            q.submitted.load(), q.completed.load(), q.failed.load(), q.cancelled.load(), q.inline_completions.load(),
            q.parked_completions.load(), q.slots_in_use.load(), q.worker_busy_ns.load() * 1e-9,
            tuple([q.nbytes_by_route[i].load() for i in range(5)]), q.nbytes_small.load(),
        )


cdef void release_quota(core.Quota* quota) noexcept:
    if quota.references.fetch_sub(1) == 1:
        del quota


cdef class Queue:
    """Finished operations on their way to one event loop."""
    # Never freed: a native thread may be about to write to its descriptor.
    cdef core.CompletionQueue* _queue
    cdef core.QueueNode* _backlog
    cdef readonly Py_ssize_t outstanding
    """Operations submitted and not yet drained."""

    def __cinit__(self, *, bint pipe=False):
        self._queue = new core.CompletionQueue(core.Form.kPipe if pipe else core.Form.kEventfd)
        if not self._queue.ok() and not pipe:
            del self._queue
            self._queue = new core.CompletionQueue(core.Form.kPipe)
        if not self._queue.ok():
            del self._queue
            self._queue = NULL
            raise OSError("no descriptor for the completion queue: raise the limit of open files (ulimit -n)")

    def fileno(self):
        """The descriptor that becomes readable when operations have finished."""
        return self._queue.fd()

    def drain(self, Py_ssize_t most):
        """At most so many finished operations, oldest first, with their small results copied out; and if there are more."""
        cdef core.QueueNode* node
        cdef Operation operation
        cdef list finished = []
        if self._backlog == NULL:
            self._backlog = self._queue.take()
        while self._backlog != NULL and most > 0:
            node = self._backlog
            self._backlog = node.next
            operation = <Operation>(<core.CxxOperation*>node).owner
            Py_DECREF(operation)
            operation.conclude()
            finished.append(operation)
            most -= 1
        self.outstanding -= len(finished)
        return finished, self._backlog != NULL


cdef class Operation:
    """One copy, batch or synchronisation, from its parts to its outcome."""
    cdef core.CxxOperation* _operation
    cdef core.Engine* _engine
    cdef Quota _quota
    cdef bint _submitted
    cdef bint _abandoned
    cdef uint64_t _nbytes_done
    cdef public object ticket
    """What the loop's side wants back with the completion."""
    cdef readonly int result
    """0, a driver's code, or ``CANCELLED``; valid once drained."""
    cdef readonly bint leaked
    """Whether the device might still touch the caller's memory, so that its owners must never be let go."""

    def __cinit__(self, Quota quota):
        self._quota = quota
        self._operation = new core.CxxOperation()
        self._operation.quota = quota._quota

    def __dealloc__(self):
        if self._operation != NULL and not self._submitted:
            self.drop_marks()
            del self._operation

    cdef void drop_marks(self) noexcept:
        cdef core.CxxOperation* operation = self._operation
        for i in range(operation.marks.size()):
            core.give_mark(operation.marks[i])
        operation.marks.clear()

    def add_part(self, int route, list entries):
        """Entries as tuples (dst, src, width, height, depth, src pitch, src slice, dst pitch, dst slice, attributes)."""
        cdef core.Part part
        cdef core.Entry entry
        cdef uintptr_t dst, src
        cdef size_t width, height, depth, src_pitch, src_slice, dst_pitch, dst_slice
        cdef unsigned attributes
        part.operation = self._operation
        part.route = <core.Route><unsigned char>route
        part.entries.reserve(len(entries))
        for item in entries:
            dst, src, width, height, depth, src_pitch, src_slice, dst_pitch, dst_slice, attributes = item
            entry.dst, entry.src, entry.attributes = dst, src, attributes
            entry.shape.width, entry.shape.height, entry.shape.depth = width, height, depth
            entry.shape.src_pitch, entry.shape.src_slice = src_pitch, src_slice
            entry.shape.dst_pitch, entry.shape.dst_slice = dst_pitch, dst_slice
            if entry.shape.nbytes() != 0:
                part.entries.push_back(entry)
        if part.entries.size() != 0:
            self._operation.parts.push_back(part)

    def add_copy(self, int route, uintptr_t dst, uintptr_t src, size_t nbytes):
        """A part of one contiguous copy."""
        cdef core.Part part
        cdef core.Entry entry
        entry.dst, entry.src, entry.attributes = dst, src, 0
        entry.shape.width = nbytes
        part.operation = self._operation
        part.route = <core.Route><unsigned char>route
        part.entries.push_back(entry)
        self._operation.parts.push_back(part)

    def set_attributes(self, list attributes):
        """The batch's attributes as tuples (access order, hint type, hint id, hint type, hint id, flags)."""
        cdef abi.CopyAttributes native
        for order, source_type, source_id, destination_type, destination_id, flags in attributes:
            native.source_access_order = order
            native.source_hint.type, native.source_hint.id = source_type, source_id
            native.destination_hint.type, native.destination_hint.id = destination_type, destination_id
            native.flags = flags
            self._operation.attributes.push_back(native)

    def mark(self, uint64_t stream, uintptr_t context, *, bint own, bint always=False):
        """Makes the operation wait for the work that is in a stream now. Returns a code; records nothing on failure.

        ``own`` is said of the stream that the copy is ordered in, which must be marked last. With ``always`` the mark is
        set also in an idle stream.
        """
        cdef core.CxxOperation* operation = self._operation
        cdef size_t before = operation.marks.size()
        cdef int result
        with nogil:
            result = core.mark_stream(stream, <abi.Context>context, always, &operation.marks)
        if own:
            operation.stream_key = core.make_stream_key(stream)
            operation.stream_marked = operation.marks.size() > before
        return result

    def mark_event(self, uintptr_t event):
        """Makes the operation wait for an event of the caller's."""
        cdef core.Mark mark
        mark.event = <abi.Event>event
        mark.context = NULL
        mark.owned = False
        self._operation.marks.push_back(mark)

    def enqueue(self, int device, uint64_t stream, uintptr_t context):
        """Enqueues the parts as ordinary work of the stream. Returns a code; with one that is not 0 nothing is submitted."""
        cdef int result
        self._engine = core.Engine.of_device(device)
        self._operation.stream_key = core.make_stream_key(stream)
        with nogil:
            result = core.enqueue_in_stream(stream, <abi.Context>context, self._engine, self._operation)
        if result == 0:
            self._operation.stream_marked = True
            self._operation.phase.store(core.Phase.kAdmitted)
        else:
            self.leaked = self._operation.leaked
        return result

    def synchronize(self):
        """Says that the operation waits for the library's own copies of its stream as well."""
        self._operation.synchronizes = True

    def submit(self, int device, Queue queue):
        """Hands the operation to the device's engine. It comes back from the queue's ``drain``, exactly once."""
        self._engine = core.Engine.of_device(device)
        if self._engine == NULL:
            raise ValueError(f"no device {device}")
        self._operation.owner = <void*>self
        self._operation.queue = queue._queue
        self._submitted = True
        queue.outstanding += 1
        Py_INCREF(self)
        self._engine.submit(self._operation)

    def cancel(self):
        """Whether the operation was stopped before anything of the caller's was touched; else its completion must be
        awaited, and comes soon."""
        if self._operation == NULL or not self._submitted:
            return True
        self._abandoned = True
        return self._engine.cancel(self._operation)

    @property
    def nbytes_done(self):
        """Bytes that have arrived so far."""
        return self._nbytes_done if self._operation == NULL else self._operation.nbytes_done.load()

    cdef void conclude(self):
        cdef core.CxxOperation* operation = self._operation
        cdef core.Piece* landed = operation.landed
        if landed != NULL:
            if not self._abandoned:
                core.run_host_copies(landed[0])
            self._engine.give_back(landed)
        self.result = operation.result
        self.leaked = operation.leaked
        self._nbytes_done = operation.nbytes_done.load()
        self._operation = NULL
        del operation
        release_quota(self._quota._quota)


def check_not_capturing(uint64_t stream, uintptr_t context):
    """0, ``CAPTURING`` or a driver's code; leaves every capture valid."""
    cdef int result
    with nogil:
        result = core.check_not_capturing(stream, <abi.Context>context)
    return result


def stream_context(uint64_t stream, uintptr_t fallback):
    """A code and the context of a stream, which for the driver's special handles is the fallback."""
    cdef abi.Context context = NULL
    cdef int result
    with nogil:
        result = core.context_of(stream, <abi.Context>fallback, &context)
    return result, <uintptr_t>context


def primary_context(int device):
    """A code and the device's primary context, which is retained."""
    cdef abi.Context context = NULL
    cdef int result
    with nogil:
        result = core.primary_context(device, &context)
    return result, <uintptr_t>context


def device_count():
    """A code and the number of devices."""
    cdef int count = 0
    cdef int result = abi.driver.device_get_count(&count)
    return result, count


def has_batch():
    """Whether the driver has cuMemcpyBatchAsync."""
    return abi.has_batch()


def engine_devices():
    """The devices that have an engine."""
    return [engine.device() for engine in core.Engine.all()]


def engine_nbytes_held(int device):
    """Bytes of page-locked slots that the device's engine holds."""
    for engine in core.Engine.all():
        if engine.device() == device:
            return engine.nbytes_held()
    return 0


def trim_slots(int device, size_t slot_nbytes):
    """Frees the idle slots of a size."""
    for engine in core.Engine.all():
        if engine.device() == device:
            with nogil:
                engine.trim(slot_nbytes)


def stop_engines(double timeout):
    """Asks the engines' threads to end, once they have nothing to do; returns whether all did in time."""
    cdef cbool stopped
    cdef uint64_t nanoseconds = <uint64_t>(timeout * 1e9)
    result = True
    for engine in core.Engine.all():
        with nogil:
            stopped = engine.stop(nanoseconds)
        result = result and stopped
    return result


def cpu_budget():
    """Processors this process may use: affinity and cgroup quota."""
    return core.cpu_budget()


def streaming_copy_variant():
    """The instruction set that the workers copy with."""
    return core.streaming_copy_variant().decode()
