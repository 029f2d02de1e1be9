# The engine.


cdef class Quota:
    """What one copier may use at a time, and what it has done."""
    cdef core.Quota* _quota

    def __cinit__(
        self, *, size_t slots, size_t slot_nbytes, size_t workers, bint host_function_hints, unsigned kernel_blocks=0
    ):
        self._quota = new core.Quota()
        self._quota.slots = slots
        self._quota.slot_nbytes = slot_nbytes
        self._quota.workers = workers
        self._quota.host_function_hints = host_function_hints
        self._quota.kernel_blocks = kernel_blocks

    def __dealloc__(self):
        if self._quota != NULL:  # where a number was too large
            release_quota(self._quota)

    def counters(self):
        """submitted, completed, failed, cancelled, inline, parked, slots in use, busy seconds, bytes by route and in
        small copies."""
        cdef core.Quota* q = self._quota
        return (
            q.submitted.load(), q.completed.load(), q.failed.load(), q.cancelled.load(), q.inline_completions.load(),
            q.parked_completions.load(), q.slots_in_use.load(), q.worker_busy_ns.load() * 1e-9,
            tuple([q.nbytes_by_route[i].load() for i in range(5)]), q.nbytes_small.load(),
        )


cdef void release_quota(core.Quota* quota) noexcept:
    if quota.references.fetch_sub(1) == 1:
        del quota


# A small copy takes 6 us, and so does the kernel that stands in for the copy engine. The end of a large one is foreseen
# with an error of some tens.
cdef uint64_t kAnnouncedNs = 60_000


cdef class Queue:
    """Finished operations on their way to one event loop."""
    # Never freed: a native thread may be about to write to its descriptor.
    cdef core.CompletionQueue* _queue
    cdef core.QueueNode* _backlog
    cdef readonly Py_ssize_t outstanding
    """Operations submitted and not yet drained."""
    # The last one that something was submitted to.
    cdef core.Engine* _engine
    # That of the last contiguous copy that did not end inside its call.
    cdef uint64_t _stream
    # Time that the loop was held by copies inside calls since it last had its turn, and until when there are none.
    cdef uint64_t _held_ns
    cdef uint64_t _parks_until_ns

    def __cinit__(self, *, bint pipe=False):
        self._queue = new core.CompletionQueue(core.Form.kPipe if pipe else core.Form.kEventfd)
        if not self._queue.ok() and not pipe:
            del self._queue
            self._queue = new core.CompletionQueue(core.Form.kPipe)
        if not self._queue.ok():
            del self._queue
            self._queue = NULL
            raise OSError("no descriptor for the completion queue: raise the limit of open files (ulimit -n)")

    @property
    def owes_a_turn(self):
        """Whether copies inside calls have held the loop for so long that it must have its turn."""
        return self._held_ns >= kMostHeldNs

    def had_a_turn(self):
        """The loop has had its turn."""
        self._held_ns = 0

    cpdef void rouse(self):
        """Something large is about to be submitted, mostly to the device that got the last one: waking up takes the
        engine as long as preparing that does."""
        if self._engine != NULL:
            self._engine.rouse()

    @property
    def has_finished(self):
        """Whether finished operations wait to be drained."""
        return self._backlog != NULL or not self._queue.empty()

    def fileno(self):
        """The descriptor that becomes readable when operations have finished, or are about to."""
        return self._queue.fd()

    def drain(self, Py_ssize_t most, *, bint discard=False):
        """Signals at most so many finished operations, oldest first, with small results copied out; whether there are
        more.

        One that is signalled while it is still read comes a second time, when the device no longer reads what it was
        given.

        With ``discard`` small results are dropped: nobody waits for them any more.
        """
        cdef core.QueueNode* node
        cdef Operation operation
        cdef bint early
        self._held_ns = 0
        if self._backlog == NULL:
            # With the GIL: the way back to it may take much longer.
            self._backlog = self._queue.take_announced(kAnnouncedNs)
        self.land(most, discard)
        while self._backlog != NULL and most > 0:
            # Dropping owners may run anything, so nothing is kept here from one operation to the next.
            node = self._backlog
            self._backlog = node.next
            operation = <Operation>core.operation_of(node).owner
            early = node.early
            operation.let_go_of_view()
            if not early:
                Py_DECREF(operation)
                operation.conclude()
                self.outstanding -= 1
            if discard:
                operation.wake = None  # whose loop is closed
            if operation._still_read:
                operation.release(operation.leaked)
            else:
                operation.signal(operation._result, not early and operation.leaked, early)
            most -= 1
        return self._backlog != NULL

    cdef void land(self, Py_ssize_t most, bint discard) noexcept:
        """Copies out the small results of those that are signalled next. Their slots go back together, before anything
        else is done: the engine may be waiting for slots, and to wake it takes longer than all of that."""
        cdef core.QueueNode* node = self._backlog
        cdef core.Engine* emptied = NULL
        cdef Operation operation
        while node != NULL and most > 0:
            operation = <Operation>core.operation_of(node).owner
            operation._abandoned = operation._abandoned or discard
            if not operation._delivered and operation.deliver(node.early):
                if emptied != NULL and emptied != operation._engine:
                    emptied.wake()
                emptied = operation._engine
            node = node.next
            most -= 1
        if emptied != NULL:
            emptied.wake()


cdef core.Engine* engine_of(int device) except NULL:
    cdef core.Engine* engine = core.Engine.of_device(device)
    if engine == NULL:
        if not 0 <= device < core.kMostDevices:
            raise ValueError(f"no device {device}")
        raise RuntimeError(
            f"can't start the thread that copies for device {device}: the system has no more threads to give this "
            "process (see ulimit -u, and pids.max of its cgroup)"
        )
    return engine


# Of so many it takes less long to find out than a release of the GIL may cost beside a busy Python thread.
cdef size_t kFewEntries = 10_000


@cython.final
cdef class Operation(Ticket):
    """One copy, batch or synchronisation, from its parts to its outcome."""
    cdef core.CxxOperation* _operation
    cdef core.Engine* _engine
    cdef Quota _quota
    cdef bint _submitted
    cdef bint _holds_view
    cdef Py_buffer _view
    cdef bint _abandoned
    cdef bint _delivered
    # A small copy goes through slots, which are all of it that the device touches.
    cdef bint _small
    cdef readonly int device
    """That it was submitted for."""
    cdef uint64_t _nbytes_done
    cdef object _event_owner
    cdef int _result
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
        self.release_view()

    cdef void release_view(self) noexcept:
        if self._holds_view:
            self._holds_view = False
            PyBuffer_Release(&self._view)

    cdef void drop_marks(self) noexcept:
        cdef core.CxxOperation* operation = self._operation
        for i in range(operation.marks.size()):
            core.give_mark(operation.marks[i])
        operation.marks.clear()

    def add_part(self, int route, list entries):
        """Adds entries of one route: (dst, src, width, height, depth, src pitch, src slice, dst pitch, dst slice,
        attributes). None of them may be empty."""
        cdef core.Part* part = self.part_of(route)
        cdef core.Entry entry
        cdef uintptr_t dst, src
        cdef size_t width, height, depth, src_pitch, src_slice, dst_pitch, dst_slice
        cdef unsigned attributes
        for item in entries:
            dst, src, width, height, depth, src_pitch, src_slice, dst_pitch, dst_slice, attributes = item
            entry.dst, entry.src, entry.attributes = dst, src, attributes
            entry.shape.width, entry.shape.height, entry.shape.depth = width, height, depth
            entry.shape.src_pitch, entry.shape.src_slice = src_pitch, src_slice
            entry.shape.dst_pitch, entry.shape.dst_slice = dst_pitch, dst_slice
            part.entries.push_back(entry)

    def add_addresses(self, const uint64_t[::1] dsts, const uint64_t[::1] srcs, const uint64_t[::1] sizes,
                      const uint32_t[::1] attributes, dst_bounds, src_bounds, *, size_t first=0, int device=-1,
                      double seconds=3600):
        """Adds a copy for each pair of addresses, from ``first`` on, that is not empty.

        ``sizes`` and ``attributes`` have one value for all or one for each. Bounds are ``None``, or the address and
        size of memory that a side's numbers are offsets into: pinned memory may go on beyond its registration there.

        Returns (problem, index, device, context): a problem other than 0 says what is wrong with which entry, see
        ``batch.h``. Else the index is where it was when the time was over, which it may only be when a device is known.
        """
        cdef core.BatchSide dst_side, src_side
        cdef core.PerEntry[uint64_t] size_of
        cdef core.PerEntry[uint32_t] attributes_of
        cdef core.AddressesResult result
        cdef size_t n = dsts.shape[0]
        cdef uint64_t until = core.now_ns() + <uint64_t>(seconds * 1e9)
        dst_side.values, src_side.values = &dsts[0], &srcs[0]
        if dst_bounds is not None:
            dst_side.bounded = True
            dst_side.base, dst_side.nbytes = dst_bounds
        if src_bounds is not None:
            src_side.bounded = True
            src_side.base, src_side.nbytes = src_bounds
        self._operation.unowned = src_bounds is None
        size_of.values, size_of.one = &sizes[0], sizes.shape[0] == 1
        attributes_of.values, attributes_of.one = &attributes[0], attributes.shape[0] == 1
        with nogil:
            result = core.add_addresses(
                self._operation, dst_side, src_side, size_of, attributes_of, first, n, device, until
            )
        return result.problem, result.index, result.device, <uintptr_t>result.context

    def overlaps(self, *, bint may_take_long=True):
        """Whether some destinations overlap; ``None`` where it would take long to know, and may not. Strided ones are
        not looked at."""
        cdef core.Overlap found
        cdef size_t count = 0
        for i in range(self._operation.parts.size()):
            count += self._operation.parts[i].count()
        if count <= kFewEntries:
            found = core.find_overlap(self._operation[0], may_take_long)
        else:
            with nogil:
                found = core.find_overlap(self._operation[0], may_take_long)
        return None if found == core.Overlap.kUnknown else found == core.Overlap.kSome

    @property
    def nbytes(self):
        """Of all parts; before the operation is submitted."""
        cdef uint64_t nbytes = 0
        for i in range(self._operation.parts.size()):
            nbytes += self._operation.parts[i].nbytes()
        return nbytes

    @property
    def routes(self):
        """Those of the parts; before the operation is submitted."""
        return {<unsigned char>self._operation.parts[i].route for i in range(self._operation.parts.size())}

    def plan(self, int device):
        """Of each part: its route, how many entries and bytes it has, whether the kernel moves it, and that in bundles,
        and how many bytes the pieces have at most; before the operation is submitted."""
        cdef core.Engine* engine = engine_of(device)
        cdef core.Planned planned
        cdef list parts = []
        for i in range(self._operation.parts.size()):
            planned = engine.plan(self._operation.parts[i])
            parts.append((
                <unsigned char>self._operation.parts[i].route, self._operation.parts[i].count(),
                self._operation.parts[i].nbytes(), <bint>planned.by_kernel, <bint>planned.bundled,
                planned.piece_nbytes,
            ))
        return parts

    cdef core.Part* part_of(self, int route):
        return &self._operation.part_of(<core.Route><unsigned char>route)

    def set_attributes(self, list attributes):
        """The batch's attributes as tuples (access order, hint type, hint id, hint type, hint id, flags)."""
        cdef abi.CopyAttributes native
        for order, source_type, source_id, destination_type, destination_id, flags in attributes:
            native.source_access_order = order
            native.source_hint.type, native.source_hint.id = source_type, source_id
            native.destination_hint.type, native.destination_hint.id = destination_type, destination_id
            native.flags = flags
            self._operation.attributes.push_back(native)

    def mark(self, uint64_t stream, uintptr_t context, *, bint own, bint also=False, bint always=False):
        """Makes the operation wait for the work that is in a stream now. Returns a code.

        ``own`` is said of the stream that the copy is ordered in, whose mark the engine finds last, and ``also`` of
        what its handle means on another device. With ``always`` the mark is set also in an idle stream. On failure
        nothing is recorded.
        """
        cdef core.CxxOperation* operation = self._operation
        cdef size_t before = operation.marks.size()
        cdef core.Mark added
        cdef int result
        with nogil:
            result = core.mark_stream(stream, <abi.Context>context, always, &operation.marks)
        if result != 0:
            return result
        if also:
            operation.also_key = core.make_stream_key(stream, <abi.Context>context)
        if own:
            core.know_stream(operation, stream, <abi.Context>context, operation.marks.size() > before)
        elif operation.stream_marked and operation.marks.size() > before:
            added = operation.marks.back()
            operation.marks.pop_back()
            operation.marks.insert(operation.marks.begin(), added)
        return result

    def hand_marks_to(self, uint64_t stream):
        """Has what is enqueued in a stream from now on wait in the operation's place, which must not be submitted.
        Returns a code."""
        cdef int result
        with nogil:
            result = core.wait_for_marks(stream, self._operation.marks)
        self.drop_marks()
        return result

    def mark_event(self, uintptr_t event, object owner):
        """Makes the operation wait for an event of the caller's, which is kept as long as it may be asked."""
        cdef core.Mark mark
        mark.event = <abi.Event>event
        mark.context = NULL
        mark.owned = False
        self._operation.marks.push_back(mark)
        self._event_owner = owner

    def enqueue(self, int device, uint64_t stream, uintptr_t context):
        """Enqueues the parts as ordinary work of the stream. Returns a code; with one that is not 0 the operation must
        not be submitted."""
        cdef int result
        self._engine = engine_of(device)
        with nogil:
            result = core.enqueue_in_stream(stream, <abi.Context>context, self._operation)
        if result == 0:
            core.know_stream(self._operation, stream, <abi.Context>context, True)
            self._operation.phase.store(core.Phase.kAdmitted)
        else:
            self.leaked = self._operation.leaked
        return result

    def synchronize_stream(self, uint64_t stream, uintptr_t context):
        """Says that the operation waits for the library's own copies of a stream as well."""
        self._operation.stream_key = core.make_stream_key(stream, <abi.Context>context)
        self._operation.synchronizes = core.Synchronizes.kStream

    def synchronize_quota(self):
        """Says that the operation waits for all others of its quota."""
        self._operation.synchronizes = core.Synchronizes.kQuota

    cpdef submit(self, int device, Queue queue, list owners, Py_ssize_t targets=0):
        """Hands the operation to the device's engine, and holds its owners. The queue's ``drain`` signals it."""
        self._engine = engine_of(device)
        self.hold(owners, targets)
        self.device = device
        self._operation.owner = <void*>self
        self._operation.queue = queue._queue
        self._submitted = True
        queue.outstanding += 1
        queue._engine = self._engine
        Py_INCREF(self)
        self._engine.submit(self._operation)

    def cancel(self):
        """Stops the operation.

        Returns 2 when nothing of the caller's has been or will be touched, 1 when the device might still read it, and 0
        when the completion must be awaited, which comes soon.
        """
        cdef int outcome
        if self._operation == NULL or not self._submitted:
            return 2
        self._abandoned = True
        outcome = <int>self._engine.cancel(self._operation)
        if outcome != 0:
            self.release_view()
        return outcome

    @property
    def nbytes_done(self):
        """Bytes that have arrived so far."""
        return self._nbytes_done if self._operation == NULL else self._operation.nbytes_done.load()

    cdef bint deliver(self, bint early) noexcept:
        """Takes the outcome, and empties the slot of a small copy; whether there was one."""
        cdef core.CxxOperation* operation = self._operation
        cdef core.Piece* landed = operation.landed
        if early and operation.only_read:
            return False  # what there is has been delivered, and the slot is the device's
        self._delivered = True
        self._result = operation.result
        if landed == NULL:
            return False
        operation.landed = NULL
        if not self._abandoned and operation.result == 0:
            core.copy_out(landed[0])
        self._engine.give_back(landed, not early and operation.leaked)
        return True

    cdef void let_go_of_view(self) noexcept:
        if self._small or not self._operation.leaked:
            self.release_view()
        elif self._holds_view:
            Py_INCREF(self)  # for good, so that nothing else gets the memory that the device might touch

    cdef void conclude(self):
        cdef core.CxxOperation* operation = self._operation
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


def current_context():
    """The calling thread's current context, or 0."""
    cdef abi.Context context = NULL
    abi.driver.context_get_current(&context)
    return <uintptr_t>context


def context_device(uintptr_t context):
    """A code and the ordinal of a context's device."""
    cdef int device = 0
    cdef int result
    with nogil:
        result = core.device_of(<abi.Context>context, &device)
    return result, device


def is_integrated(int device):
    """Whether the device shares the host's memory."""
    cdef int value = 0
    cdef int handle = 0
    if abi.driver.device_get(&handle, device) != 0:
        return False
    abi.driver.device_get_attribute(&value, abi.kDeviceIntegrated, handle)
    return value != 0


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


def engine_scatter(int device):
    """What became of the kernel for small copies, ``"idle"`` (not asked for yet), ``"loading"``, ``"ready"`` or
    ``"absent"``, how often it was launched, and in how many blocks the last time."""
    for engine in core.Engine.all():
        if engine.device() == device:
            state = ("idle", "loading", "ready", "absent")[<int>engine.scatter().state()]
            return state, engine.scatter().launches(), engine.scatter().blocks()
    return "idle", 0, 0


def set_road_times(*, avoided=None, linger=None, number=None):
    """For how many seconds the copy engine is avoided once a small copy was late there, an await waits for the slower
    of two roads, and a call looks at its slot for a number before it asks for a flag. Returns what was set before."""
    before = {
        "avoided": core.road_times.avoided_ns.load() * 1e-9,
        "linger": core.road_times.linger_ns.load() * 1e-9,
        "number": core.road_times.number_ns.load() * 1e-9,
    }
    if avoided is not None:
        core.road_times.avoided_ns.store(<uint64_t>(avoided * 1e9))
    if linger is not None:
        core.road_times.linger_ns.store(<uint64_t>(linger * 1e9))
    if number is not None:
        core.road_times.number_ns.store(<uint64_t>(number * 1e9))
    return before


def avoids_copy_engine(int device):
    """Whether small copies to the host go by the kernel, because the copy engine was late a moment ago."""
    for engine in core.Engine.all():
        if engine.device() == device:
            return engine.avoids_copy_engine()
    return False


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
