#pragma once

#include "abi.h"

namespace emu {

bool kernel_is_running(int device);

CUresult cuMemGetInfo(std::size_t* available, std::size_t* total);
CUresult cuMemAlloc(CUdeviceptr* address, std::size_t nbytes);
CUresult cuMemAllocPitch(CUdeviceptr* address, std::size_t* pitch, std::size_t width, std::size_t height, unsigned);
CUresult cuMemFree(CUdeviceptr address);
CUresult cuMemAllocManaged(CUdeviceptr* address, std::size_t nbytes, unsigned flags);
CUresult cuMemAllocHost(void** memory, std::size_t nbytes);
CUresult cuMemHostAlloc(void** memory, std::size_t nbytes, unsigned flags);
CUresult cuMemFreeHost(void* memory);
CUresult cuMemHostRegister(void* memory, std::size_t nbytes, unsigned flags);
CUresult cuMemHostUnregister(void* memory);
CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned flags);
CUresult cuMemHostGetFlags(unsigned* flags, void* memory);
CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* size, CUdeviceptr address);
CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address);
CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** data, CUdeviceptr address);
CUresult cuPointerSetAttribute(const void* value, int attribute, CUdeviceptr address);

CUresult cuMemAllocAsync(CUdeviceptr* address, std::size_t nbytes, CUstream stream);
CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, std::size_t nbytes, CUmemoryPool pool, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream);
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device);
CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device);
CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);
CUresult cuMemGetDefaultMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType type);
CUresult cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType type);
CUresult cuMemPoolCreate(CUmemoryPool* pool, const CUmemPoolProps* props);
CUresult cuMemPoolDestroy(CUmemoryPool pool);
CUresult cuMemPoolTrimTo(CUmemoryPool pool, std::size_t nbytes);
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void* value);
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void* value);
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* access, std::size_t count);
CUresult cuMemPoolGetAccess(int* flags, CUmemoryPool pool, CUmemLocation* location);

}  // namespace emu
