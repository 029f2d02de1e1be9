# The short way for batches of numbers between bases, or addresses, that are easily known (kinds.pxi): the Python of the
# long way (_blocks.py) takes 100 us, and three times that on cold caches, where a batch may take 1 ms.

# What takes longer to check is left to a thread by the long way.
cdef uint64_t kMostCheckedNs = 500_000
# No stream is ordered by memory of the host.
cdef object kNoStream = -1


# What is known of a side that has a base.
@cython.internal
@cython.final
cdef class Bound:
    cdef core.Claim claim
    # What must be held besides the base for its memory to stay; mostly the base itself.
    cdef object holder
    # Of the stream that a copy comes after.
    cdef object handle


cdef bint numbers_of(object obj, bint may_be_signed, Py_buffer* view) except -1:
    """Takes hold of a row of 64-bit integers; whether it is one."""
    cdef const char* codes = b"LQlq" if may_be_signed else b"LQ"
    try:
        PyObject_GetBuffer(obj, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    except (BufferError, ValueError, TypeError):
        return False
    if view.ndim == 1 and view.itemsize == 8 and view.format != NULL and strlen(view.format) == 1:
        if strchr(codes, view.format[0]) != NULL:
            return True
    PyBuffer_Release(view)
    return False


cdef Bound bound(core.BatchSide* side, object base, bint writable, object handle, Operation operation):
    """Finds the memory of a base, of which the operation takes hold; ``None`` for what is not plain."""
    cdef Span memory
    cdef DeviceKind kind = device_kind_of(type(base))
    cdef Bound found = Bound.__new__(Bound)
    found.claim = core.Claim.kHost
    found.handle = kNoStream
    # Where there is host memory as well, the long way knows which is meant.
    if kind is not no_device_kind and not (type(kind) is CudaArrayKind and PyObject_CheckBuffer(base)):
        found.holder = kind.ask(base, writable, &memory)
        if found.holder is not None:
            found.claim = core.Claim.kEither if type(kind) is CoreBufferKind else core.Claim.kDevice
            found.handle = kind.stream_of(base, handle)
            if type(found.handle) is not int:
                return None
    if found.holder is None and (kind is no_device_kind or type(kind) is TorchKind) and not operation._holds_view:
        found.holder = host_kind_of(type(base)).take(base, writable, operation, &memory)
    if found.holder is None:
        return None
    side.bounded, side.base, side.nbytes = True, memory.address, memory.nbytes
    return found


def submit_numbers(
    Quota quota, Queue queue, src_base, srcs, dst_base, dsts, sizes, stream, handle, int device,
    bint check_overlap, Py_ssize_t most, Py_ssize_t most_sorted
):
    """Submits a batch of so many entries at most; a side is addresses, without a base, or offsets into one.

    The stream is held as long as the bases are; its handle is ``None`` where none is named.

    Returns the operation; ``None`` for what must take the long way, or ``False`` where that should leave the checks to
    a thread at once: nothing has happened then.
    """
    cdef Py_buffer views[3]
    cdef int count = 0
    cdef uint64_t one, too_large = 0
    cdef Py_ssize_t i
    cdef core.PerEntry[uint64_t] size_of
    try:
        if not numbers_of(srcs, src_base is not None, &views[0]):
            return None
        count = 1
        if not numbers_of(dsts, dst_base is not None, &views[1]):
            return None
        count = 2
        if views[0].len != views[1].len or views[0].len == 0 or views[0].len // 8 > most:
            return None
        size_of.one = type(sizes) is int
        if size_of.one:
            if not 0 < sizes < 2**63:
                return None
            one = sizes
            size_of.values = &one
        else:
            if not numbers_of(sizes, True, &views[2]):
                return None
            count = 3
            if views[2].len != views[0].len:
                return None
            size_of.values = <const uint64_t*>views[2].buf
            for i in range(views[2].len // 8):
                too_large |= size_of.values[i]
            if too_large >> 63:
                return None
        return submit_sides(
            quota, queue, src_base, <const uint64_t*>views[0].buf, dst_base, <const uint64_t*>views[1].buf, size_of,
            views[0].len // 8, stream, handle, device, check_overlap, views[0].len // 8 <= most_sorted,
        )
    finally:
        for i in range(count):
            PyBuffer_Release(&views[i])


cdef object submit_sides(
    Quota quota, Queue queue, object src_base, const uint64_t* srcs, object dst_base, const uint64_t* dsts,
    core.PerEntry[uint64_t] size_of, size_t n, object stream, object handle, int device, bint check_overlap,
    bint may_sort,
):
    cdef Operation operation = Operation.__new__(Operation, quota)
    cdef core.CxxOperation* native = operation._operation
    cdef core.BatchSide src_side, dst_side
    cdef core.AddressesResult added
    cdef core.PerEntry[uint32_t] attributes_of
    cdef uint32_t no_attributes = 0
    cdef uint64_t stream_handle
    cdef bint looks_for_overlaps = check_overlap or dst_base is not None
    cdef core.Overlap overlap
    cdef core.Claim src_claim = core.Claim.kHost, dst_claim = core.Claim.kHost
    cdef set found = set()
    cdef bint takes_long = False
    cdef int code = 0
    cdef Bound src_bound = None, dst_bound = None
    src_side.values, dst_side.values = srcs, dsts
    try:
        if src_base is not None:
            src_bound = bound(&src_side, src_base, False, handle, operation)
            if src_bound is None:
                return None
            src_claim = src_bound.claim
            found.add(src_bound.handle)
        if dst_base is not None:
            dst_bound = bound(&dst_side, dst_base, True, handle, operation)
            if dst_bound is None:
                return None
            dst_claim = dst_bound.claim
            found.add(dst_bound.handle)
    except Exception:  # the long way meets it again
        return None
    found.discard(kNoStream)
    if len(found) > 1:
        return None
    named = found.pop() if found else 0 if handle is None else handle
    if not 0 <= named < 2**64:
        return None
    stream_handle = named
    native.unowned = src_base is None
    attributes_of.values, attributes_of.one = &no_attributes, True
    with nogil:
        added = core.add_addresses(
            native, dst_side, src_side, size_of, attributes_of, 0, n, -1, core.now_ns() + kMostCheckedNs
        )
        takes_long = added.problem == 0 and added.index != n
        if (
            added.problem != 0
            or takes_long
            or added.device < 0
            or 0 <= device != added.device
            or (src_side.bounded and not core.as_claimed(src_side, src_claim, added.src, added.device, added.context))
            or (dst_side.bounded and not core.as_claimed(dst_side, dst_claim, added.dst, added.device, added.context))
        ):
            code = 1
        if code == 0 and looks_for_overlaps:
            overlap = core.find_overlap(native[0], may_sort)
            takes_long = overlap == core.Overlap.kUnknown
            if overlap != core.Overlap.kNone:
                code = 1
        if code == 0 and added.context == NULL:
            code = core.primary_context(added.device, &added.context)
        if code == 0:
            code = core.mark_stream(stream_handle, added.context, False, &native.marks)
    if code != 0:
        return False if takes_long else None
    core.know_stream(native, stream_handle, added.context, native.marks.size() != 0)
    # Not the Blocks, which may be given another base.
    operation.submit(added.device, queue, [
        dst_base, None if dst_bound is None else dst_bound.holder,
        src_base, None if src_bound is None else src_bound.holder, stream,
    ], 2)
    return operation
