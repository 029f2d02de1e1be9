# The short way for what programs await most: a contiguous copy, small above all, between an object whose device memory
# is easily known (kinds.pxi) and one with the buffer protocol, or a CPU tensor. Whatever is not that plain, or wrong,
# takes the long way, which has the error messages.

# Copies inside calls hold the loop for 200 us at most before one suspends (api.md); this leaves room for the last one.
cdef uint64_t kMostHeldNs = 180_000
# Beside a busy Python thread the way back to the GIL takes 5 ms: then copies park for a while, which needs one way
# less. So they do when the driver has made a call wait, as it does while the channels of a direction are full
# (docs/explanation/measurements.md), and for longer than the scheduler might. Trying again costs the loop a hundredth
# of its time at most. That the kernel is loaded, for which calls may wait as long as the driver compiles it, says
# nothing of what comes after.
cdef uint64_t kSlowGilNs = 1_000_000
cdef uint64_t kSlowCallNs = 10_000_000
cdef uint64_t kParkForNs = 200_000_000
cdef uint64_t kParkForWaits = 100
# To ask a stream whether it is idle takes the loop a microsecond longer than to mark it, but then the engine asks for
# the mark. That does not matter to a large copy, and of so many marks in one stream it asks for a few
# (docs/explanation/measurements.md).
cdef Py_ssize_t kCrowd = 16


def small_source(src):
    """The bytes, the shape and the type of what a short way may copy from a device; ``None`` for all else.

    The type is NumPy's, as such or as a string, or torch's; ``None`` for mere bytes.
    """
    cdef DeviceKind kind = lone_kind_of(type(src))
    cdef size_t nbytes
    try:
        nbytes = kind.nbytes_of(src)
        if nbytes == 0 or nbytes > core.kSmallBytes:
            return None
        shape, dtype = kind.shape_and_type(src)
    except Exception:  # the long way meets it again
        return None
    return nbytes, (nbytes,) if shape is None else shape, dtype


# What is still read belongs to no copier: its await has ended.
cdef Quota readers = Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False)


cdef Operation reader_of(const core.Late& late):
    cdef Operation reader = Operation.__new__(Operation, readers)
    reader._abandoned = reader._small = True
    reader._operation.landed = late.piece
    reader._operation.marks.push_back(late.mark)
    reader._operation.in_stream = reader._operation.only_read = True
    reader._operation.phase.store(core.Phase.kAdmitted)
    return reader


cdef str kTrio = "trio", kAnyioBackend = "anyio._backends._asyncio"
# The loop of the last copy, as a weak reference, its dispatcher, and the dispatcher's queue.
cdef tuple last_loop = (None, None, None)


cdef tuple find_dispatcher(object loop, object current):
    """As ``last_loop``, for the running loop; a function finds its dispatcher where it is another one than the last
    time."""
    global last_loop
    cdef tuple known = last_loop
    # Trio may be the guest of an asyncio loop.
    if loop is None or kTrio in <dict>sys.modules:
        dispatcher = current()
        return None, dispatcher, dispatcher.queue
    if known[0] is None or known[0]() is not loop:
        dispatcher = current()
        last_loop = known = weakref.ref(loop), dispatcher, dispatcher.queue
    return known


cdef bint cancellation_pending(object loop, object dispatcher) except -1:
    """Whether the running task has been cancelled, and would find out if it suspended now."""
    task = None if loop is None else current_task(loop)
    if task is None:
        if kTrio not in <dict>sys.modules:
            return False
    elif getattr(task, "_must_cancel", False):
        return True
    elif not may_have_scopes(task):
        return False
    return dispatcher.scope_cancelled()


# What anyio's backend knows its tasks by, and where it is imported from.
cdef object task_states = None
cdef object task_states_of = None


cdef bint may_have_scopes(object task) except -1:
    """Whether a scope of anyio's may be around a task. To ask the backend for them takes 1 us, where a small copy takes
    7; the dictionary that it has them in is not public, so that nothing but a dictionary is looked at."""
    global task_states, task_states_of
    backend = (<dict>sys.modules).get(kAnyioBackend)
    if backend is None:
        return False
    if backend is not task_states_of:
        states = getattr(backend, "_task_states", None)
        if states is None and getattr(backend, "backend_class", None) is None:
            return False  # it is being imported, by another thread
        task_states, task_states_of = getattr(states, "data", None), backend
    if type(task_states) is not dict:
        return True
    return len(<dict>task_states) != 0 and PyWeakref_NewRef(task, None) in <dict>task_states


cdef tuple kNothing = (None, ()), kRefused = (False, ())


@cython.final
cdef class ShortWay:
    """A copier's short way for contiguous copies: all that an await does where it ends inside the call."""
    cdef Quota _quota
    cdef int _device
    cdef bint _inlined
    cdef set _devices
    cdef object _current
    cdef object _resolve_handle
    cdef object _failed_to_host
    cdef object _failed_to_device
    # One that ended inside a call, and is used again.
    cdef Operation _spare
    cdef public bint closed
    """Whether all copies take the long way, which says so."""

    def __cinit__(self, Quota quota, int device, bint inlined, set devices, current, resolve_handle, failed):
        """The device may be any, -1; those that are used are added to the set. The functions find the dispatcher of
        the running loop and the handle of a stream, and make the exception of a code and a name."""
        self._quota, self._device, self._inlined, self._devices = quota, device, inlined, devices
        self._current, self._resolve_handle = current, resolve_handle
        self._failed_to_host = partial(failed, operation="copy_to_host")
        self._failed_to_device = partial(failed, operation="copy_to_device")

    def begin(self, src, dst, stream, bint to_host, in_stream=False, progress=None, like=None):
        """Finishes a small copy whose stream is idle, or submits a copy. The arguments are the caller's.

        Returns ``True`` when the copy is done, or what is to be awaited for that. Else nothing has happened: ``None``
        for what must take the long way, ``False`` for what may be asked again, once the driver is bound, or, where it
        is, when the task has suspended: it has been cancelled, and finds out.
        """
        if dst is None or like is not None or progress is not None or in_stream or self.closed:
            return None
        if not driver_is_usable:
            return False
        loop = _get_running_loop()
        cdef tuple found = find_dispatcher(loop, self._current)
        cdef Queue queue = <Queue>found[2]
        handle = known_handle(stream)
        if handle is None and stream is not None:
            handle = self._resolve_handle(stream)
        begun, still_read = self.submit(queue, loop, found[1], src, dst, stream, handle, to_host)
        if not begun or (begun is True and not still_read and queue._held_ns < kMostHeldNs):
            return begun
        failed = self._failed_to_host if to_host else self._failed_to_device
        if found[0] is None or begun is True or still_read:
            return self.outlast(begun, still_read, found[1], failed)
        return Wait(begun, loop, found[1], failed=failed)

    async def outlast(self, begun, tuple still_read, dispatcher, failed):
        """Waits for an operation that may be done, and then for what is still read, which ends soon or is told after a
        while. The loop gets a turn that it is owed."""
        cdef Operation one
        code = 0
        try:
            if begun is not True:
                code = await dispatcher.wait(begun)
            for one in still_read:
                await dispatcher.wait(one)
            if dispatcher.queue.owes_a_turn:
                await dispatcher.checkpoint()
        finally:
            for one in still_read:
                if one._state == kPending:
                    one.abandon(untouched=False)
        if code:
            raise failed(code)

    cdef tuple submit(self, Queue queue, loop, dispatcher, src, dst, stream, handle, bint to_host):
        """The stream is held as long as the two objects are; its handle is ``None`` where none is named.

        Returns the operation, ``True`` when the copy is done, or what ``begin`` does; and the operations, mostly none,
        that end when the device no longer reads the source on the roads that were slower.
        """
        cdef Operation operation
        cdef core.CxxOperation* native
        cdef core.PlainCopy copy
        cdef DeviceKind device_kind
        cdef HostKind host_kind
        cdef Span memory, host_memory
        cdef int code
        cdef Operation reading
        cdef tuple still_read = ()
        cdef uint64_t waited
        host, on_device = (dst, src) if to_host else (src, dst)
        host_kind, device_kind = host_kind_of(type(host)), lone_kind_of(type(on_device))
        if host_kind is no_host_kind:
            return kNothing
        try:
            holder = device_kind.ask_for(on_device, not to_host, handle, &memory)
        except Exception:  # the long way meets it again
            return kNothing
        if holder is None or memory.nbytes == 0:
            return kNothing
        cdef bint small = memory.nbytes <= core.kSmallBytes
        cdef bint inlined = small and self._inlined and queue._held_ns < kMostHeldNs
        if not small:
            queue.rouse()
        # A copy that does not end inside the call suspends, and finds out there.
        if inlined and cancellation_pending(loop, dispatcher):
            return kRefused
        handle = device_kind.stream_of(on_device, handle)
        if type(handle) is not int or not 0 <= handle < 2**64:
            return kNothing
        operation, self._spare = self._spare, None
        if operation is None:
            operation = Operation.__new__(Operation, self._quota)
        host_holder = host_kind.take(host, to_host, operation, &host_memory)
        if host_holder is None or host_memory.nbytes != memory.nbytes:
            return kNothing
        native = operation._operation
        operation._small = small
        copy.on_device, copy.on_host, copy.nbytes = memory.address, host_memory.address, memory.nbytes
        copy.to_host, copy.stream, copy.device = to_host, handle, self._device
        copy.inlined = inlined
        copy.marked = not small or (queue.outstanding >= kCrowd and queue._stream == copy.stream)
        copy.parks_until_ns = queue._parks_until_ns
        with nogil:
            code = core.begin_plain(&copy, native)
        if code != 0:
            return kNothing
        if copy.end_ns != 0:
            waited = copy.end_ns - copy.begin_ns
            queue._held_ns += waited
            if copy.beside_loading:
                waited = 0
            if waited > kSlowCallNs or core.now_ns() - copy.end_ns > kSlowGilNs:
                queue._parks_until_ns = copy.end_ns + max(kParkForNs, kParkForWaits * waited)
            for i in range(copy.run.late_count):
                reading = reader_of(copy.run.late[i])
                # Only a copy to the host has two roads.
                reading.submit(copy.memory.ordinal, queue, [src, holder, stream])
                still_read += (reading,)
        if copy.run.outcome == core.Outcome.kDone:
            self._quota._quota.submitted.fetch_add(1)
            self._quota._quota.completed.fetch_add(1)
            self._quota._quota.inline_completions.fetch_add(1)
            self._quota._quota.nbytes_small.fetch_add(memory.nbytes)
            operation.release_view()
            self._spare = operation
            return True, still_read
        if copy.run.outcome == core.Outcome.kParked:
            self._quota._quota.nbytes_small.fetch_add(memory.nbytes)
        queue._stream = copy.stream
        core.know_stream(
            native, copy.stream, copy.memory.context,
            native.marks.size() != 0 and copy.run.outcome == core.Outcome.kDeclined,
        )
        if to_host:
            operation.submit(copy.memory.ordinal, queue, [dst, host_holder, src, holder, stream], 2)
        else:
            operation.submit(copy.memory.ordinal, queue, [dst, holder, src, host_holder, stream])
        self._devices.add(copy.memory.ordinal)
        return operation, still_read
