// Initialisation, devices and contexts.
#include "device_calls.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "capture.h"
#include "memory.h"
#include "scheduler.h"

namespace emu {

namespace {

bool valid_device(CUdevice device) { return device >= 0 && device < driver().configuration.devices; }

StreamPtr default_stream(const ContextPtr& context, std::uintptr_t handle) {
  auto stream = std::make_shared<Stream>();
  stream->handle = reinterpret_cast<CUstream>(handle);
  stream->context = context;
  stream->id = driver().next_id++;
  stream->legacy = handle == legacy_stream_handle;
  return stream;
}

int attribute_value(int attribute, CUdevice device) {
  switch (attribute) {
    case 1: return 1024;                // threads per block
    case 2: case 3: return 1024;        // block dimensions
    case 4: return 64;
    case 5: return INT32_MAX;           // grid dimensions
    case 6: case 7: return 65535;
    case 8: return 49152;               // shared memory per block
    case 10: return 32;                 // warp size
    case 13: return 1000000;            // clock rate, kHz
    case 14: return 512;                // texture alignment
    case 15: return 1;                  // copies overlap kernels
    case 16: return 16;                 // multiprocessors
    case 19: return 1;                  // host memory can be mapped
    case 31: return 1;                  // concurrent kernels
    case 33: return device + 1;         // PCI bus
    case 39: return 2048;               // threads per multiprocessor
    case 40: return 2;                  // copy engines
    case 41: return 1;                  // unified addressing
    case 75: return 9;                  // compute capability
    case 76: return 0;
    case 78: return 1;                  // stream priorities
    case 83: return 1;                  // managed memory
    case 84: return 0;
    case 89: return 1;                  // concurrent managed access
    case 90: return 1;
    case 91: return 1;                  // registered memory keeps its address
    case 92: case 93: return 1;         // stream memory operations
    case 94: case 122: case 123: return 1;
    case 99: return 1;                  // host registration
    case 115: return 1;                 // memory pools
    case 134: return 0;                 // NUMA node
    case 142: case 144: return 1;       // pools of host memory
    default: return 0;
  }
}

CUresult retain_primary(CUdevice device, ContextPtr& context) {
  Device& state = driver().devices[static_cast<std::size_t>(device)];
  if (!state.primary) {
    state.primary = create_context(device, state.primary_flags);
    state.primary->primary = true;
  }
  ++state.primary_references;
  context = state.primary;
  return CUDA_SUCCESS;
}

void release_primary(Call& call, Device& state) {
  state.primary_references = 0;
  const auto context = std::exchange(state.primary, nullptr);
  if (context) destroy_context(call, context);
}

}  // namespace

ContextPtr create_context(int device, unsigned flags) {
  auto context = std::make_shared<Context>();
  context->device = device;
  context->flags = flags;
  context->id = driver().next_id++;
  driver().contexts.add(context);
  context->legacy_stream = default_stream(context, legacy_stream_handle);
  return context;
}

StreamPtr per_thread_stream(const ContextPtr& context) {
  auto& stream = context->per_thread_streams[thread_id()];
  if (!stream) stream = default_stream(context, per_thread_stream_handle);
  return stream;
}

void destroy_context(Call& call, const ContextPtr& context) {
  Driver& d = driver();
  drop_queued_work(*context);
  wake_scheduler();
  d.progress.wait(call.lock, [&] {
    return std::none_of(d.active.begin(), d.active.end(), [&](const StreamPtr& stream) {
      return stream->context == context && !stream->queue.empty();
    });
  });
  for (const auto& stream : d.streams.all())
    if (stream->context == context) d.streams.remove(stream->handle);
  for (const auto& module : d.modules.all())
    if (module->context == context) d.modules.remove(module->handle);
  free_memory_of(*context);
  d.contexts.remove(context->handle);
  forget_context(context->handle);
  context->destroyed = true;
  context->host_work.notify_one();
  context->legacy_stream = nullptr;
  context->per_thread_streams.clear();
}

CUresult cuInit(unsigned flags) {
  return driver_call("cuInit", Needs::nothing, [&](Call&) {
    Driver& d = driver();
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (d.initialised) return CUDA_SUCCESS;
    if (d.configuration.devices == 0) return CUDA_ERROR_NO_DEVICE;
    if (!map_device_memory()) return CUDA_ERROR_OUT_OF_MEMORY;
    start_scheduler();
    d.initialised = true;
    return CUDA_SUCCESS;
  });
}

CUresult cuDriverGetVersion(int* version) {
  return driver_call("cuDriverGetVersion", Needs::nothing, [&](Call&) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = driver().configuration.driver_version;
    return CUDA_SUCCESS;
  });
}

CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = nullptr;
  switch (error) {
#define RESULT(name, value) \
  case name: *text = #name; return CUDA_SUCCESS;
#include "results.inc"
#undef RESULT
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  static const struct {
    CUresult code;
    const char* text;
  } texts[] = {
      {CUDA_SUCCESS, "no error"},
      {CUDA_ERROR_INVALID_VALUE, "invalid argument"},
      {CUDA_ERROR_OUT_OF_MEMORY, "out of memory"},
      {CUDA_ERROR_NOT_INITIALIZED, "initialization error"},
      {CUDA_ERROR_INVALID_CONTEXT, "invalid device context"},
      {CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"},
      {CUDA_ERROR_NOT_READY, "device not ready"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
      {CUDA_ERROR_NOT_PERMITTED, "operation not permitted"},
      {CUDA_ERROR_NOT_SUPPORTED, "operation not supported"},
      {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
      {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"},
  };
  for (const auto& entry : texts) {
    if (entry.code != error) continue;
    *text = entry.text;
    return CUDA_SUCCESS;
  }
  return cuGetErrorName(error, text);
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return driver_call("cuDeviceGet", Needs::initialised, [&](Call&) {
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetCount(int* count) {
  return driver_call("cuDeviceGetCount", Needs::initialised, [&](Call&) {
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    *count = driver().configuration.devices;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return driver_call("cuDeviceGetName", Needs::initialised, [&](Call&) {
    if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, static_cast<std::size_t>(length), "Emulated GPU %d", device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return driver_call("cuDeviceGetUuid", Needs::initialised, [&](Call&) {
    if (!uuid) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memcpy(uuid->bytes, "emulated-gpu-000", sizeof uuid->bytes);
    uuid->bytes[15] = static_cast<unsigned char>(device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceTotalMem(std::size_t* nbytes, CUdevice device) {
  return driver_call("cuDeviceTotalMem", Needs::initialised, [&](Call&) {
    if (!nbytes) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *nbytes = driver().configuration.device_nbytes;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return driver_call("cuDeviceGetAttribute", Needs::initialised, [&](Call&) {
    if (!value || attribute <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute_value(attribute, device);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  return driver_call("cuDeviceGetPCIBusId", Needs::initialised, [&](Call&) {
    if (!text || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(text, static_cast<std::size_t>(length), "0000:%02X:00.0", device + 1);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceCanAccessPeer(int* possible, CUdevice device, CUdevice peer) {
  return driver_call("cuDeviceCanAccessPeer", Needs::initialised, [&](Call&) {
    if (!possible) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device) || !valid_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *possible = device != peer;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceGetP2PAttribute(int* value, int attribute, CUdevice source, CUdevice destination) {
  return driver_call("cuDeviceGetP2PAttribute", Needs::initialised, [&](Call&) {
    if (!value) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(source) || !valid_device(destination) || source == destination) return CUDA_ERROR_INVALID_DEVICE;
    constexpr int access_supported = 2;
    *value = attribute == access_supported;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  return driver_call("cuCtxEnablePeerAccess", Needs::context, [&](Call& call) {
    const auto other = driver().contexts.find(peer);
    if (!other || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (other->device == call.context->device) return CUDA_ERROR_INVALID_DEVICE;
    return call.context->peers.insert(peer).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  });
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  return driver_call("cuCtxDisablePeerAccess", Needs::context, [&](Call& call) {
    return call.context->peers.erase(peer) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice device) {
  return driver_call("cuDevicePrimaryCtxRetain", Needs::initialised, [&](Call&) {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    ContextPtr context;
    const auto result = retain_primary(device, context);
    *handle = context->handle;
    return result;
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return driver_call("cuDevicePrimaryCtxRelease", Needs::initialised, [&](Call& call) {
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Device& state = driver().devices[static_cast<std::size_t>(device)];
    if (!state.primary) return CUDA_ERROR_INVALID_CONTEXT;
    if (--state.primary_references == 0) release_primary(call, state);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxReset(CUdevice device) {
  return driver_call("cuDevicePrimaryCtxReset", Needs::initialised, [&](Call& call) {
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    release_primary(call, driver().devices[static_cast<std::size_t>(device)]);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags) {
  return driver_call("cuDevicePrimaryCtxSetFlags", Needs::initialised, [&](Call&) {
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    Device& state = driver().devices[static_cast<std::size_t>(device)];
    state.primary_flags = flags;
    if (state.primary) state.primary->flags = flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return driver_call("cuDevicePrimaryCtxGetState", Needs::initialised, [&](Call&) {
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    const Device& state = driver().devices[static_cast<std::size_t>(device)];
    if (flags) *flags = state.primary_flags;
    if (active) *active = state.primary != nullptr;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxCreate_v2(CUcontext* handle, unsigned flags, CUdevice device) {
  return driver_call("cuCtxCreate", Needs::initialised, [&](Call&) {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    const auto context = create_context(device, flags);
    push_context(context->handle);
    *handle = context->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxCreate_v3(CUcontext* handle, void*, int parameters, unsigned flags, CUdevice device) {
  return parameters != 0 ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(handle, flags, device);
}

CUresult cuCtxCreate_v4(CUcontext* handle, void* parameters, unsigned flags, CUdevice device) {
  return parameters ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(handle, flags, device);
}

CUresult cuCtxDestroy(CUcontext handle) {
  return driver_call("cuCtxDestroy", Needs::initialised, [&](Call& call) {
    const auto context = driver().contexts.find(handle);
    if (!context || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    destroy_context(call, context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent(CUcontext handle) {
  return driver_call("cuCtxPushCurrent", Needs::initialised, [&](Call&) {
    if (!driver().contexts.find(handle)) return CUDA_ERROR_INVALID_CONTEXT;
    return push_context(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuCtxPopCurrent(CUcontext* handle) {
  return driver_call("cuCtxPopCurrent", Needs::initialised, [&](Call&) {
    if (!current_context_handle()) return CUDA_ERROR_INVALID_CONTEXT;
    const auto popped = pop_context();
    if (handle) *handle = popped;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetCurrent(CUcontext handle) {
  return driver_call("cuCtxSetCurrent", Needs::initialised, [&](Call&) {
    if (handle && !driver().contexts.find(handle)) return CUDA_ERROR_INVALID_CONTEXT;
    set_current_context(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* handle) {
  if (inside_host_function()) return CUDA_ERROR_NOT_PERMITTED;
  return query_call("cuCtxGetCurrent", Needs::initialised, [&](Call&) {
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    *handle = current_context_handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext handle) {
  return driver_call("cuCtxGetDevice", Needs::initialised, [&](Call& call) {
    const auto context = handle ? driver().contexts.find(handle) : call.context;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (!device) return CUDA_ERROR_INVALID_VALUE;
    *device = context->device;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) { return cuCtxGetDevice_v2(device, nullptr); }

CUresult cuCtxGetFlags(unsigned* flags) {
  return driver_call("cuCtxGetFlags", Needs::context, [&](Call& call) {
    *flags = call.context->flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
  return driver_call("cuCtxGetId", Needs::initialised, [&](Call& call) {
    const auto context = handle ? driver().contexts.find(handle) : call.context;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    *id = context->id;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetApiVersion(CUcontext handle, unsigned* version) {
  return driver_call("cuCtxGetApiVersion", Needs::initialised, [&](Call& call) {
    if (!(handle ? driver().contexts.find(handle) : call.context)) return CUDA_ERROR_INVALID_CONTEXT;
    *version = 3020;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return driver_call("cuCtxGetStreamPriorityRange", Needs::context, [&](Call&) {
    if (least) *least = 0;
    if (greatest) *greatest = greatest_priority;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize_v2(CUcontext handle) {
  return driver_call("cuCtxSynchronize", Needs::healthy, [&](Call& call) {
    const auto context = handle ? driver().contexts.find(handle) : call.context;
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    if (const auto result = refuse_unsafe(); result != CUDA_SUCCESS) return result;
    const auto streams = driver().active;
    for (const auto& stream : streams)
      if (stream->context == context) drain(call, stream, "synchronize");
    return context->fault;
  });
}

CUresult cuCtxSynchronize() { return cuCtxSynchronize_v2(nullptr); }

}  // namespace emu
