#pragma once

#include "abi.h"

namespace emu {

CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes);
CUresult cuMemcpyHtoD(CUdeviceptr destination, const void* source, std::size_t nbytes);
CUresult cuMemcpyDtoH(void* destination, CUdeviceptr source, std::size_t nbytes);
CUresult cuMemcpyDtoD(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes);
CUresult cuMemcpyPeer(CUdeviceptr destination, CUcontext, CUdeviceptr source, CUcontext, std::size_t nbytes);
CUresult cuMemcpy2D(const CUDA_MEMCPY2D* copy);
CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* copy);
CUresult cuMemcpy3D(const CUDA_MEMCPY3D* copy);

CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes, CUstream stream);
CUresult cuMemcpyHtoDAsync(CUdeviceptr destination, const void* source, std::size_t nbytes, CUstream stream);
CUresult cuMemcpyDtoHAsync(void* destination, CUdeviceptr source, std::size_t nbytes, CUstream stream);
CUresult cuMemcpyDtoDAsync(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes, CUstream stream);
CUresult cuMemcpyPeerAsync(CUdeviceptr destination, CUcontext, CUdeviceptr source, CUcontext, std::size_t nbytes,
                           CUstream stream);
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream);
CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D* copy, CUstream stream);
CUresult cuMemcpyBatchAsync_v1(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes, std::size_t count,
                               CUmemcpyAttributes* attributes, std::size_t* first_entries, std::size_t attribute_count,
                               std::size_t* failed_index, CUstream stream);
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes, std::size_t count,
                               CUmemcpyAttributes* attributes, std::size_t* first_entries, std::size_t attribute_count,
                               CUstream stream);

CUresult cuMemsetD8(CUdeviceptr destination, unsigned char value, std::size_t count);
CUresult cuMemsetD16(CUdeviceptr destination, unsigned short value, std::size_t count);
CUresult cuMemsetD32(CUdeviceptr destination, unsigned value, std::size_t count);
CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, std::size_t count, CUstream stream);
CUresult cuMemsetD16Async(CUdeviceptr destination, unsigned short value, std::size_t count, CUstream stream);
CUresult cuMemsetD32Async(CUdeviceptr destination, unsigned value, std::size_t count, CUstream stream);

struct Work;
CUresult copy_work(const CUDA_MEMCPY3D& copy, Work& work);
CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS& fill, Work& work);

}  // namespace emu
