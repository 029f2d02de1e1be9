// Every constant and struct of driver_abi.h against cuda.h. test_abi.py fails for one that is missing here.
#include <cuda.h>

#include "driver_abi.h"
#include "shapes.h"

namespace abi = aiocuda::abi;

#define SAME_VALUE(ours, theirs) static_assert(static_cast<long long>(abi::ours) == static_cast<long long>(theirs), #ours)

SAME_VALUE(kSuccess, CUDA_SUCCESS);
SAME_VALUE(kErrorInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME_VALUE(kErrorOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(kErrorNotReady, CUDA_ERROR_NOT_READY);
SAME_VALUE(kErrorStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME_VALUE(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
SAME_VALUE(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME_VALUE(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME_VALUE(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
SAME_VALUE(kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME_VALUE(kCaptureInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
SAME_VALUE(kAccessOrderStream, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME_VALUE(kAccessOrderDuringApiCall, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
SAME_VALUE(kAccessOrderAny, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
SAME_VALUE(kDeviceMultiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_VALUE(kDeviceIntegrated, CU_DEVICE_ATTRIBUTE_INTEGRATED);
SAME_VALUE(kDeviceManagedMemory, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY);
SAME_VALUE(kDeviceConcurrentManagedAccess, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
SAME_VALUE(kMemoryHost, CU_MEMORYTYPE_HOST);
SAME_VALUE(kMemoryDevice, CU_MEMORYTYPE_DEVICE);
SAME_VALUE(kPointerContext, CU_POINTER_ATTRIBUTE_CONTEXT);
SAME_VALUE(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME_VALUE(kPointerDevicePointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
SAME_VALUE(kPointerBufferId, CU_POINTER_ATTRIBUTE_BUFFER_ID);
SAME_VALUE(kPointerIsManaged, CU_POINTER_ATTRIBUTE_IS_MANAGED);
SAME_VALUE(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME_VALUE(kPointerRangeStart, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
SAME_VALUE(kPointerRangeSize, CU_POINTER_ATTRIBUTE_RANGE_SIZE);

#define SAME_TYPE(ours, theirs) static_assert(shapes::same<ours, theirs>(), #ours)

SAME_TYPE(abi::Result, CUresult);
SAME_TYPE(abi::Device, CUdevice);
SAME_TYPE(abi::Context, CUcontext);
SAME_TYPE(abi::Stream, CUstream);
SAME_TYPE(abi::Event, CUevent);
SAME_TYPE(abi::Module, CUmodule);
SAME_TYPE(abi::Function, CUfunction);
SAME_TYPE(abi::DevicePointer, CUdeviceptr);
SAME_TYPE(abi::HostFunction, CUhostFn);
SAME_TYPE(abi::CaptureMode, CUstreamCaptureMode);
SAME_TYPE(abi::CaptureStatus, CUstreamCaptureStatus);
SAME_TYPE(abi::AccessOrder, CUmemcpySrcAccessOrder);
SAME_TYPE(abi::DeviceAttribute, CUdevice_attribute);
SAME_TYPE(abi::MemoryType, CUmemorytype);
SAME_TYPE(abi::PointerAttribute, CUpointer_attribute);

#define SAME_FIELD(our_struct, ours, their_struct, theirs)                                                 \
  static_assert(offsetof(abi::our_struct, ours) == offsetof(their_struct, theirs), #our_struct "." #ours); \
  SAME_TYPE(decltype(abi::our_struct::ours), decltype(their_struct::theirs))

SAME_TYPE(abi::MemoryLocation, CUmemLocation);
SAME_FIELD(MemoryLocation, type, CUmemLocation, type);
SAME_FIELD(MemoryLocation, id, CUmemLocation, id);

SAME_TYPE(abi::CopyAttributes, CUmemcpyAttributes);
SAME_FIELD(CopyAttributes, source_access_order, CUmemcpyAttributes, srcAccessOrder);
SAME_FIELD(CopyAttributes, source_hint, CUmemcpyAttributes, srcLocHint);
SAME_FIELD(CopyAttributes, destination_hint, CUmemcpyAttributes, dstLocHint);
SAME_FIELD(CopyAttributes, flags, CUmemcpyAttributes, flags);

SAME_TYPE(abi::Copy3D, CUDA_MEMCPY3D);
SAME_FIELD(Copy3D, src_x, CUDA_MEMCPY3D, srcXInBytes);
SAME_FIELD(Copy3D, src_y, CUDA_MEMCPY3D, srcY);
SAME_FIELD(Copy3D, src_z, CUDA_MEMCPY3D, srcZ);
SAME_FIELD(Copy3D, src_lod, CUDA_MEMCPY3D, srcLOD);
SAME_FIELD(Copy3D, src_type, CUDA_MEMCPY3D, srcMemoryType);
SAME_FIELD(Copy3D, src_host, CUDA_MEMCPY3D, srcHost);
SAME_FIELD(Copy3D, src_device, CUDA_MEMCPY3D, srcDevice);
SAME_FIELD(Copy3D, src_array, CUDA_MEMCPY3D, srcArray);
SAME_FIELD(Copy3D, reserved0, CUDA_MEMCPY3D, reserved0);
SAME_FIELD(Copy3D, src_pitch, CUDA_MEMCPY3D, srcPitch);
SAME_FIELD(Copy3D, src_height, CUDA_MEMCPY3D, srcHeight);
SAME_FIELD(Copy3D, dst_x, CUDA_MEMCPY3D, dstXInBytes);
SAME_FIELD(Copy3D, dst_y, CUDA_MEMCPY3D, dstY);
SAME_FIELD(Copy3D, dst_z, CUDA_MEMCPY3D, dstZ);
SAME_FIELD(Copy3D, dst_lod, CUDA_MEMCPY3D, dstLOD);
SAME_FIELD(Copy3D, dst_type, CUDA_MEMCPY3D, dstMemoryType);
SAME_FIELD(Copy3D, dst_host, CUDA_MEMCPY3D, dstHost);
SAME_FIELD(Copy3D, dst_device, CUDA_MEMCPY3D, dstDevice);
SAME_FIELD(Copy3D, dst_array, CUDA_MEMCPY3D, dstArray);
SAME_FIELD(Copy3D, reserved1, CUDA_MEMCPY3D, reserved1);
SAME_FIELD(Copy3D, dst_pitch, CUDA_MEMCPY3D, dstPitch);
SAME_FIELD(Copy3D, dst_height, CUDA_MEMCPY3D, dstHeight);
SAME_FIELD(Copy3D, width, CUDA_MEMCPY3D, WidthInBytes);
SAME_FIELD(Copy3D, height, CUDA_MEMCPY3D, Height);
SAME_FIELD(Copy3D, depth, CUDA_MEMCPY3D, Depth);
