# The short way for what servers await most: a small contiguous copy between an object whose device memory is easily
# known and one with the buffer protocol. Whatever is not that plain, or wrong, takes the long way, which has the error
# messages.

cdef enum:
    kLongWay = 0
    kCudaArray = 1
    kCoreBuffer = 2

# How an object of a type tells of its device memory, and whether what its buffer holds is all there is to an object of
# a type. Only types are kept, not objects.
cdef dict device_kinds = {}
cdef dict plain_hosts = {}


# Not typed as "type", which Cython takes for exactly that: many classes have a metaclass.
cdef str package_of(object kind):
    return str(kind.__module__ or "").partition(".")[0]


cdef int device_kind_of(object kind):
    # Theirs is the current stream where none is given, and torch tensors have more to be asked; a subclass may come
    # from anywhere.
    for base in kind.__mro__:
        if package_of(base) in ("torch", "cupy"):
            return kLongWay
    if package_of(kind) == "cuda" and kind.__name__ in ("Buffer", "ManagedBuffer"):
        return kCoreBuffer
    if hasattr(kind, "__cuda_array_interface__"):
        return kCudaArray
    return kLongWay


cdef bint is_plain_host(object kind):
    """Masked arrays have more than their buffer, NumPy's scalars are no memory of the caller's, and a memoryview that
    is exported from could not be released."""
    if kind is memoryview:
        return False
    for base in kind.__mro__:
        if package_of(base) == "numpy" and base.__name__ != "ndarray":
            return False
    return True


cdef bint device_memory(object obj, bint writable, uint64_t* address, size_t* nbytes) except -1:
    """Whether it could be told."""
    cdef dict interface
    cdef size_t size
    kind = device_kinds.get(type(obj))
    if kind is None:
        kind = device_kinds[type(obj)] = device_kind_of(type(obj))
    if kind == kCudaArray:
        found = obj.__cuda_array_interface__
        if type(found) is not dict:
            return False
        interface = found
        data = interface.get("data")
        typestr = interface.get("typestr")
        if (
            interface.get("strides") is not None
            or interface.get("stream") is not None
            or interface.get("mask") is not None
            or type(data) is not tuple
            or not data[0]
            or (writable and data[1])
            # Before version 3 it says nothing about streams, and DLPack is the one to ask.
            or interface.get("version", 0) < 3
            or type(typestr) is not str
            # Of others, such as "<U4" or "<M8[ns]", the number is not the size.
            or typestr[1] not in "biufcSV"
        ):
            return False
        size = int(typestr[2:])
        for n in interface["shape"]:
            size *= n
        address[0] = data[0]
        nbytes[0] = size
        return True
    if kind == kCoreBuffer:
        handle = obj.handle
        if not handle:
            return False
        address[0] = int(handle)
        nbytes[0] = obj.size
        return True
    return False


# A small copy takes 6 us; one that has not landed by then is behind something.
cdef uint64_t kInlineSpinNs = 12_000
# Copies inside calls hold the loop for 200 us at most before one suspends (api.md); this leaves room for the last one.
cdef uint64_t kMostHeldNs = 180_000
# Beside a busy Python thread the way back to the GIL takes 5 ms: then copies park for a while, which needs one way
# less.
cdef uint64_t kSlowGilNs = 1_000_000
cdef uint64_t kParkForNs = 200_000_000


# What is still read belongs to no copier: its await has ended.
cdef Quota readers = Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False)


cdef Operation reader_of(core.Run run):
    cdef Operation reader = Operation.__new__(Operation, readers)
    reader._abandoned = True
    reader._operation.landed = run.slower
    reader._operation.marks.push_back(run.mark)
    reader._operation.in_stream = True
    reader._operation.phase.store(core.Phase.kAdmitted)
    return reader


def submit_small(
    Quota quota, Queue queue, src, dst, stream, bint to_host, int device, bint inlined
):
    """Submits a small contiguous copy, or finishes it inside the call when its stream is idle.

    Returns the operation, ``True`` when the copy is done, or ``None`` for what must take the long way: nothing has
    happened then. And a second operation, or ``None``, which ends when the device no longer reads the source on the
    road that was slower.
    """
    cdef Operation operation
    cdef core.CxxOperation* native
    cdef MemoryInfo info
    cdef core.Entry entry
    cdef core.Part* part
    cdef uint64_t address = 0, handle
    cdef size_t nbytes = 0
    cdef int code
    cdef core.Engine* engine
    cdef core.Run run
    cdef core.Outcome outcome = core.Outcome.kDeclined
    cdef Operation reader = None
    cdef uint64_t begin = 0, end = 0
    cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if to_host else 0)
    host, on_device = (dst, src) if to_host else (src, dst)
    if type(stream) is int:
        if not 0 <= stream < 2**64:
            return None, None
        handle = stream
    elif stream is None:
        handle = 0
    else:
        return None, None
    if not PyObject_CheckBuffer(host):
        return None, None
    plain = plain_hosts.get(type(host))
    if plain is None:
        plain = plain_hosts[type(host)] = is_plain_host(type(host))
    if not plain or not device_memory(on_device, not to_host, &address, &nbytes):
        return None, None
    if nbytes == 0 or nbytes > core.kSmallBytes:
        return None, None
    operation = Operation.__new__(Operation, quota)
    try:
        # An own view, so that the caller's may be released meanwhile.
        if type(host) is memoryview:
            host = memoryview(host)
        PyObject_GetBuffer(host, &operation._view, flags)
    except (BufferError, ValueError, TypeError):
        return None, None
    operation._holds_view = True
    if <size_t>operation._view.len != nbytes or (
        operation._view.format != NULL and strchr(operation._view.format, b"O") != NULL
    ):
        return None, None
    native = operation._operation
    part = operation.part_of(<int>(core.Route.kToHostStaged if to_host else core.Route.kToDeviceStaged))
    entry.dst = <uintptr_t>operation._view.buf if to_host else address
    entry.src = address if to_host else <uintptr_t>operation._view.buf
    entry.shape.width = nbytes
    part.entries.push_back(entry)
    if inlined and queue._held_ns >= kMostHeldNs:
        inlined = False
    with nogil:
        info = describe(address)
        code = info.result
        if code == 0 and (
            info.memory_type != abi.kMemoryDevice
            or info.managed
            or (device >= 0 and info.ordinal != device)
            or nbytes > info.range_start + info.range_nbytes - address
        ):
            code = 1
        if code == 0 and info.context == NULL:
            code = core.primary_context(info.ordinal, &info.context)
        if code == 0:
            code = core.mark_stream(handle, info.context, False, &native.marks)
        if code == 0:
            engine = core.Engine.of_device(info.ordinal)
            if inlined and native.marks.size() == 0:
                begin = core.now_ns()
                if begin >= queue._parks_until_ns:
                    run = engine.run_inline(native, kInlineSpinNs)
                    outcome = run.outcome
                    end = core.now_ns()
    if code != 0:
        return None, None
    if outcome != core.Outcome.kDeclined:
        queue._held_ns += end - begin
        if core.now_ns() - end > kSlowGilNs:
            queue._parks_until_ns = end + kParkForNs
        if run.slower != NULL:
            reader = reader_of(run)
            reader.submit(info.ordinal, queue)
    if outcome == core.Outcome.kDone:
        quota._quota.submitted.fetch_add(1)
        quota._quota.completed.fetch_add(1)
        quota._quota.inline_completions.fetch_add(1)
        quota._quota.nbytes_small.fetch_add(nbytes)
        return True, reader
    if outcome == core.Outcome.kParked:
        quota._quota.nbytes_small.fetch_add(nbytes)
    native.stream_key = core.make_stream_key(handle)
    native.stream_marked = native.marks.size() != 0 and outcome == core.Outcome.kDeclined
    operation.submit(info.ordinal, queue)
    return operation, reader
