# The short way for batches of objects: it takes the entries whose memory is as easily known as that of a small copy
# (kinds.pxi), and puts them into columns. Whatever is not that plain, or wrong, is left to the long way, which has the
# error messages.

cdef enum:
    kUnknownObject = 0
    kArray = 1
    kBuffer = 2
    kDeviceArray = 3
    # Of cuda.core, on either side.
    kEitherBuffer = 4
    # Of torch, on either side.
    kTensor = 5


@cython.internal
@cython.final
cdef class ObjectKind:
    """How objects of a type are asked for their memory."""
    cdef object type
    cdef int how
    cdef DeviceKind on_device

    def __cinit__(self, object kind):
        self.type = kind
        self.on_device = device_kind_of(kind)
        self.how = how_to_ask(kind, self.on_device)


cdef dict object_kinds = {}
cdef ObjectKind no_object_kind = ObjectKind(object)

# Entries that are looked at before the driver is asked about them, without the GIL.
cdef enum:
    kChunk = 128
# The loop gets its turn after so many entries, or so long.
cdef Py_ssize_t kMostObjects = 512
cdef uint64_t kMostTurnNs = 400_000
cdef Py_ssize_t kMostAtOnce = 256


cdef ObjectKind object_kind_of(object kind):
    found = object_kinds.get(kind)
    if found is None:
        found = remember(object_kinds, kind, ObjectKind(kind))
    return <ObjectKind>found


cdef int how_to_ask(object kind, DeviceKind on_device):
    if kind is np.ndarray:
        return kArray
    if isinstance(on_device, CoreBufferKind):
        return kEitherBuffer
    if isinstance(on_device, CudaArrayKind):
        return kDeviceArray
    if isinstance(on_device, TorchKind):
        return kTensor
    # CuPy's arrays name a stream, each.
    if on_device is not no_device_kind:
        return kUnknownObject
    return kBuffer if isinstance(host_kind_of(kind), BufferKind) else kUnknownObject


cdef bint memory_of(
    object obj, ObjectKind kind, bint writable, uint64_t* address, size_t* nbytes, core.Claim* claim,
    core.Strided* strided, list held,
) except -1:
    """Whether it could be told. What must be held beside the object is appended to the list."""
    cdef Py_buffer* held_view
    cdef Span memory
    cdef bint on_device
    if kind.how == kArray:
        if not array_memory(<np.ndarray>obj, writable, &memory):
            return False
        address[0], nbytes[0] = memory.address, memory.nbytes
        claim[0] = core.Claim.kHost
        return True
    if kind.how == kDeviceArray:
        # Where there is host memory as well, the long way knows which is meant.
        if PyObject_CheckBuffer(obj):
            return False
        claim[0] = core.Claim.kDevice
        return cuda_array(obj, writable, (<CudaArrayKind>kind.on_device).least_version, address, nbytes, strided)
    if kind.how == kEitherBuffer or kind.how == kTensor:
        if kind.how == kEitherBuffer:
            claim[0] = core.Claim.kEither
            holder = kind.on_device.ask(obj, writable, &memory)
        else:
            holder = (<TorchKind>kind.on_device).ask_anywhere(obj, writable, &memory, &on_device)
            claim[0] = core.Claim.kDevice if on_device else core.Claim.kHost
        if holder is None:
            return False
        address[0], nbytes[0] = memory.address, memory.nbytes
        if holder is not obj:
            held.append(holder)
        return True
    if kind.how == kBuffer:
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


cdef size_t plain_pairs(
    list srcs, list dsts, Py_ssize_t first, Py_ssize_t end, core.PlainBatch.Pair* pairs, list held_srcs, list held_dsts,
    uint64_t until,
) except? 0:
    """Finds the memory of entries up to the first that is not plain; returns how many, ``kChunk`` at most, or those for
    which there was time."""
    cdef core.PlainBatch.Pair* pair
    cdef size_t src_nbytes = 0, found = 0
    cdef bint plain
    cdef ObjectKind src_kind = no_object_kind, dst_kind = no_object_kind
    while found < kChunk and first + <Py_ssize_t>found < end:
        pair = &pairs[found]
        src, dst = srcs[first + found], dsts[first + found]
        pair.src_strided.width = pair.dst_strided.width = 0
        if type(src) is not src_kind.type:
            src_kind = object_kind_of(type(src))
        if type(dst) is not dst_kind.type:
            dst_kind = object_kind_of(type(dst))
        try:
            plain = memory_of(
                src, src_kind, False, &pair.src, &src_nbytes, &pair.src_claim, &pair.src_strided, held_srcs
            ) and memory_of(
                dst, dst_kind, True, &pair.dst, &pair.nbytes, &pair.dst_claim, &pair.dst_strided, held_dsts
            )
        except Exception:
            # The long way meets it again, and names the entry.
            break
        if not plain or src_nbytes != pair.nbytes:
            break
        found += 1
        # Some properties take long.
        if found % 16 == 0 and core.now_ns() > until:
            break
    return found


def add_objects(
    Operation operation, list srcs, list dsts, Py_ssize_t first, int device, uintptr_t context, list held_srcs,
    list held_dsts,
):
    """Adds entries from ``first`` on, whose device and context are to be these, as columns of the operation.

    Returns the index of the first entry that it did not take: because it is not plain, or because the loop is to have
    its turn. What must be held beside the objects is appended to the lists of either side.
    """
    cdef core.PlainBatch batch = core.PlainBatch(operation._operation, len(srcs), device, <abi.Context>context)
    cdef core.PlainBatch.Pair pairs[kChunk]
    cdef size_t gathered, taken
    cdef Py_ssize_t end = min(len(srcs), first + kMostObjects)
    cdef uint64_t until = core.now_ns() + kMostTurnNs
    while first < end:
        gathered = plain_pairs(srcs, dsts, first, end, pairs, held_srcs, held_dsts, until)
        with nogil:
            taken = batch.add(pairs, gathered)
        first += taken
        if taken < kChunk or core.now_ns() > until:
            break
    return first


def submit_objects(Quota quota, Queue queue, list srcs, list dsts, stream, handle, int device):
    """Submits a batch of at most ``kMostAtOnce`` entries, all of which are plain and in one context of one device. The
    lists are to be its own.

    Returns the operation, or ``None`` for what must take the long way: nothing has happened then.
    """
    cdef Operation operation
    cdef core.CxxOperation* native
    cdef core.PlainBatch batch
    cdef core.PlainBatch.Pair pairs[kChunk]
    cdef size_t gathered, taken
    cdef Py_ssize_t first = 0, n = len(srcs)
    cdef list held_srcs = [], held_dsts = []
    cdef uint64_t stream_handle = 0
    cdef abi.Context context
    cdef int code = 0
    cdef uint64_t until = core.now_ns() + kMostTurnNs
    if n != len(dsts) or not 0 < n <= kMostAtOnce:
        return None
    operation = Operation.__new__(Operation, quota)
    native = operation._operation
    batch = core.PlainBatch(native, n, -1, NULL)
    while first < n:
        gathered = plain_pairs(srcs, dsts, first, n, pairs, held_srcs, held_dsts, until)
        if gathered == 0 or (first + <Py_ssize_t>gathered < n and core.now_ns() > until):
            return None
        if first == 0:
            on_device = dsts[0] if pairs[0].src_claim == core.Claim.kHost else srcs[0]
            # Else only the driver knows which of the two has a say in what the stream is.
            if pairs[0].src_claim == core.Claim.kEither and pairs[0].dst_claim == core.Claim.kDevice:
                return None
            handle = object_kind_of(type(on_device)).on_device.stream_of(on_device, handle)
            if type(handle) is not int or not 0 <= handle < 2**64:
                return None
            stream_handle = handle
        with nogil:
            taken = batch.add(pairs, gathered)
        if taken != gathered:
            return None
        first += taken
    if 0 <= device != batch.device():
        return None
    context = batch.context()
    with nogil:
        if core.find_overlap(native[0], True) != core.Overlap.kNone:
            code = 1
        if code == 0 and context == NULL:
            code = core.primary_context(batch.device(), &context)
        if code == 0:
            code = core.mark_stream(stream_handle, context, False, &native.marks)
    if code != 0:
        return None
    core.know_stream(native, stream_handle, context, native.marks.size() != 0)
    operation.submit(batch.device(), queue, [dsts, held_dsts, srcs, held_srcs, stream], 2)
    return operation
