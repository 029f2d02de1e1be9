# The short way for batches of numbers between bases, or addresses, that are easily known (kinds.pxi): the Python of the
# long way (_blocks.py) takes 100 us, and three times that on cold caches, where a batch may take 1 ms.

# What takes longer to check is left to a thread by the long way.
cdef uint64_t kMostCheckedNs = 500_000
# No stream is ordered by memory of the host.
cdef object kNoStream = -1


cdef bint numbers_of(object obj, bint may_be_signed, Py_buffer* view) except -1:
    """Takes hold of a row of 64-bit integers; whether it is one."""
    cdef const char* codes = b"LQlq" if may_be_signed else b"LQ"
    try:
        PyObject_GetBuffer(obj, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    except (BufferError, ValueError, TypeError):
        return False
    if view.ndim == 1 and view.itemsize == 8 and strlen(view.format) == 1 and strchr(codes, view.format[0]) != NULL:
        return True
    PyBuffer_Release(view)
    return False


cdef tuple bound(core.BatchSide* side, object base, bint writable, object stream, Operation operation):
    """Finds the memory of a base, of which the operation takes hold.

    Returns what must be held besides, and the handle of the stream that a copy comes after; ``None`` for what is not
    plain.
    """
    cdef Span memory
    cdef DeviceKind kind = device_kind_of(type(base))
    handle = kNoStream
    holder = None
    # Where there is host memory as well, the long way knows which is meant.
    if kind is not no_device_kind and not (type(kind) is CudaArrayKind and PyObject_CheckBuffer(base)):
        holder = kind.ask(base, writable, &memory)
        if holder is not None:
            handle = kind.stream_of(base, stream)
            if type(handle) is not int:
                return None
    if holder is None and (kind is no_device_kind or type(kind) is TorchKind) and not operation._holds_view:
        holder = host_kind_of(type(base)).take(base, writable, operation, &memory)
    if holder is None:
        return None
    side.bounded, side.base, side.nbytes = True, memory.address, memory.nbytes
    return holder, handle


def submit_numbers(
    Quota quota, Queue queue, src_base, srcs, dst_base, dsts, sizes, stream, int device, bint check_overlap
):
    """Submits a batch of which each side is addresses, without a base, or offsets into one.

    Returns the operation, ``None`` for what must take the long way, or ``False`` where that should leave the checks to a
    thread at once: nothing has happened then.
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
        if views[0].len != views[1].len or views[0].len == 0:
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
        queue.rouse()
        return submit_sides(
            quota, queue, src_base, <const uint64_t*>views[0].buf, dst_base, <const uint64_t*>views[1].buf, size_of,
            <size_t>views[0].len // 8, stream, device, check_overlap,
        )
    finally:
        for i in range(count):
            PyBuffer_Release(&views[i])


cdef object submit_sides(
    Quota quota, Queue queue, object src_base, const uint64_t* srcs, object dst_base, const uint64_t* dsts,
    core.PerEntry[uint64_t] size_of, size_t n, object stream, int device, bint check_overlap,
):
    cdef Operation operation = Operation.__new__(Operation, quota)
    cdef core.CxxOperation* native = operation._operation
    cdef core.BatchSide src_side, dst_side
    cdef core.AddressesResult added
    cdef core.PerEntry[uint32_t] attributes_of
    cdef uint32_t no_attributes = 0
    cdef uint64_t handle
    cdef bint looks_for_overlaps = check_overlap or dst_base is not None
    cdef core.Overlap overlap
    cdef bint takes_long = False
    cdef int code = 0
    cdef tuple src_bound = (None, kNoStream), dst_bound = (None, kNoStream)
    src_side.values, dst_side.values = srcs, dsts
    try:
        if src_base is not None:
            src_bound = bound(&src_side, src_base, False, stream, operation)
        if dst_base is not None:
            dst_bound = bound(&dst_side, dst_base, True, stream, operation)
    except Exception:  # the long way meets it again
        return None
    if src_bound is None or dst_bound is None:
        return None
    found = {src_bound[1], dst_bound[1]} - {kNoStream}
    if len(found) > 1:
        return None
    found = found.pop() if found else 0 if stream is None else stream
    if not 0 <= found < 2**64:
        return None
    handle = found
    native.unowned = src_base is None
    attributes_of.values, attributes_of.one = &no_attributes, True
    with nogil:
        if src_side.bounded and dst_side.bounded and core.on_other_devices(src_side.base, dst_side.base):
            code = 1
        if code == 0:
            added = core.add_addresses(
                native, dst_side, src_side, size_of, attributes_of, 0, n, -1, core.now_ns() + kMostCheckedNs
            )
            takes_long = added.problem == 0 and added.index != n
            if added.problem != 0 or takes_long or added.device < 0 or 0 <= device != added.device:
                code = 1
        if code == 0 and looks_for_overlaps:
            overlap = core.find_overlap(native[0], False)
            takes_long = overlap == core.Overlap.kUnknown
            if overlap != core.Overlap.kNone:
                code = 1
        if code == 0 and added.context == NULL:
            code = core.primary_context(added.device, &added.context)
        if code == 0:
            code = core.mark_stream(handle, added.context, False, &native.marks)
    if code != 0:
        return False if takes_long else None
    if src_bound[0] is not src_base or dst_bound[0] is not dst_base:
        operation.held = src_bound[0], dst_bound[0]
    native.stream_key = core.make_stream_key(handle)
    native.stream_marked = native.marks.size() != 0
    operation.submit(added.device, queue)
    return operation
