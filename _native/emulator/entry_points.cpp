// What cuGetProcAddress finds. Everything that is not in the table resolves to null, and fails only when it is called.
#include <cstring>

#include "call.h"
#include "capture.h"
#include "controls.h"
#include "copies.h"
#include "device_calls.h"
#include "graph_calls.h"
#include "kernel_calls.h"
#include "memory_calls.h"
#include "stream_calls.h"

namespace emu {

namespace {

CUresult cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t flags,
                             CUdriverProcAddressQueryResult* status);

struct EntryPoint {
  const char* name;
  int since;  // the version that introduced this signature
  void* function;
  void* per_thread = nullptr;
};

template <class Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

// PLAIN takes no stream; STREAM has a variant for which handle 0 is the per-thread default stream.
#define PLAIN_AS(name, since, function) EntryPoint{name, since, address(&function)}
#define STREAM_AS(name, since, function) \
  EntryPoint{name, since, address(&function), address(&PerThread<&function>::call)}
#define PLAIN(function, since) PLAIN_AS(#function, since, function)
#define STREAM(function, since) STREAM_AS(#function, since, function)

// Several signatures of one name are in ascending order.
const EntryPoint entry_points[] = {
    PLAIN(cuInit, 2000),
    PLAIN(cuDriverGetVersion, 2020),
    PLAIN(cuGetErrorName, 6000),
    PLAIN(cuGetErrorString, 6000),
    PLAIN_AS("cuGetProcAddress", 12000, cuGetProcAddress_v2),

    PLAIN(cuDeviceGet, 2000),
    PLAIN(cuDeviceGetCount, 2000),
    PLAIN(cuDeviceGetName, 2000),
    PLAIN(cuDeviceGetUuid, 9020),
    PLAIN(cuDeviceTotalMem, 3020),
    PLAIN(cuDeviceGetAttribute, 2000),
    PLAIN(cuDeviceGetPCIBusId, 4010),
    PLAIN(cuDeviceCanAccessPeer, 4000),
    PLAIN(cuDeviceGetP2PAttribute, 8000),
    PLAIN(cuDeviceGetDefaultMemPool, 11020),
    PLAIN(cuDeviceGetMemPool, 11020),
    PLAIN(cuDeviceSetMemPool, 11020),

    PLAIN(cuDevicePrimaryCtxRetain, 7000),
    PLAIN(cuDevicePrimaryCtxRelease, 7000),
    PLAIN(cuDevicePrimaryCtxReset, 7000),
    PLAIN(cuDevicePrimaryCtxSetFlags, 7000),
    PLAIN(cuDevicePrimaryCtxGetState, 7000),
    PLAIN_AS("cuCtxCreate", 3020, cuCtxCreate_v2),
    PLAIN_AS("cuCtxCreate", 11040, cuCtxCreate_v3),
    PLAIN_AS("cuCtxCreate", 12050, cuCtxCreate_v4),
    PLAIN(cuCtxDestroy, 4000),
    PLAIN(cuCtxPushCurrent, 4000),
    PLAIN(cuCtxPopCurrent, 4000),
    PLAIN(cuCtxSetCurrent, 4000),
    PLAIN(cuCtxGetCurrent, 4000),
    PLAIN(cuCtxGetDevice, 2000),
    PLAIN_AS("cuCtxGetDevice", 13000, cuCtxGetDevice_v2),
    PLAIN(cuCtxGetFlags, 7000),
    PLAIN(cuCtxGetId, 12000),
    PLAIN(cuCtxGetApiVersion, 3020),
    PLAIN(cuCtxGetStreamPriorityRange, 5050),
    PLAIN(cuCtxSynchronize, 2000),
    PLAIN_AS("cuCtxSynchronize", 13000, cuCtxSynchronize_v2),
    PLAIN(cuCtxEnablePeerAccess, 4000),
    PLAIN(cuCtxDisablePeerAccess, 4000),

    PLAIN(cuMemGetInfo, 3020),
    PLAIN(cuMemAlloc, 3020),
    PLAIN(cuMemAllocPitch, 3020),
    PLAIN(cuMemFree, 3020),
    PLAIN(cuMemAllocManaged, 6000),
    PLAIN(cuMemAllocHost, 3020),
    PLAIN(cuMemHostAlloc, 2020),
    PLAIN(cuMemFreeHost, 2000),
    PLAIN(cuMemHostRegister, 4000),
    PLAIN(cuMemHostUnregister, 4000),
    PLAIN(cuMemHostGetDevicePointer, 3020),
    PLAIN(cuMemHostGetFlags, 2030),
    PLAIN(cuMemGetAddressRange, 3020),
    PLAIN(cuPointerGetAttribute, 4000),
    PLAIN(cuPointerGetAttributes, 7000),
    PLAIN(cuPointerSetAttribute, 6000),
    STREAM(cuMemAllocAsync, 11020),
    STREAM(cuMemAllocFromPoolAsync, 11020),
    STREAM(cuMemFreeAsync, 11020),
    PLAIN(cuMemGetDefaultMemPool, 13000),
    PLAIN(cuMemGetMemPool, 13000),
    PLAIN(cuMemPoolCreate, 11020),
    PLAIN(cuMemPoolDestroy, 11020),
    PLAIN(cuMemPoolTrimTo, 11020),
    PLAIN(cuMemPoolSetAttribute, 11020),
    PLAIN(cuMemPoolGetAttribute, 11020),
    PLAIN(cuMemPoolSetAccess, 11020),
    PLAIN(cuMemPoolGetAccess, 11020),

    STREAM(cuMemcpy, 4000),
    STREAM(cuMemcpyHtoD, 3020),
    STREAM(cuMemcpyDtoH, 3020),
    STREAM(cuMemcpyDtoD, 3020),
    STREAM(cuMemcpyPeer, 4000),
    STREAM(cuMemcpy2D, 3020),
    STREAM(cuMemcpy2DUnaligned, 3020),
    STREAM(cuMemcpy3D, 3020),
    STREAM(cuMemcpyAsync, 4000),
    STREAM(cuMemcpyHtoDAsync, 3020),
    STREAM(cuMemcpyDtoHAsync, 3020),
    STREAM(cuMemcpyDtoDAsync, 3020),
    STREAM(cuMemcpyPeerAsync, 4000),
    STREAM(cuMemcpy2DAsync, 3020),
    STREAM(cuMemcpy3DAsync, 3020),
    STREAM_AS("cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync_v1),
    STREAM_AS("cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2),
    STREAM(cuMemsetD8, 3020),
    STREAM(cuMemsetD16, 3020),
    STREAM(cuMemsetD32, 3020),
    STREAM(cuMemsetD8Async, 3020),
    STREAM(cuMemsetD16Async, 3020),
    STREAM(cuMemsetD32Async, 3020),

    PLAIN(cuStreamCreate, 2000),
    PLAIN(cuStreamCreateWithPriority, 5050),
    PLAIN(cuStreamDestroy, 4000),
    STREAM(cuStreamQuery, 2000),
    STREAM(cuStreamSynchronize, 2000),
    STREAM(cuStreamWaitEvent, 3020),
    STREAM(cuStreamGetCtx, 9020),
    STREAM_AS("cuStreamGetCtx", 12050, cuStreamGetCtx_v2),
    STREAM(cuStreamGetFlags, 5050),
    STREAM(cuStreamGetPriority, 5050),
    STREAM(cuStreamGetId, 12000),
    STREAM(cuStreamGetDevice, 12080),
    STREAM(cuStreamWriteValue32, 8000),
    STREAM(cuStreamWriteValue64, 9000),
    STREAM(cuStreamWaitValue32, 8000),
    STREAM(cuStreamWaitValue64, 9000),
    STREAM(cuLaunchHostFunc, 10000),
    STREAM_AS("cuLaunchHostFunc", 13020, cuLaunchHostFunc_v2),

    PLAIN(cuModuleLoadData, 2000),
    PLAIN(cuModuleGetFunction, 2000),
    PLAIN(cuModuleUnload, 2000),
    STREAM(cuLaunchKernel, 4000),

    PLAIN(cuThreadExchangeStreamCaptureMode, 10010),
    STREAM(cuStreamBeginCapture, 10010),
    STREAM(cuStreamEndCapture, 10000),
    STREAM(cuStreamIsCapturing, 10000),
    STREAM_AS("cuStreamGetCaptureInfo", 10010, cuStreamGetCaptureInfo_v1),
    STREAM_AS("cuStreamGetCaptureInfo", 11030, cuStreamGetCaptureInfo_v2),
    STREAM_AS("cuStreamGetCaptureInfo", 12030, cuStreamGetCaptureInfo_v3),
    STREAM(cuStreamUpdateCaptureDependencies, 12030),

    PLAIN(cuEventCreate, 2000),
    PLAIN(cuEventDestroy, 4000),
    STREAM(cuEventRecord, 2000),
    STREAM(cuEventRecordWithFlags, 11010),
    PLAIN(cuEventQuery, 2000),
    PLAIN(cuEventSynchronize, 2000),
    PLAIN(cuEventElapsedTime, 2000),

    PLAIN(cuGraphCreate, 10000),
    PLAIN(cuGraphDestroy, 10000),
    PLAIN(cuGraphGetNodes, 10000),
    PLAIN(cuGraphGetRootNodes, 10000),
    PLAIN(cuGraphGetEdges, 12030),
    PLAIN(cuGraphNodeGetType, 10000),
    PLAIN(cuGraphNodeGetDependencies, 12030),
    PLAIN(cuGraphHostNodeGetParams, 10000),
    PLAIN(cuGraphAddEmptyNode, 10000),
    PLAIN(cuGraphAddHostNode, 10000),
    PLAIN(cuGraphAddMemcpyNode, 10000),
    PLAIN(cuGraphAddMemsetNode, 10000),
    PLAIN(cuGraphAddEventRecordNode, 11010),
    PLAIN(cuGraphAddEventWaitNode, 11010),
    PLAIN_AS("cuGraphInstantiate", 12000, cuGraphInstantiateWithFlags),
    PLAIN(cuGraphInstantiateWithFlags, 11040),
    STREAM(cuGraphInstantiateWithParams, 12000),
    PLAIN(cuGraphExecGetFlags, 12000),
    STREAM(cuGraphUpload, 11010),
    STREAM(cuGraphLaunch, 10000),
    PLAIN(cuGraphExecDestroy, 10000),
    PLAIN(cuUserObjectCreate, 11030),
    PLAIN(cuUserObjectRetain, 11030),
    PLAIN(cuUserObjectRelease, 11030),
    PLAIN(cuGraphRetainUserObject, 11030),
    PLAIN(cuGraphReleaseUserObject, 11030),
};

CUresult cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t flags,
                             CUdriverProcAddressQueryResult* status) {
  if (!name || !function) return CUDA_ERROR_INVALID_VALUE;
  *function = nullptr;
  if (status) *status = symbol_not_found;
  if (version > driver().configuration.driver_version) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& entry : entry_points) {
    if (std::strcmp(entry.name, name) != 0) continue;
    if (entry.since > version) {
      if (!*function && status) *status = symbol_version_insufficient;
      continue;
    }
    const bool per_thread = (flags & proc_address_per_thread_stream) && entry.per_thread;
    *function = per_thread ? entry.per_thread : entry.function;
    if (status) *status = symbol_found;
  }
  return CUDA_SUCCESS;
}

}  // namespace

std::vector<const char*> entry_point_names() {
  std::vector<const char*> names;
  for (const auto& entry : entry_points) names.push_back(entry.name);
  return names;
}

}  // namespace emu

EMU_EXPORT emu::CUresult cuGetProcAddress_v2(const char* name, void** function, int version, std::uint64_t flags,
                                             emu::CUdriverProcAddressQueryResult* status) {
  return emu::cuGetProcAddress_v2(name, function, version, flags, status);
}
