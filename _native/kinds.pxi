# How objects tell of plain memory: contiguous, and with nothing to be said about it. Asked in the cheapest way that
# their type has; what is not plain is left to the long way (_exports.py), by ``None``.


cdef struct Span:
    uint64_t address
    size_t nbytes


cdef extern from "dlpack.h" namespace "aiocuda::dlpack":
    cdef cppclass Tensor:
        void* data
        int device_type
        unsigned char type_code
        uint64_t byte_offset

    cdef cppclass Exchange:
        uint32_t major
        int (*tensor_from_object)(void* object, Tensor* out) except -1

    const char* kCapsule
    const uint32_t kMajor
    const int kCpu, kCuda, kCudaHost
    const int kComplex
    const size_t kMostNbytes
    int64_t contiguous_nbytes(const Tensor&)


cdef extern from "numpy/arrayobject.h":
    bint PyDataType_REFCHK(np.PyArray_Descr*) nogil


cdef bint array_memory(np.ndarray array, bint writable, Span* memory) noexcept:
    """The memory of an array of exactly NumPy's type, if it is plain. Whoever holds the array holds its memory."""
    cdef int flags = np.NPY_ARRAY_C_CONTIGUOUS | (np.NPY_ARRAY_WRITEABLE if writable else 0)
    if not np.PyArray_CHKFLAGS(array, flags) or PyDataType_REFCHK(np.PyArray_DESCR(array)):
        return False
    memory.address, memory.nbytes = <uintptr_t>np.PyArray_DATA(array), np.PyArray_NBYTES(array)
    return True


cdef dict item_sizes = {}


cdef size_t item_size_of(str typestr) except? 0:
    """The size of an item by its type string, 0 where its bytes mean nothing elsewhere."""
    size = item_sizes.get(typestr)
    if size is None:
        # Of others, such as "<U4" or "<M8[ns]", the number is not the size.
        size = item_sizes[typestr] = int(typestr[2:]) if typestr[1] in "biufcSV" else 0
    return size


# The driver refuses rows that are further apart.
cdef size_t kMostPitch = 2**31 - 1

cdef object kData = sys.intern("data"), kShape = sys.intern("shape"), kTypestr = sys.intern("typestr")
cdef object kStrides = sys.intern("strides"), kStream = sys.intern("stream"), kMask = sys.intern("mask")
cdef object kVersion = sys.intern("version"), kDescr = sys.intern("descr")


cdef bint cuda_array(
    object obj, bint writable, int least_version, uint64_t* address, size_t* nbytes, core.Strided* strided
) except -1:
    """Finds the memory that an array tells of by the CUDA array interface, if that is contiguous, or slices of rows of
    bytes (see ``_layout.py``), which are strided then."""
    cdef Py_ssize_t length, step, axis
    cdef size_t count, stride, span = 0
    cdef size_t[3] counts = [0, 1, 1]
    cdef size_t[3] strides = [1, 0, 0]
    cdef int level = 0
    cdef PyObject* key
    cdef PyObject* value
    cdef Py_ssize_t position = 0
    found = obj.__cuda_array_interface__
    if type(found) is not dict:
        return False
    # One pass is quicker than a look for each key (docs/explanation/measurements.md), save where there are others, or
    # some that are no names of a program's text, which are not known by their identity.
    data = shape = typestr = steps = stream = mask = None
    version = 0
    while PyDict_Next(found, &position, &key, &value):
        if key == <PyObject*>kData:
            data = <object>value
        elif key == <PyObject*>kShape:
            shape = <object>value
        elif key == <PyObject*>kTypestr:
            typestr = <object>value
        elif key == <PyObject*>kStrides:
            steps = <object>value
        elif key == <PyObject*>kStream:
            stream = <object>value
        elif key == <PyObject*>kMask:
            mask = <object>value
        elif key == <PyObject*>kVersion:
            version = <object>value
        elif key != <PyObject*>kDescr:
            data, shape, typestr = found.get("data"), found.get("shape"), found.get("typestr")
            steps, stream, mask = found.get("strides"), found.get("stream"), found.get("mask")
            version = found.get("version", 0)
            break
    if (
        not isinstance(shape, tuple)
        or (steps is not None and (not isinstance(steps, tuple) or len(steps) != len(shape)))
        or stream is not None
        or mask is not None
        or type(data) is not tuple
        or len(data) != 2
        or not data[0]
        or (writable and data[1])
        or version < least_version
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
    for axis in range(len(<tuple>shape) - 1, -1, -1):
        length, step = (<tuple>shape)[axis], (<tuple>steps)[axis]
        if length == 1:
            continue
        if length <= 0 or step <= 0:
            return False
        count, stride = length, step
        if stride < span + itemsize or stride > kMostPitch or count > kMostNbytes // max(stride, nbytes[0]):
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


# Types whose instances are known to have __cuda_stream__ as a method, so that nothing else need be asked of them.
cdef set stream_types = set()


cdef object from_protocol = None


def know_stream_type(kind, function):
    """From now on instances of the type are asked for their handle, and nothing else. The function makes it of an
    answer and a type, and says what is wrong with them."""
    global from_protocol
    from_protocol = function
    stream_types.add(kind)


cpdef object known_handle(stream):
    """The handle of a stream that is one, or whose type is known to tell it; ``None`` for all else."""
    kind = type(stream)
    if kind is int:
        return stream if 0 <= stream < 2**64 else None
    if kind not in stream_types or getattr(stream, "is_closed", False) is True:
        return None
    answer = stream.__cuda_stream__()
    if type(answer) is tuple and len(<tuple>answer) == 2 and answer[0] == 0:
        handle = answer[1]
        if type(handle) is int and 0 <= handle < 2**64:
            return handle
    return from_protocol(answer, kind)


@cython.internal
cdef class DeviceKind:
    """The objects of a type, on the device; those of this one are not plain."""

    cdef object ask(self, object obj, bint writable, Span* memory):
        """Finds the object's memory, and returns what must be held for it to stay: mostly the object itself."""
        return None

    cdef object ask_for(self, object obj, bint writable, object named, Span* memory):
        """As ``ask``, for a copy in the stream of that handle, or, without one, in the default stream."""
        return self.ask(obj, writable, memory)

    cdef size_t nbytes_of(self, object obj) except? 0:
        """Of the object's memory; 0 where that is not plain."""
        cdef Span memory
        return 0 if self.ask(obj, False, &memory) is None else memory.nbytes

    cdef object stream_of(self, object obj, object named):
        """The handle of the stream that a copy comes after; ``None`` where that is more than one."""
        return 0 if named is None else named

    cdef tuple shape_and_type(self, object obj):
        """The shape and the type of the elements, both ``None`` for mere bytes."""
        return None, None


@cython.internal
@cython.final
cdef class CoreBufferKind(DeviceKind):
    """Buffers of cuda.core."""

    cdef object ask(self, object obj, bint writable, Span* memory):
        handle = obj.handle
        if not handle:
            return None
        memory.address, memory.nbytes = handle if type(handle) is int else int(handle), obj.size
        return obj


@cython.internal
@cython.final
cdef class CudaArrayKind(DeviceKind):
    """What has the CUDA array interface: Numba's arrays, RMM's buffers, many others."""
    # Before version 3 the interface says nothing about streams, and DLPack is the one to ask.
    cdef int least_version

    def __cinit__(self, int least_version):
        self.least_version = least_version

    cdef object ask(self, object obj, bint writable, Span* memory):
        cdef core.Strided strided
        if not cuda_array(obj, writable, self.least_version, &memory.address, &memory.nbytes, &strided):
            return None
        return None if strided.width != 0 else obj

    cdef tuple shape_and_type(self, object obj):
        interface = obj.__cuda_array_interface__
        return interface["shape"], interface["typestr"]


@cython.internal
@cython.final
cdef class CupyKind(DeviceKind):
    """Arrays of CuPy, exactly: their CUDA array interface would take longer than the copy."""
    cdef object current_device
    cdef object current_stream

    def __cinit__(self, cupy):
        self.current_device = cupy.cuda.runtime.getDevice
        self.current_stream = cupy.cuda.get_current_stream

    cdef object ask(self, object obj, bint writable, Span* memory):
        if not obj.flags.c_contiguous:
            return None
        memory.address, memory.nbytes = obj.data.ptr, obj.nbytes
        return obj

    cdef object stream_of(self, object obj, object named):
        # The array names the current stream, of the current device, as one that is to be waited for.
        if self.current_device() != obj.data.device_id:
            return None
        current = self.current_stream().ptr
        # 0 and 1 are the same stream.
        return current if named is None or named == current or {named, current} == {0, 1} else None

    cdef tuple shape_and_type(self, object obj):
        return obj.shape, obj.dtype


@cython.internal
@cython.final
cdef class TorchKind(DeviceKind):
    """Tensors and parameters of torch, exactly."""
    cdef object strided
    cdef object current_stream
    # What torch 2.10 and later have.
    cdef const Exchange* exchange

    def __cinit__(self, torch):
        self.strided = torch.strided
        capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        if PyCapsule_IsValid(capsule, kCapsule):
            self.exchange = <const Exchange*>PyCapsule_GetPointer(capsule, kCapsule)
            if self.exchange.major != kMajor or self.exchange.tensor_from_object == NULL:
                self.exchange = NULL
        # The public way makes a stream object, which takes longer than all the rest.
        self.current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    cdef object ask(self, object obj, bint writable, Span* memory):
        cdef bint on_device
        holder = self.ask_anywhere(obj, writable, memory, &on_device)
        return holder if on_device else None

    cdef object ask_anywhere(self, object obj, bint writable, Span* memory, bint* on_device):
        """As ``ask``, of a tensor of the host's, too; says which it is."""
        cdef uint64_t base, nbytes
        on_device[0] = False
        try:
            if self.exchange == NULL or not self.exchanged(obj, memory, on_device):
                on_device[0] = obj.is_cuda
                if (
                    not (on_device[0] or obj.is_cpu)
                    or obj.layout is not self.strided
                    or not obj.is_contiguous()
                    or obj.is_conj()
                ):
                    return None
                memory.address, memory.nbytes = obj.data_ptr(), obj.numel() * obj.element_size()
            if obj.is_neg() or (writable and obj.requires_grad):
                return None
            # Assigning to tensor.data gives the tensor another one.
            storage = obj.untyped_storage()
            # It may have been freed or made smaller (resize_). On a device the driver knows what there is.
            if not on_device[0] and memory.nbytes != 0:
                base, nbytes = storage.data_ptr(), storage.nbytes()
                if base == 0 or memory.address < base or memory.address + memory.nbytes > base + nbytes:
                    return None
            return storage
        except RuntimeError:  # from what stands for a tensor, inside vmap or a compiler
            return None

    cdef bint exchanged(self, object obj, Span* memory, bint* on_device):
        """Whether one call has told all that there is to ask of a tensor's memory, which saves seven."""
        cdef Tensor tensor
        cdef int64_t nbytes
        try:
            self.exchange.tensor_from_object(<void*>obj, &tensor)
        except Exception:  # of a type that DLPack has no name for, say
            return False
        nbytes = contiguous_nbytes(tensor)
        if nbytes < 0 or tensor.type_code == kComplex:
            return False
        on_device[0] = tensor.device_type == kCuda
        if not on_device[0] and tensor.device_type != kCpu and tensor.device_type != kCudaHost:
            return False
        memory.address, memory.nbytes = <uint64_t>tensor.data + tensor.byte_offset, nbytes
        return True

    cdef object stream_of(self, object obj, object named):
        if named is not None:
            return named
        return None if self.current_stream is None else self.current_stream(obj.get_device())

    cdef tuple shape_and_type(self, object obj):
        return obj.shape, obj.dtype


@cython.internal
cdef class HostKind:
    """The objects of a type, on the host; those of this one are not plain."""

    cdef object take(self, object obj, bint writable, Operation operation, Span* memory):
        """Finds the object's memory, of which the operation takes hold, and returns what must be held besides: mostly
        the object itself."""
        return None


@cython.internal
@cython.final
cdef class BufferKind(HostKind):
    """What has the buffer protocol, and no more than that to tell."""

    cdef object take(self, object obj, bint writable, Operation operation, Span* memory):
        cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0)
        try:
            # An own view, so that the caller's may be released meanwhile.
            PyObject_GetBuffer(memoryview(obj) if type(obj) is memoryview else obj, &operation._view, flags)
        except (BufferError, ValueError, TypeError):
            return None
        operation._holds_view = True
        if operation._view.format != NULL and strchr(operation._view.format, b"O") != NULL:
            return None
        memory.address, memory.nbytes = <uintptr_t>operation._view.buf, operation._view.len
        return obj


@cython.internal
@cython.final
cdef class ArrayKind(HostKind):
    """NumPy's arrays, exactly: the buffer protocol would write a description of each one's elements first."""

    cdef object take(self, object obj, bint writable, Operation operation, Span* memory):
        return obj if array_memory(<np.ndarray>obj, writable, memory) else None


@cython.internal
@cython.final
cdef class TorchHostKind(HostKind):
    """Tensors of torch, exactly."""
    cdef TorchKind kind

    def __cinit__(self, TorchKind kind):
        self.kind = kind

    cdef object take(self, object obj, bint writable, Operation operation, Span* memory):
        cdef bint on_device
        holder = self.kind.ask_anywhere(obj, writable, memory, &on_device)
        return None if on_device else holder


# By type. Only types are kept, not objects, and not all that a program may make while it runs.
cdef Py_ssize_t kMostTypes = 1024


cdef object remember(dict kinds, object kind, object made):
    if len(kinds) >= kMostTypes:
        kinds.clear()
    kinds[kind] = made
    return made


cdef dict device_kinds = {}
cdef dict host_kinds = {}
cdef DeviceKind no_device_kind = DeviceKind()
cdef HostKind no_host_kind = HostKind()


cdef DeviceKind device_kind_of(object kind):
    found = device_kinds.get(kind)
    if found is None:
        found = remember(device_kinds, kind, new_device_kind(kind))
    return <DeviceKind>found


cdef HostKind host_kind_of(object kind):
    found = host_kinds.get(kind)
    if found is None:
        found = remember(host_kinds, kind, new_host_kind(kind))
    return <HostKind>found


# Not typed as "type", which Cython takes for exactly that: many classes have a metaclass.
cdef str package_of(object kind):
    return str(kind.__module__ or "").partition(".")[0]


cdef DeviceKind new_device_kind(object kind):
    packages = {package_of(base) for base in kind.__mro__}
    if not packages.isdisjoint(("torch", "cupy", "jax", "jaxlib")):
        # A subclass may be anything, and JAX is to be asked by DLPack.
        cupy = sys.modules.get("cupy")
        if kind is getattr(cupy, "ndarray", None):
            return CupyKind(cupy)
        return new_torch_kind(kind) or no_device_kind
    if package_of(kind) == "cuda" and kind.__name__ in ("Buffer", "ManagedBuffer"):
        return CoreBufferKind()
    if hasattr(kind, "__cuda_array_interface__"):
        return CudaArrayKind(3 if hasattr(kind, "__dlpack__") else 0)
    return no_device_kind


cdef TorchKind new_torch_kind(object kind):
    """``None`` for all but torch's own types."""
    torch = sys.modules.get("torch")
    own = torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter)
    return TorchKind(torch) if own else None


cdef HostKind new_host_kind(object kind):
    if kind is np.ndarray:
        return ArrayKind()
    for base in kind.__mro__:
        package = package_of(base)
        if package == "torch":
            torch_kind = new_torch_kind(kind)
            return no_host_kind if torch_kind is None else TorchHostKind(torch_kind)
        # Masked arrays have more than their buffer, and NumPy's scalars are no memory of the caller's.
        if package == "numpy" and base.__name__ != "ndarray":
            return no_host_kind
    return BufferKind()
