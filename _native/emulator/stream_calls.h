#pragma once

#include "abi.h"

namespace emu {

CUresult cuStreamCreate(CUstream* stream, unsigned flags);
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority);
CUresult cuStreamDestroy(CUstream stream);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamSynchronize(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
CUresult cuStreamGetCtx(CUstream stream, CUcontext* context);
CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext* context, CUgreenCtx* green_context);
CUresult cuStreamGetFlags(CUstream stream, unsigned* flags);
CUresult cuStreamGetPriority(CUstream stream, int* priority);
CUresult cuStreamGetId(CUstream stream, unsigned long long* id);
CUresult cuStreamGetDevice(CUstream stream, CUdevice* device);
CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, std::uint32_t value, unsigned flags);
CUresult cuStreamWriteValue64(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags);
CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, std::uint32_t value, unsigned flags);
CUresult cuStreamWaitValue64(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags);
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument);
CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void* argument, unsigned mode);

CUresult cuEventCreate(CUevent* event, unsigned flags);
CUresult cuEventDestroy(CUevent event);
CUresult cuEventRecord(CUevent event, CUstream stream);
CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags);
CUresult cuEventQuery(CUevent event);
CUresult cuEventSynchronize(CUevent event);
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end);

struct Event;
struct Work;
Work record_work(Event& event);
Work wait_work(const Event& event);
Work host_function_work(CUhostFn function, void* argument);

}  // namespace emu
