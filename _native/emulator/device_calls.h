#pragma once

#include "abi.h"

namespace emu {

constexpr int greatest_priority = -5;

CUresult cuInit(unsigned flags);
CUresult cuDriverGetVersion(int* version);
CUresult cuGetErrorName(CUresult error, const char** text);
CUresult cuGetErrorString(CUresult error, const char** text);
CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDeviceGetCount(int* count);
CUresult cuDeviceGetName(char* name, int length, CUdevice device);
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device);
CUresult cuDeviceTotalMem(std::size_t* nbytes, CUdevice device);
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device);
CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device);
CUresult cuDeviceCanAccessPeer(int* possible, CUdevice device, CUdevice peer);
CUresult cuDeviceGetP2PAttribute(int* value, int attribute, CUdevice source, CUdevice destination);
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags);
CUresult cuCtxDisablePeerAccess(CUcontext peer);
CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice device);
CUresult cuDevicePrimaryCtxRelease(CUdevice device);
CUresult cuDevicePrimaryCtxReset(CUdevice device);
CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags);
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active);
CUresult cuCtxCreate_v2(CUcontext* handle, unsigned flags, CUdevice device);
CUresult cuCtxCreate_v3(CUcontext* handle, void* parameters, int count, unsigned flags, CUdevice device);
CUresult cuCtxCreate_v4(CUcontext* handle, void* parameters, unsigned flags, CUdevice device);
CUresult cuCtxDestroy(CUcontext handle);
CUresult cuCtxPushCurrent(CUcontext handle);
CUresult cuCtxPopCurrent(CUcontext* handle);
CUresult cuCtxSetCurrent(CUcontext handle);
CUresult cuCtxGetCurrent(CUcontext* handle);
CUresult cuCtxGetDevice(CUdevice* device);
CUresult cuCtxGetDevice_v2(CUdevice* device, CUcontext handle);
CUresult cuCtxGetFlags(unsigned* flags);
CUresult cuCtxGetId(CUcontext handle, unsigned long long* id);
CUresult cuCtxGetApiVersion(CUcontext handle, unsigned* version);
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest);
CUresult cuCtxSynchronize();
CUresult cuCtxSynchronize_v2(CUcontext handle);

}  // namespace emu
