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
# The last data type that was seen to hold no Python objects: mostly all arrays of a batch have the same.
cdef object plain_dtype = None
cdef ObjectKind no_object_kind = ObjectKind(object)

# Entries that are looked at before the driver is asked about them, without the GIL.
cdef enum:
    kChunk = 128
# The loop gets its turn after so many entries, or so long.
cdef Py_ssize_t kMostObjects = 512
cdef uint64_t kMostTurnNs = 400_000
# The driver refuses rows that are further apart.
cdef size_t kMostPitch = 2**31 - 1


cdef ObjectKind object_kind_of(object kind):
    found = object_kinds.get(kind)
    if found is None:
        found = object_kinds[kind] = ObjectKind(kind)
    return <ObjectKind>found


cdef int how_to_ask(object kind, DeviceKind on_device):
    if package_of(kind) == "numpy" and kind.__name__ == "ndarray":
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


cdef bint cuda_array(object obj, bint writable, uint64_t* address, size_t* nbytes, core.Strided* strided) except -1:
    """As ``CudaArrayKind.ask``, and also for what is slices of rows of bytes; see ``_layout.py``."""
    cdef dict interface
    cdef size_t count, stride, span = 0
    cdef size_t[3] counts = [0, 1, 1]
    cdef size_t[3] strides = [1, 0, 0]
    cdef int level = 0
    found = obj.__cuda_array_interface__
    if type(found) is not dict:
        return False
    interface = found
    data, shape, typestr = interface.get("data"), interface.get("shape"), interface.get("typestr")
    steps = interface.get("strides")
    if (
        type(shape) is not tuple
        or (steps is not None and (type(steps) is not tuple or len(steps) != len(shape)))
        or interface.get("stream") is not None
        or interface.get("mask") is not None
        or type(data) is not tuple
        or len(data) != 2
        or not data[0]
        or (writable and data[1])
        or interface.get("version", 0) < 3
        or type(typestr) is not str
    ):
        return False
    cdef size_t itemsize = item_size_of(typestr)
    if itemsize == 0:
        return False
    counts[0] = itemsize
    nbytes[0] = itemsize
    address[0] = data[0]
    if steps is None:
        for n in shape:
            if type(n) is not int:
                return False
            nbytes[0] *= n
        return True
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            continue
        if shape[axis] <= 0 or steps[axis] <= 0:
            return False
        count, stride = shape[axis], steps[axis]
        if stride < span + itemsize or stride > kMostPitch:
            return False
        if stride == counts[level] * strides[level]:
            counts[level] *= count
        elif level == 2:
            return False
        else:
            level += 1
            counts[level], strides[level] = count, stride
        nbytes[0] *= count
        span += (count - 1) * stride
    if level > 0:
        strided.width, strided.height, strided.depth = counts[0], counts[1], counts[2]
        strided.pitch, strided.slice = strides[1], strides[2]
    return True


cdef bint memory_of(
    object obj, ObjectKind kind, bint writable, uint64_t* address, size_t* nbytes, core.Claim* claim,
    core.Strided* strided, list held,
) except -1:
    """Whether it could be told. What must be held beside the object is appended to the list."""
    global plain_dtype
    cdef Py_buffer view
    cdef Py_buffer* held_view
    cdef Span memory
    if kind.how == kArray:
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
    if kind.how == kDeviceArray:
        # Where there is host memory as well, the long way knows which is meant.
        if PyObject_CheckBuffer(obj):
            return False
        claim[0] = core.Claim.kDevice
        return cuda_array(obj, writable, address, nbytes, strided)
    if kind.how == kEitherBuffer or kind.how == kTensor:
        if kind.how == kEitherBuffer:
            claim[0] = core.Claim.kEither
            holder = kind.on_device.ask(obj, writable, &memory)
        else:
            if not obj.is_cuda and not obj.is_cpu:
                return False
            claim[0] = core.Claim.kDevice if obj.is_cuda else core.Claim.kHost
            holder = (<TorchKind>kind.on_device).ask_anywhere(obj, writable, &memory)
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
    cdef bint plain
    cdef ObjectKind src_kind = no_object_kind, dst_kind = no_object_kind
    cdef Py_ssize_t end = min(len(srcs), first + kMostObjects)
    cdef uint64_t until = core.now_ns() + kMostTurnNs
    while first < end:
        gathered = 0
        while gathered < kChunk and first + <Py_ssize_t>gathered < end:
            pair = &pairs[gathered]
            src, dst = srcs[first + gathered], dsts[first + gathered]
            pair.src_strided.width = pair.dst_strided.width = 0
            if type(src) is not src_kind.type:
                src_kind = object_kind_of(type(src))
            if type(dst) is not dst_kind.type:
                dst_kind = object_kind_of(type(dst))
            try:
                plain = memory_of(
                    src, src_kind, False, &pair.src, &src_nbytes, &pair.src_claim, &pair.src_strided, held
                ) and memory_of(
                    dst, dst_kind, True, &pair.dst, &pair.nbytes, &pair.dst_claim, &pair.dst_strided, held
                )
            except Exception:
                # The long way meets it again, and names the entry.
                break
            if not plain or src_nbytes != pair.nbytes:
                break
            gathered += 1
        with nogil:
            taken = batch.add(pairs, gathered)
        first += taken
        if taken < kChunk or core.now_ns() > until:
            break
    return first
