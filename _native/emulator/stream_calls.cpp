#include "stream_calls.h"

#include <algorithm>

#include "capture.h"
#include "device_calls.h"
#include "memory.h"
#include "scheduler.h"

namespace emu {

namespace {

template <class Field>
CUresult get_of_stream(const char* name, CUstream handle, Field&& field) {
  return driver_call(name, Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    field(*stream);
    return CUDA_SUCCESS;
  });
}

// For what a stream under capture is not to be asked.
template <class Field>
CUresult get_of_stream_without_capture(const char* name, CUstream handle, Field&& field) {
  return driver_call(name, Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_captured(*stream); result != CUDA_SUCCESS) return result;
    field(*stream);
    return CUDA_SUCCESS;
  });
}

template <class Value>
CUresult write_value(const char* name, CUstream handle, CUdeviceptr address, Value value) {
  return driver_call(name, Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    const auto allocation = allocation_at(address);
    if (!allocation || address % sizeof(Value) != 0) return CUDA_ERROR_INVALID_VALUE;
    Work work{Kind::write_value};
    work.touches = {allocation};
    work.finish = [address, value] {
      __atomic_store_n(reinterpret_cast<Value*>(touchable(address)), value, __ATOMIC_RELEASE);
    };
    return submit(call, stream, std::move(work), node_batch_mem_op);
  });
}

template <class Value>
bool satisfied(Value now, Value wanted, unsigned condition) {
  switch (condition) {
    case 0: return static_cast<std::make_signed_t<Value>>(now - wanted) >= 0;
    case 1: return now == wanted;
    case 2: return (now & wanted) != 0;
    default: return static_cast<Value>(~(now | wanted)) != 0;
  }
}

template <class Value>
CUresult wait_value(const char* name, CUstream handle, CUdeviceptr address, Value value, unsigned flags) {
  return driver_call(name, Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    const auto allocation = allocation_at(address);
    if (!allocation || address % sizeof(Value) != 0) return CUDA_ERROR_INVALID_VALUE;
    Work work{Kind::wait_value};
    work.touches = {allocation};
    work.ready = [allocation, address, value, condition = flags & 3] {
      if (allocation->freed) return true;
      return satisfied(__atomic_load_n(reinterpret_cast<Value*>(touchable(address)), __ATOMIC_ACQUIRE), value,
                       condition);
    };
    return submit(call, stream, std::move(work), node_batch_mem_op);
  });
}

std::shared_ptr<Capture> live_capture(const Record& record) { return record.capture.lock(); }

bool was_captured(const Record& record) {
  return record.capture.owner_before(std::weak_ptr<Capture>{}) || std::weak_ptr<Capture>{}.owner_before(record.capture);
}

// Whose work counts as the legacy stream's: its next operation would wait for it.
std::vector<StreamPtr> synchronising_streams(const Stream& stream) {
  std::vector<StreamPtr> busy;
  if (!stream.legacy) return busy;
  for (const auto& other : driver().active)
    if (other->blocking() && other->context == stream.context && !other->queue.empty()) busy.push_back(other);
  return busy;
}

CUresult create_stream(const char* name, CUstream* handle, unsigned flags, int priority) {
  return driver_call(name, Needs::context, [&](Call& call) {
    if (!handle || flags > stream_non_blocking) return CUDA_ERROR_INVALID_VALUE;
    auto stream = std::make_shared<Stream>();
    stream->context = call.context;
    stream->flags = flags;
    stream->priority = std::clamp(priority, greatest_priority, 0);
    stream->id = driver().next_id++;
    driver().streams.add(stream);
    *handle = stream->handle;
    return CUDA_SUCCESS;
  });
}

CUresult launch_host_function(CUstream handle, CUhostFn function, void* argument) {
  return driver_call("cuLaunchHostFunc", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    return submit(call, stream, host_function_work(function, argument), node_host);
  });
}

CUresult record_event(const char* name, CUevent handle, CUstream stream_handle, unsigned flags) {
  return driver_call(name, Needs::healthy, [&](Call& call) {
    EventPtr event;
    StreamPtr stream;
    if (const auto result = find_event(handle, event); result != CUDA_SUCCESS) return result;
    if (const auto result = resolve_stream(call, stream_handle, stream); result != CUDA_SUCCESS) return result;
    if (event->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
    const bool external = flags & event_record_external;
    if (!stream->capture) {
      if (external || flags > event_record_external) return CUDA_ERROR_INVALID_VALUE;
      Work work = record_work(*event);
      work.at_once = event->flags & event_disable_timing;
      return submit(call, stream, std::move(work), node_event_record);
    }
    if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (external)
      return capture_node(*stream, node_event_record,
                          [event] { return std::make_shared<const Work>(record_work(*event)); });
    event->record = std::make_shared<Record>();
    event->record->capture = stream->capture;
    event->record->capture_tail = stream->capture_tail;
    return CUDA_SUCCESS;
  });
}

// A captured event belongs to its capture: asking it anything else ends that capture.
CUresult refuse_captured_event(const Event& event) {
  if (!event.record || !was_captured(*event.record)) return CUDA_SUCCESS;
  if (const auto capture = live_capture(*event.record)) capture->invalidated = true;
  return CUDA_ERROR_CAPTURED_EVENT;
}

}  // namespace

Work record_work(Event& event) {
  const auto record = std::make_shared<Record>();
  event.record = record;
  Work work{Kind::event_record};
  work.finish = [record] {
    record->done = true;
    record->time_ns = now_ns();
  };
  return work;
}

Work wait_work(const Event& event) {
  Work work{Kind::event_wait};
  work.ready = [record = event.record] { return !record || record->done; };
  return work;
}

Work host_function_work(CUhostFn function, void* argument) {
  Work work{Kind::host_function};
  work.engine = Engine::host_thread;
  work.function = function;
  work.argument = argument;
  return work;
}

CUresult cuStreamCreate(CUstream* handle, unsigned flags) { return create_stream("cuStreamCreate", handle, flags, 0); }

CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
  return create_stream("cuStreamCreateWithPriority", handle, flags, priority);
}

// Returns at once; what is queued still runs.
CUresult cuStreamDestroy(CUstream handle) {
  return driver_call("cuStreamDestroy", Needs::initialised, [&](Call&) {
    const auto stream = driver().streams.find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) stream->capture->invalidated = true;
    driver().streams.remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamQuery(CUstream handle) {
  return query_call("cuStreamQuery", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_captured(*stream); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_unsafe(); result != CUDA_SUCCESS) return result;
    if (!stream->queue.empty() || !synchronising_streams(*stream).empty()) return CUDA_ERROR_NOT_READY;
    if (stream->lingering == 0) return CUDA_SUCCESS;
    --stream->lingering;
    return CUDA_ERROR_NOT_READY;
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return driver_call("cuStreamSynchronize", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_captured(*stream); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_unsafe(); result != CUDA_SUCCESS) return result;
    for (const auto& other : synchronising_streams(*stream)) drain(call, other, "synchronize");
    return drain(call, stream, "synchronize");
  });
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  return driver_call("cuStreamWaitEvent", Needs::healthy, [&](Call& call) {
    EventPtr event;
    StreamPtr stream;
    if (const auto result = find_event(handle, event); result != CUDA_SUCCESS) return result;
    if (const auto result = resolve_stream(call, stream_handle, stream); result != CUDA_SUCCESS) return result;
    if (flags > event_wait_external) return CUDA_ERROR_INVALID_VALUE;
    const auto& record = event->record;
    if (record && was_captured(*record)) {
      const auto capture = live_capture(*record);
      return capture ? join_capture(stream, *record, capture) : CUDA_ERROR_CAPTURED_EVENT;
    }
    if (!stream->capture) {
      if (!record) return CUDA_SUCCESS;
      return submit(call, stream, wait_work(*event), node_wait_event);
    }
    if (flags & event_wait_external)
      return capture_node(*stream, node_wait_event,
                          [event] { return std::make_shared<const Work>(wait_work(*event)); });
    if (!record) return CUDA_SUCCESS;
    stream->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return get_of_stream("cuStreamGetCtx", handle, [&](const Stream& stream) { *context = stream.context->handle; });
}

CUresult cuStreamGetCtx_v2(CUstream handle, CUcontext* context, CUgreenCtx* green_context) {
  return get_of_stream("cuStreamGetCtx", handle, [&](const Stream& stream) {
    if (context) *context = stream.context->handle;
    if (green_context) *green_context = nullptr;
  });
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
  return get_of_stream_without_capture("cuStreamGetFlags", handle,
                                       [&](const Stream& stream) { *flags = stream.flags; });
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  return get_of_stream("cuStreamGetPriority", handle, [&](const Stream& stream) { *priority = stream.priority; });
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  return get_of_stream_without_capture("cuStreamGetId", handle, [&](const Stream& stream) { *id = stream.id; });
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice* device) {
  return get_of_stream("cuStreamGetDevice", handle, [&](const Stream& stream) { *device = stream.context->device; });
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, std::uint32_t value, unsigned) {
  return write_value("cuStreamWriteValue32", stream, address, value);
}

CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned) {
  return write_value("cuStreamWriteValue64", stream, address, value);
}

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, std::uint32_t value, unsigned flags) {
  return wait_value("cuStreamWaitValue32", stream, address, value, flags);
}

CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  return wait_value("cuStreamWaitValue64", stream, address, value, flags);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  return launch_host_function(stream, function, argument);
}

CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void* argument, unsigned) {
  return launch_host_function(stream, function, argument);
}

CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  return driver_call("cuEventCreate", Needs::context, [&](Call& call) {
    constexpr unsigned known_flags = 7, interprocess = 4;
    if (!handle || flags > known_flags) return CUDA_ERROR_INVALID_VALUE;
    if (flags & interprocess) return CUDA_ERROR_NOT_SUPPORTED;
    auto event = std::make_shared<Event>();
    event->context = call.context;
    event->flags = flags;
    driver().events.add(event);
    *handle = event->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuEventDestroy(CUevent handle) {
  return driver_call("cuEventDestroy", Needs::initialised, [&](Call&) {
    if (!driver().events.find(handle)) return CUDA_ERROR_INVALID_HANDLE;
    driver().events.remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return record_event("cuEventRecord", event, stream, 0); }

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
  return record_event("cuEventRecordWithFlags", event, stream, flags);
}

CUresult cuEventQuery(CUevent handle) {
  return query_call("cuEventQuery", Needs::healthy, [&](Call&) {
    EventPtr event;
    if (const auto result = find_event(handle, event); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_captured_event(*event); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_unsafe(); result != CUDA_SUCCESS) return result;
    return !event->record || event->record->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return driver_call("cuEventSynchronize", Needs::healthy, [&](Call& call) {
    EventPtr event;
    if (const auto result = find_event(handle, event); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_captured_event(*event); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_unsafe(); result != CUDA_SUCCESS) return result;
    const auto record = event->record;
    const auto& context = *event->context;
    call.wait_unless("synchronize", [&] { return !record || record->done || context.fault != CUDA_SUCCESS; });
    return context.fault;
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  return driver_call("cuEventElapsedTime", Needs::healthy, [&](Call&) {
    EventPtr start, end;
    if (const auto result = find_event(start_handle, start); result != CUDA_SUCCESS) return result;
    if (const auto result = find_event(end_handle, end); result != CUDA_SUCCESS) return result;
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    if ((start->flags | end->flags) & event_disable_timing || !start->record || !end->record)
      return CUDA_ERROR_INVALID_HANDLE;
    if (!start->record->done || !end->record->done) return CUDA_ERROR_NOT_READY;
    *milliseconds = static_cast<float>(end->record->time_ns - start->record->time_ns) / 1e6f;
    return CUDA_SUCCESS;
  });
}

}  // namespace emu
