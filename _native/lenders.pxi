# Objects on a device that lend their memory by DLPack, and tell of it in no quicker way: JAX's arrays, above all. The
# lender makes the consumer's stream wait for its own work, so it must be told which stream that is.

cdef extern from "dlpack.h" namespace "aiocuda::dlpack":
    cdef cppclass Managed:
        Tensor tensor
        void (*deleter)(Managed*)

    cdef cppclass ManagedVersioned:
        uint32_t major
        void (*deleter)(ManagedVersioned*)
        uint64_t flags
        Tensor tensor

    const char* kLent
    const char* kTaken
    const char* kLentVersioned
    const char* kTakenVersioned
    const uint64_t kReadOnly


@cython.internal
@cython.final
cdef class Loan:
    """What has been lent, which goes back with this."""
    cdef Managed* plain
    cdef ManagedVersioned* versioned

    def __dealloc__(self):
        if self.plain != NULL and self.plain.deleter != NULL:
            self.plain.deleter(self.plain)
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)

    cdef const Tensor* tensor(self):
        if self.plain != NULL:
            return &self.plain.tensor
        if self.versioned != NULL and self.versioned.major == kMajor:
            return &self.versioned.tensor
        return NULL


cdef Loan borrow(object obj, object stream):
    """What the object lends to a stream; ``None`` where that is no memory of a CUDA device."""
    if int(obj.__dlpack_device__()[0]) != kCuda:
        return None
    try:
        capsule = obj.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # of lenders that know of no versions
        capsule = obj.__dlpack__(stream=stream)
    cdef Loan loan = Loan()
    if PyCapsule_IsValid(capsule, kLentVersioned):
        loan.versioned = <ManagedVersioned*>PyCapsule_GetPointer(capsule, kLentVersioned)
        PyCapsule_SetName(capsule, kTakenVersioned)
    elif PyCapsule_IsValid(capsule, kLent):
        loan.plain = <Managed*>PyCapsule_GetPointer(capsule, kLent)
        PyCapsule_SetName(capsule, kTaken)
    return loan


@cython.internal
cdef class LenderKind(DeviceKind):
    """What has DLPack, and nothing else."""

    cdef object ask_for(self, object obj, bint writable, object named, Span* memory):
        # A lender would make it wait, which invalidates the capture. The long way says so.
        if core.check_not_capturing(named or 1, <abi.Context>NULL) == core.kResultCapturing:
            return None
        cdef Loan loan = borrow(obj, named or 1)
        if loan is None:
            return None
        cdef const Tensor* tensor = loan.tensor()
        if tensor == NULL or tensor.device_type != kCuda or tensor.data == NULL:
            return None
        if writable and loan.versioned != NULL and loan.versioned.flags & kReadOnly:
            return None
        cdef int64_t nbytes = contiguous_nbytes(tensor[0])
        if nbytes <= 0:
            return None
        memory.address, memory.nbytes = <uint64_t>tensor.data + tensor.byte_offset, nbytes
        return loan


@cython.internal
@cython.final
cdef class JaxKind(LenderKind):
    """Arrays of JAX."""

    cdef object ask_for(self, object obj, bint writable, object named, Span* memory):
        # Their DLPack does not say so, but all that JAX compiles relies on it that nobody writes to them.
        return None if writable else LenderKind.ask_for(self, obj, writable, named, memory)

    cdef size_t nbytes_of(self, object obj) except? 0:
        return obj.nbytes

    cdef tuple shape_and_type(self, object obj):
        return obj.shape, obj.dtype


# By type.
cdef dict lender_kinds = {}


cdef DeviceKind lone_kind_of(object kind):
    """As ``device_kind_of``, for a copy of one object."""
    cdef DeviceKind found = device_kind_of(kind)
    if found is no_device_kind:
        lender = lender_kinds.get(kind)
        if lender is None:
            lender = remember(lender_kinds, kind, new_lender_kind(kind))
        found = <DeviceKind>lender
    return found


cdef DeviceKind new_lender_kind(object kind):
    packages = {package_of(base) for base in kind.__mro__}
    if not (hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")):
        return no_device_kind
    if not packages.isdisjoint(("jax", "jaxlib")):
        tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
        return no_device_kind if tracer is None or issubclass(kind, tracer) else JaxKind()
    # Subclasses may be anything, and the interface names streams, too.
    if not packages.isdisjoint(("torch", "cupy")) or hasattr(kind, "__cuda_array_interface__"):
        return no_device_kind
    return LenderKind()
