// The slice of the CUDA driver's ABI that the native layer calls: own prototypes and function pointers, filled once by
// aiocuda_copy/_driver.py from cuGetProcAddress. One build serves CUDA 12.9 and every 13 and needs no CUDA toolkit;
// tests/abi/ compares every line here with the cuda.h of PyPI's nvidia-cuda-runtime.
#pragma once
#include <cstddef>
#include <cstdint>

namespace aiocuda::abi {

using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Event = void*;
using Module = void*;
using Function = void*;
using DevicePointer = unsigned long long;
using HostFunction = void (*)(void*);

enum : Result {
  kSuccess = 0,
  kErrorInvalidValue = 1,
  kErrorOutOfMemory = 2,
  kErrorNotReady = 600,
  kErrorStreamCaptureImplicit = 906,
};
enum : unsigned { kStreamNonBlocking = 1, kEventDisableTiming = 2 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1, kCaptureInvalidated = 2 };
enum AccessOrder : int { kAccessOrderStream = 1, kAccessOrderDuringApiCall = 2, kAccessOrderAny = 3 };
enum MemoryType : int { kMemoryHost = 1, kMemoryDevice = 2 };
enum DeviceAttribute : int {
  kDeviceMultiprocessors = 16,
  kDeviceIntegrated = 18,
  kDeviceManagedMemory = 83,
  kDeviceConcurrentManagedAccess = 89,
};
enum PointerAttribute : int {
  kPointerContext = 1,
  kPointerMemoryType = 2,
  kPointerDevicePointer = 3,
  kPointerBufferId = 7,
  kPointerIsManaged = 8,
  kPointerDeviceOrdinal = 9,
  kPointerRangeStart = 11,
  kPointerRangeSize = 12,
};

struct MemoryLocation {
  int type;
  int id;
};

struct CopyAttributes {
  int source_access_order;
  MemoryLocation source_hint;
  MemoryLocation destination_hint;
  unsigned flags;
};

// CUDA_MEMCPY3D_v2 and CUDA_MEMCPY2D_v2.
struct Copy3D {
  size_t src_x, src_y, src_z, src_lod;
  int src_type;
  const void* src_host;
  DevicePointer src_device;
  void* src_array;
  void* reserved0;
  size_t src_pitch, src_height;
  size_t dst_x, dst_y, dst_z, dst_lod;
  int dst_type;
  void* dst_host;
  DevicePointer dst_device;
  void* dst_array;
  void* reserved1;
  size_t dst_pitch, dst_height;
  size_t width, height, depth;
};

}  // namespace aiocuda::abi

// X(driver name, C++ name, parameter types). The version asked of cuGetProcAddress stands in _driver.py.
#define AIOCUDA_ENTRY_POINTS(X)                                                                                        \
  X(cuInit, init, (unsigned))                                                                                          \
  X(cuGetErrorName, get_error_name, (Result, const char**))                                                            \
  X(cuDriverGetVersion, driver_get_version, (int*))                                                                    \
  X(cuDeviceGet, device_get, (Device*, int))                                                                           \
  X(cuDeviceGetCount, device_get_count, (int*))                                                                        \
  X(cuDeviceGetAttribute, device_get_attribute, (int*, int, Device))                                                   \
  X(cuDevicePrimaryCtxRetain, primary_context_retain, (Context*, Device))                                              \
  X(cuCtxGetCurrent, context_get_current, (Context*))                                                                  \
  X(cuCtxSetCurrent, context_set_current, (Context))                                                                   \
  X(cuCtxPushCurrent, context_push, (Context))                                                                         \
  X(cuCtxPopCurrent, context_pop, (Context*))                                                                          \
  X(cuCtxGetDevice, context_get_device, (Device*))                                                                     \
  X(cuCtxEnablePeerAccess, context_enable_peer_access, (Context, unsigned))                                            \
  X(cuThreadExchangeStreamCaptureMode, exchange_capture_mode, (int*))                                                  \
  X(cuStreamCreate, stream_create, (Stream*, unsigned))                                                                \
  X(cuStreamDestroy, stream_destroy, (Stream))                                                                         \
  X(cuStreamGetFlags, stream_get_flags, (Stream, unsigned*))                                                           \
  X(cuStreamGetId, stream_get_id, (Stream, unsigned long long*))                                                       \
  X(cuStreamQuery, stream_query, (Stream))                                                                             \
  X(cuStreamWaitEvent, stream_wait_event, (Stream, Event, unsigned))                                                   \
  X(cuStreamIsCapturing, stream_is_capturing, (Stream, int*))                                                          \
  X(cuStreamGetCtx, stream_get_context, (Stream, Context*))                                                            \
  X(cuStreamWriteValue32, stream_write_value32, (Stream, DevicePointer, uint32_t, unsigned))                           \
  X(cuEventCreate, event_create, (Event*, unsigned))                                                                   \
  X(cuEventDestroy, event_destroy, (Event))                                                                            \
  X(cuEventRecord, event_record, (Event, Stream))                                                                      \
  X(cuEventQuery, event_query, (Event))                                                                                \
  X(cuLaunchHostFunc, launch_host_function, (Stream, HostFunction, void*))                                             \
  X(cuMemcpyAsync, copy_async, (DevicePointer, DevicePointer, size_t, Stream))                                         \
  X(cuMemcpyDtoHAsync, copy_to_host_async, (void*, DevicePointer, size_t, Stream))                                     \
  X(cuMemcpyHtoDAsync, copy_to_device_async, (DevicePointer, const void*, size_t, Stream))                             \
  X(cuMemcpy3DAsync, copy_3d_async, (const Copy3D*, Stream))                                                           \
  X(cuMemHostRegister, host_register, (void*, size_t, unsigned))                                                       \
  X(cuMemHostUnregister, host_unregister, (void*))                                                                     \
  X(cuPointerGetAttributes, pointer_get_attributes, (unsigned, int*, void**, DevicePointer))                           \
  X(cuModuleLoadData, module_load_data, (Module*, const void*))                                                        \
  X(cuModuleGetFunction, module_get_function, (Function*, Module, const char*))                                        \
  X(cuFuncLoad, function_load, (Function))                                                                             \
  X(cuLaunchKernel, launch_kernel,                                                                                     \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))          \
  X(cuMemAllocAsync, memory_alloc_async, (DevicePointer*, size_t, Stream))                                             \
  X(cuStreamCreateWithPriority, stream_create_with_priority, (Stream*, unsigned, int))                                 \
  X(cuMemcpyBatchAsync_12080, copy_batch_async_12080,                                                                  \
    (DevicePointer*, DevicePointer*, size_t*, size_t, CopyAttributes*, size_t*, size_t, size_t*, Stream))              \
  X(cuMemcpyBatchAsync_13000, copy_batch_async_13000,                                                                  \
    (DevicePointer*, DevicePointer*, size_t*, size_t, CopyAttributes*, size_t*, size_t, Stream))

namespace aiocuda::abi {

struct Driver {
#define AIOCUDA_MEMBER(driver_name, member, parameters) Result(*member) parameters = nullptr;
  AIOCUDA_ENTRY_POINTS(AIOCUDA_MEMBER)
#undef AIOCUDA_MEMBER
};

// Never destroyed and written once, before the first submission.
extern Driver driver;

inline bool has_batch() { return driver.copy_batch_async_13000 != nullptr || driver.copy_batch_async_12080 != nullptr; }

// Returns false for a name that is not in the table.
bool bind(const char* name, void* address);

}  // namespace aiocuda::abi
