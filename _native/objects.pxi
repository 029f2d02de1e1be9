# The short way for batches of objects: it takes the entries whose memory is as easily known as that of a small copy
# (small.pxi), and puts them into columns. Whatever is not that plain, or wrong, is left to the long way, which has the
# error messages.

cdef enum:
    kUnknownObject = 0
    kArray = 1
    kBuffer = 2
    kDeviceArray = 3
    # Of cuda.core, on either side.
    kEitherBuffer = 4

# How objects of a type are asked for their memory.
cdef dict object_kinds = {}
# The last data type that was seen to hold no Python objects: mostly all arrays of a batch have the same.
cdef object plain_dtype = None

# Entries that are looked at before the driver is asked about them, without the GIL.
cdef enum:
    kChunk = 128
# The loop gets its turn after so many entries, or so long.
cdef Py_ssize_t kMostObjects = 512
cdef uint64_t kMostTurnNs = 400_000


cdef int object_kind_of(object kind):
    if package_of(kind) == "numpy" and kind.__name__ == "ndarray":
        return kArray
    on_device = device_kinds.get(kind)
    if on_device is None:
        on_device = device_kinds[kind] = device_kind_of(kind)
    if on_device == kCoreBuffer:
        return kEitherBuffer
    if on_device != kLongWay:
        return kDeviceArray
    return kBuffer if kind is memoryview or is_plain_host(kind) else kUnknownObject


cdef bint memory_of(
    object obj, bint writable, uint64_t* address, size_t* nbytes, core.Claim* claim, list held
) except -1:
    """Whether it could be told. What must be held beside the object is appended to the list."""
    global plain_dtype
    cdef Py_buffer view
    cdef Py_buffer* held_view
    found = object_kinds.get(type(obj))
    if found is None:
        found = object_kinds[type(obj)] = object_kind_of(type(obj))
    cdef int kind = found
    if kind == kArray:
        dtype = obj.dtype
        if dtype is not plain_dtype:
            if dtype.hasobject:
                return False
            plain_dtype = dtype
        try:
            PyObject_GetBuffer(obj, &view, PyBUF_C_CONTIGUOUS | (PyBUF_WRITABLE if writable else 0))
        except (BufferError, ValueError, TypeError):
            return False
        # An array that is held keeps its memory.
        address[0], nbytes[0] = <uint64_t>view.buf, view.len
        PyBuffer_Release(&view)
        claim[0] = core.Claim.kHost
        return True
    if kind == kDeviceArray:
        # Where there is host memory as well, the long way knows which is meant.
        if PyObject_CheckBuffer(obj):
            return False
        claim[0] = core.Claim.kDevice
        return device_memory(obj, writable, address, nbytes)
    if kind == kEitherBuffer:
        claim[0] = core.Claim.kEither
        return device_memory(obj, writable, address, nbytes)
    if kind == kBuffer and PyObject_CheckBuffer(obj):
        try:
            exported = memoryview(obj)
        except (BufferError, ValueError, TypeError):
            return False
        held_view = PyMemoryView_GET_BUFFER(exported)
        if (
            (writable and held_view.readonly)
            or not PyBuffer_IsContiguous(held_view, b"C")
            or (held_view.format != NULL and strchr(held_view.format, b"O") != NULL)
        ):
            return False
        address[0], nbytes[0] = <uint64_t>held_view.buf, held_view.len
        claim[0] = core.Claim.kHost
        held.append(exported)
        return True
    return False


def add_objects(Operation operation, list srcs, list dsts, Py_ssize_t first, int device, uintptr_t context, list held):
    """Adds entries from ``first`` on, whose device and context are to be these, as columns of the operation.

    Returns the index of the first entry that it did not take: because it is not plain, or because the loop is to have
    its turn. What must be held beside the objects is appended to ``held``.
    """
    cdef core.PlainBatch batch = core.PlainBatch(operation._operation, len(srcs), device, <abi.Context>context)
    cdef core.PlainBatch.Pair pairs[kChunk]
    cdef core.PlainBatch.Pair* pair
    cdef size_t src_nbytes = 0
    cdef size_t gathered, taken
    cdef Py_ssize_t end = min(len(srcs), first + kMostObjects)
    cdef uint64_t until = core.now_ns() + kMostTurnNs
    while first < end:
        gathered = 0
        while gathered < kChunk and first + <Py_ssize_t>gathered < end:
            pair = &pairs[gathered]
            src, dst = srcs[first + gathered], dsts[first + gathered]
            if not memory_of(src, False, &pair.src, &src_nbytes, &pair.src_claim, held):
                break
            if not memory_of(dst, True, &pair.dst, &pair.nbytes, &pair.dst_claim, held):
                break
            if src_nbytes != pair.nbytes:
                break
            gathered += 1
        with nogil:
            taken = batch.add(pairs, gathered)
        first += taken
        if taken < kChunk or core.now_ns() > until:
            break
    return first
