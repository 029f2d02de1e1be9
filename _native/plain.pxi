# The short way for what programs await most: a contiguous copy, small above all, between an object whose device memory
# is easily known (kinds.pxi) and one with the buffer protocol, or a CPU tensor. Whatever is not that plain, or wrong,
# takes the long way, which has the error messages.

# A small copy takes 6 us; one that has not landed by then is behind something.
cdef uint64_t kInlineSpinNs = 12_000
# Copies inside calls hold the loop for 200 us at most before one suspends (api.md); this leaves room for the last one.
cdef uint64_t kMostHeldNs = 180_000
# Beside a busy Python thread the way back to the GIL takes 5 ms: then copies park for a while, which needs one way
# less. So they do when the driver has made a call wait, as it does while the channels of a direction are full
# (docs/explanation/measurements.md), and for longer than the scheduler might. Trying again costs the loop a hundredth
# of its time at most.
cdef uint64_t kSlowGilNs = 1_000_000
cdef uint64_t kSlowCallNs = 10_000_000
cdef uint64_t kParkForNs = 200_000_000
cdef uint64_t kParkForWaits = 100


def small_source(src):
    """The bytes, the shape and the type of what ``submit_plain`` may copy from a device; ``None`` for all else.

    The type is NumPy's, as such or as a string, or torch's; ``None`` for mere bytes.
    """
    cdef DeviceKind kind = device_kind_of(type(src))
    cdef Span memory
    try:
        holder = kind.ask(src, False, &memory)
    except Exception:  # the long way meets it again
        return None
    if holder is None or memory.nbytes == 0 or memory.nbytes > core.kSmallBytes:
        return None
    shape, dtype = kind.shape_and_type(src)
    return memory.nbytes, (memory.nbytes,) if shape is None else shape, dtype


# What is still read belongs to no copier: its await has ended.
cdef Quota readers = Quota(slots=1, slot_nbytes=4096, workers=1, host_function_hints=False)


cdef Operation reader_of(const core.Late& late):
    cdef Operation reader = Operation.__new__(Operation, readers)
    reader._abandoned = True
    reader._operation.landed = late.piece
    reader._operation.marks.push_back(late.mark)
    reader._operation.in_stream = reader._operation.only_read = True
    reader._operation.phase.store(core.Phase.kAdmitted)
    return reader


def submit_plain(
    Quota quota, Queue queue, src, dst, stream, handle, bint to_host, int device, bint inlined
):
    """Submits a contiguous copy, or finishes a small one inside the call when its stream is idle.

    The stream is held as long as the two objects are; its handle is ``None`` where none is named.

    Returns the operation, ``True`` when the copy is done, or ``None`` for what must take the long way: nothing has
    happened then. And the operations, mostly none, that end when the device no longer reads the source on the roads
    that were slower.
    """
    cdef Operation operation
    cdef core.CxxOperation* native
    cdef MemoryInfo info, host_info
    cdef core.Entry entry
    cdef core.Part* part
    cdef DeviceKind device_kind
    cdef HostKind host_kind
    cdef Span memory, host_memory
    cdef uint64_t stream_handle
    cdef int code
    cdef core.Engine* engine
    cdef core.Run run
    cdef core.Outcome outcome = core.Outcome.kDeclined
    cdef Operation reading
    cdef tuple still_read = ()
    cdef uint64_t begin = 0, end = 0, waited
    host, on_device = (dst, src) if to_host else (src, dst)
    host_kind, device_kind = host_kind_of(type(host)), device_kind_of(type(on_device))
    if host_kind is no_host_kind:
        return None, ()
    try:
        holder = device_kind.ask(on_device, not to_host, &memory)
    except Exception:  # the long way meets it again
        return None, ()
    if holder is None or memory.nbytes == 0:
        return None, ()
    if memory.nbytes > core.kSmallBytes:
        queue.rouse()
    handle = device_kind.stream_of(on_device, handle)
    if type(handle) is not int or not 0 <= handle < 2**64:
        return None, ()
    stream_handle = handle
    operation = Operation.__new__(Operation, quota)
    host_holder = host_kind.take(host, to_host, operation, &host_memory)
    if host_holder is None or host_memory.nbytes != memory.nbytes:
        return None, ()
    native = operation._operation
    operation._small = memory.nbytes <= core.kSmallBytes
    part = operation.part_of(<int>(core.Route.kToHostStaged if to_host else core.Route.kToDeviceStaged))
    entry.dst = host_memory.address if to_host else memory.address
    entry.src = memory.address if to_host else host_memory.address
    entry.shape.width = memory.nbytes
    part.entries.push_back(entry)
    if not operation._small or queue._held_ns >= kMostHeldNs:
        inlined = False
    with nogil:
        info = describe(memory.address)
        code = info.result
        if code == 0 and (
            info.memory_type != abi.kMemoryDevice
            or info.managed
            or (device >= 0 and info.ordinal != device)
            or memory.nbytes > info.range_start + info.range_nbytes - memory.address
        ):
            code = 1
        if code == 0 and not operation._small:
            host_info = describe(host_memory.address)
            code = host_info.result
            if code == 0 and host_info.memory_type == abi.kMemoryHost and not host_info.managed:
                # The driver refuses copies over the end of a registration; the long way cuts them there.
                if memory.nbytes > host_info.range_start + host_info.range_nbytes - host_memory.address:
                    code = 1
                if to_host:
                    part.route = core.Route.kToHostDirect
                else:
                    part.route = core.Route.kToDeviceDirect
            elif code == 0 and host_info.memory_type != 0:
                code = 1
        if code == 0 and info.context == NULL:
            code = core.primary_context(info.ordinal, &info.context)
        if code == 0:
            code = core.mark_stream(stream_handle, info.context, False, &native.marks)
        if code == 0:
            engine = core.Engine.of_device(info.ordinal)
            if inlined and native.marks.size() == 0:
                begin = core.now_ns()
                if begin >= queue._parks_until_ns:
                    run = engine.run_inline(native, kInlineSpinNs)
                    outcome = run.outcome
                    end = core.now_ns()
    if code != 0:
        return None, ()
    if end != 0:
        queue._held_ns += end - begin
        waited = end - begin
        if waited > kSlowCallNs or core.now_ns() - end > kSlowGilNs:
            queue._parks_until_ns = end + max(kParkForNs, kParkForWaits * waited)
        for i in range(run.late_count):
            reading = reader_of(run.late[i])
            # Only a copy to the host has two roads.
            reading.submit(info.ordinal, queue, [src, holder, stream])
            still_read += (reading,)
    if outcome == core.Outcome.kDone:
        quota._quota.submitted.fetch_add(1)
        quota._quota.completed.fetch_add(1)
        quota._quota.inline_completions.fetch_add(1)
        quota._quota.nbytes_small.fetch_add(memory.nbytes)
        return True, still_read
    if outcome == core.Outcome.kParked:
        quota._quota.nbytes_small.fetch_add(memory.nbytes)
    native.stream_key = core.make_stream_key(stream_handle)
    native.stream_marked = native.marks.size() != 0 and outcome == core.Outcome.kDeclined
    if to_host:
        operation.submit(info.ordinal, queue, [dst, host_holder, src, holder, stream], 2)
    else:
        operation.submit(info.ordinal, queue, [dst, holder, src, host_holder, stream])
    return operation, still_read
