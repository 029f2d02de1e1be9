#include "memory_calls.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "capture.h"
#include "memory.h"
#include "scheduler.h"

namespace emu {

namespace {

// Everybody else's calls wait until it is gone.
class PinningLock {
 public:
  PinningLock(Call& call, std::size_t nbytes) : call_(call) {
    Driver& d = driver();
    d.pinning_thread = thread_id();
    if (d.controls.hold_pinning) call.wait("pinning held", [&d] { return !d.controls.hold_pinning; });
    const double ms = d.controls.pinning_ms_per_gib * static_cast<double>(nbytes) / (1 << 30);
    if (ms > 0) {
      call.lock.unlock();
      std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
      call.lock.lock();
    }
  }
  ~PinningLock() {
    driver().pinning_thread = 0;
    driver().progress.notify_all();
  }
  PinningLock(const PinningLock&) = delete;
  PinningLock& operator=(const PinningLock&) = delete;

 private:
  Call& call_;
};

AllocationPtr based_at(std::uintptr_t address, std::initializer_list<Allocation::Type> types) {
  auto allocation = allocation_at(address);
  if (!allocation || allocation->base != address || allocation->freed ||
      std::find(types.begin(), types.end(), allocation->type) == types.end())
    return nullptr;
  return allocation;
}

template <class Value>
void put(void* data, Value value) {
  std::memcpy(data, &value, sizeof value);
}

CUresult pointer_attribute(void* data, int attribute, CUdeviceptr address, const AllocationPtr& allocation) {
  const bool host = allocation && (allocation->type == Allocation::Type::host ||
                                   allocation->type == Allocation::Type::registration);
  const bool managed = allocation && allocation->type == Allocation::Type::managed;
  switch (attribute) {
    case 8: put<unsigned char>(data, managed); return CUDA_SUCCESS;  // also of memory that the driver has not seen
    case 13: put<unsigned char>(data, allocation != nullptr); return CUDA_SUCCESS;
    case 17: put<void*>(data, allocation && allocation->pool ? allocation->pool->handle : nullptr); return CUDA_SUCCESS;
    default: break;
  }
  if (!allocation) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case 1: put(data, allocation->context ? allocation->context->handle : nullptr); return CUDA_SUCCESS;
    case 2: put(data, host ? memory_host : memory_device); return CUDA_SUCCESS;
    case 3: put(data, address); return CUDA_SUCCESS;
    case 4:
      if (!host && !managed) return CUDA_ERROR_INVALID_VALUE;
      put(data, address);
      return CUDA_SUCCESS;
    case 6: put<int>(data, 0); return CUDA_SUCCESS;
    case 7: case 20: put(data, allocation->id); return CUDA_SUCCESS;
    case 9: put(data, allocation->device); return CUDA_SUCCESS;
    case 10: put<int>(data, 0); return CUDA_SUCCESS;
    case 11: case 19: put(data, allocation->base); return CUDA_SUCCESS;
    case 12: case 18: put(data, allocation->size); return CUDA_SUCCESS;
    case 14: put<std::uint64_t>(data, 0); return CUDA_SUCCESS;
    case 15: put<unsigned char>(data, 0); return CUDA_SUCCESS;
    case 16: put<int>(data, access_read_write); return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

bool is_host(CUmemLocationType type) {
  return type == location_host || type == location_host_numa || type == location_host_numa_current;
}

PoolPtr make_pool(const CUmemPoolProps& props) {
  auto pool = std::make_shared<Pool>();
  pool->props = props;
  if (props.location.type == location_device) pool->accessible_from.insert(props.location.id);
  driver().pools.add(pool);
  return pool;
}

PoolPtr default_pool(CUmemLocation location) {
  Driver& d = driver();
  PoolPtr& pool =
      is_host(location.type) ? d.host_pool : d.devices[static_cast<std::size_t>(location.id)].default_pool;
  if (!pool) {
    CUmemPoolProps props{};
    props.type = allocation_pinned;
    props.location = location;
    pool = make_pool(props);
  }
  return pool;
}

bool valid_location(const CUmemLocation* location) {
  if (!location) return false;
  if (location->type == location_device) return location->id >= 0 && location->id < driver().configuration.devices;
  return is_host(location->type);
}

CUresult allocate_from_pool(Call& call, CUdeviceptr* address, std::size_t nbytes, const PoolPtr& pool,
                            const StreamPtr& stream) {
  if (!address) return CUDA_ERROR_INVALID_VALUE;
  if (stream->capture) return CUDA_ERROR_NOT_SUPPORTED;
  if (pool->props.max_size && pool->used + nbytes > pool->props.max_size) return CUDA_ERROR_OUT_OF_MEMORY;
  AllocationPtr allocation;
  const auto result = is_host(pool->props.location.type)
                          ? allocate_host(stream->context, nbytes, 0, allocation)
                          : allocate_device(stream->context, pool->props.location.id, nbytes, allocation);
  if (result != CUDA_SUCCESS) return result;
  allocation->pool = pool;
  pool->used += nbytes;
  pool->used_high = std::max(pool->used_high, pool->used);
  *address = allocation->base;
  return submit(call, stream, Work{Kind::allocate}, node_empty);
}

}  // namespace

bool kernel_is_running(int device) {
  const auto& timed = driver().timed;
  return std::any_of(timed.begin(), timed.end(), [&](const auto& entry) {
    const Stream& stream = *entry.second;
    return stream.context->device == device && stream.queue.front().work->kind == Kind::kernel;
  });
}

CUresult cuMemGetInfo(std::size_t* available, std::size_t* total) {
  return driver_call("cuMemGetInfo", Needs::context, [&](Call& call) {
    if (available) *available = free_device_memory(call.context->device);
    if (total) *total = driver().configuration.device_nbytes;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAlloc(CUdeviceptr* address, std::size_t nbytes) {
  return driver_call("cuMemAlloc", Needs::context, [&](Call& call) {
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
    AllocationPtr allocation;
    const auto result = allocate_device(call.context, call.context->device, nbytes, allocation);
    if (result == CUDA_SUCCESS) *address = allocation->base;
    return result;
  });
}

CUresult cuMemAllocPitch(CUdeviceptr* address, std::size_t* pitch, std::size_t width, std::size_t height, unsigned) {
  *pitch = (width + 511) / 512 * 512;
  return cuMemAlloc(address, *pitch * height);
}

CUresult cuMemFree(CUdeviceptr address) {
  return driver_call("cuMemFree", Needs::healthy, [&](Call& call) {
    if (address == 0) return CUDA_SUCCESS;
    if (const auto refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
    const auto allocation = based_at(address, {Allocation::Type::device, Allocation::Type::managed});
    if (!allocation) return CUDA_ERROR_INVALID_VALUE;
    call.wait_unless("running kernel", [&] { return !kernel_is_running(allocation->device); });
    wait_until_unused(call, allocation);
    release(allocation);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAllocManaged(CUdeviceptr* address, std::size_t nbytes, unsigned) {
  return driver_call("cuMemAllocManaged", Needs::context, [&](Call& call) {
    if (!address) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
    AllocationPtr allocation;
    const auto result = allocate_managed(call.context, nbytes, allocation);
    if (result == CUDA_SUCCESS) *address = allocation->base;
    return result;
  });
}

namespace {

CUresult host_alloc(const char* name, void** memory, std::size_t nbytes, unsigned flags) {
  return driver_call(name, Needs::context, [&](Call& call) {
    if (!memory) return CUDA_ERROR_INVALID_VALUE;
    if (const auto refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
    const PinningLock pinning(call, nbytes);
    AllocationPtr allocation;
    const auto result = allocate_host(call.context, nbytes, flags, allocation);
    if (result == CUDA_SUCCESS) *memory = reinterpret_cast<void*>(allocation->base);
    return result;
  });
}

}  // namespace

CUresult cuMemAllocHost(void** memory, std::size_t nbytes) { return host_alloc("cuMemAllocHost", memory, nbytes, 0); }

CUresult cuMemHostAlloc(void** memory, std::size_t nbytes, unsigned flags) {
  return host_alloc("cuMemHostAlloc", memory, nbytes, flags);
}

CUresult cuMemFreeHost(void* memory) {
  return driver_call("cuMemFreeHost", Needs::healthy, [&](Call& call) {
    if (!memory) return CUDA_SUCCESS;
    if (const auto refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
    const auto allocation = based_at(reinterpret_cast<std::uintptr_t>(memory), {Allocation::Type::host});
    if (!allocation) return CUDA_ERROR_INVALID_VALUE;
    const PinningLock pinning(call, allocation->size);
    call.wait_unless("running kernel", [&] { return !kernel_is_running(allocation->device); });
    wait_until_unused(call, allocation);
    release(allocation);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostRegister(void* memory, std::size_t nbytes, unsigned flags) {
  return driver_call("cuMemHostRegister", Needs::context, [&](Call& call) {
    if (const auto refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
    const PinningLock pinning(call, nbytes);
    return register_host(call.context, reinterpret_cast<std::uintptr_t>(memory), nbytes, flags);
  });
}

CUresult cuMemHostUnregister(void* memory) {
  return driver_call("cuMemHostUnregister", Needs::healthy, [&](Call& call) {
    if (const auto refused = refuse_unsafe(); refused != CUDA_SUCCESS) return refused;
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    const auto allocation = based_at(address, {Allocation::Type::registration});
    if (!allocation) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    const PinningLock pinning(call, allocation->size);
    call.wait_unless("running kernel", [&] { return !kernel_is_running(allocation->device); });
    wait_until_unused(call, allocation);
    release(allocation);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned) {
  return driver_call("cuMemHostGetDevicePointer", Needs::healthy, [&](Call&) {
    const auto allocation = allocation_at(reinterpret_cast<std::uintptr_t>(memory));
    if (!address || !allocation || allocation->type == Allocation::Type::device) return CUDA_ERROR_INVALID_VALUE;
    *address = reinterpret_cast<std::uintptr_t>(memory);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostGetFlags(unsigned* flags, void* memory) {
  return driver_call("cuMemHostGetFlags", Needs::healthy, [&](Call&) {
    const auto allocation = allocation_at(reinterpret_cast<std::uintptr_t>(memory));
    if (!flags || !allocation || allocation->type != Allocation::Type::host) return CUDA_ERROR_INVALID_VALUE;
    constexpr unsigned always_mapped = 2;
    *flags = allocation->flags | always_mapped;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* size, CUdeviceptr address) {
  return driver_call("cuMemGetAddressRange", Needs::healthy, [&](Call&) {
    const auto allocation = allocation_at(address);
    if (!allocation) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = allocation->base;
    if (size) *size = allocation->size;
    return CUDA_SUCCESS;
  });
}

CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr address) {
  return driver_call("cuPointerGetAttribute", Needs::healthy, [&](Call&) {
    if (!data) return CUDA_ERROR_INVALID_VALUE;
    return pointer_attribute(data, attribute, address, allocation_at(address));
  });
}

// Unlike its singular it answers for any address: with zeros where there is nothing to say.
CUresult cuPointerGetAttributes(unsigned count, int* attributes, void** data, CUdeviceptr address) {
  return driver_call("cuPointerGetAttributes", Needs::healthy, [&](Call&) {
    if (!attributes || !data) return CUDA_ERROR_INVALID_VALUE;
    const auto allocation = allocation_at(address);
    for (unsigned index = 0; index < count; ++index) {
      const int attribute = attributes[index];
      if (pointer_attribute(data[index], attribute, address, allocation) == CUDA_SUCCESS) continue;
      constexpr int memory_type = 2, device_ordinal = 9, sync_memops = 6;
      if (attribute == device_ordinal) {
        put<int>(data[index], -2);
      } else if (attribute == memory_type || attribute == sync_memops) {
        put<int>(data[index], 0);
      } else {
        put<std::uint64_t>(data[index], 0);
      }
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuPointerSetAttribute(const void* value, int attribute, CUdeviceptr address) {
  return driver_call("cuPointerSetAttribute", Needs::healthy, [&](Call&) {
    constexpr int sync_memops = 6;
    if (!value || attribute != sync_memops || !allocation_at(address)) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAllocAsync(CUdeviceptr* address, std::size_t nbytes, CUstream handle) {
  return driver_call("cuMemAllocAsync", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    const auto& current = driver().device_of(*stream->context).current_pool;
    const auto pool = current ? current : default_pool({location_device, stream->context->device});
    return allocate_from_pool(call, address, nbytes, pool, stream);
  });
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, std::size_t nbytes, CUmemoryPool pool_handle, CUstream handle) {
  return driver_call("cuMemAllocFromPoolAsync", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    const auto pool = driver().pools.find(pool_handle);
    if (!pool) return CUDA_ERROR_INVALID_VALUE;
    return allocate_from_pool(call, address, nbytes, pool, stream);
  });
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
  return driver_call("cuMemFreeAsync", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (stream->capture) return CUDA_ERROR_NOT_SUPPORTED;
    const auto allocation = based_at(address, {Allocation::Type::device, Allocation::Type::host});
    if (!allocation) return CUDA_ERROR_INVALID_VALUE;
    Work work{Kind::free};
    work.ready = [allocation] { return allocation->in_use == 0; };
    work.finish = [allocation] {
      if (!allocation->freed) release(allocation);
    };
    return submit(call, stream, std::move(work), node_empty);
  });
}

CUresult cuMemGetDefaultMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType) {
  return driver_call("cuMemGetDefaultMemPool", Needs::initialised, [&](Call&) {
    if (!pool || !valid_location(location)) return CUDA_ERROR_INVALID_VALUE;
    *pool = default_pool(*location)->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetMemPool(CUmemoryPool* pool, CUmemLocation* location, CUmemAllocationType type) {
  if (location && location->type == location_device) return cuDeviceGetMemPool(pool, location->id);
  return cuMemGetDefaultMemPool(pool, location, type);
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
  CUmemLocation location{location_device, device};
  return cuMemGetDefaultMemPool(pool, &location, allocation_pinned);
}

CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice device) {
  return driver_call("cuDeviceGetMemPool", Needs::initialised, [&](Call&) {
    const CUmemLocation location{location_device, device};
    if (!pool || !valid_location(&location)) return CUDA_ERROR_INVALID_VALUE;
    const auto& current = driver().devices[static_cast<std::size_t>(device)].current_pool;
    *pool = (current ? current : default_pool(location))->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle) {
  return driver_call("cuDeviceSetMemPool", Needs::initialised, [&](Call&) {
    const CUmemLocation location{location_device, device};
    const auto pool = driver().pools.find(handle);
    if (!pool || !valid_location(&location)) return CUDA_ERROR_INVALID_VALUE;
    driver().devices[static_cast<std::size_t>(device)].current_pool = pool;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolCreate(CUmemoryPool* handle, const CUmemPoolProps* props) {
  return driver_call("cuMemPoolCreate", Needs::initialised, [&](Call&) {
    if (!handle || !props || !valid_location(&props->location)) return CUDA_ERROR_INVALID_VALUE;
    if (props->handle_types != 0 || props->type != allocation_pinned) return CUDA_ERROR_NOT_SUPPORTED;
    *handle = make_pool(*props)->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolDestroy(CUmemoryPool handle) {
  return driver_call("cuMemPoolDestroy", Needs::initialised, [&](Call&) {
    Driver& d = driver();
    const auto pool = d.pools.find(handle);
    if (!pool || pool == d.host_pool) return CUDA_ERROR_INVALID_VALUE;
    for (auto& device : d.devices) {
      if (device.default_pool == pool) return CUDA_ERROR_INVALID_VALUE;
      if (device.current_pool == pool) device.current_pool = nullptr;
    }
    d.pools.remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, std::size_t) {
  return driver_call("cuMemPoolTrimTo", Needs::initialised,
                     [&](Call&) { return driver().pools.find(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; });
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, int attribute, void* value) {
  return driver_call("cuMemPoolSetAttribute", Needs::initialised, [&](Call&) {
    const auto pool = driver().pools.find(handle);
    if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
    if (attribute >= 1 && attribute <= 3) {
      std::memcpy(&pool->reuse[static_cast<std::size_t>(attribute - 1)], value, sizeof(int));
    } else if (attribute == 4) {
      std::memcpy(&pool->release_threshold, value, sizeof pool->release_threshold);
    } else if (attribute == 6 || attribute == 8) {
      pool->used_high = pool->used;
    } else {
      return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, int attribute, void* value) {
  return driver_call("cuMemPoolGetAttribute", Needs::initialised, [&](Call&) {
    const auto pool = driver().pools.find(handle);
    if (!pool || !value) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
      case 1: case 2: case 3: put(value, pool->reuse[static_cast<std::size_t>(attribute - 1)]); return CUDA_SUCCESS;
      case 4: put(value, pool->release_threshold); return CUDA_SUCCESS;
      case 5: case 7: put(value, pool->used); return CUDA_SUCCESS;
      case 6: case 8: put(value, pool->used_high); return CUDA_SUCCESS;
      case 9: put(value, pool->props.type); return CUDA_SUCCESS;
      case 10: put<int>(value, 0); return CUDA_SUCCESS;
      case 11: put(value, pool->props.location.id); return CUDA_SUCCESS;
      case 12: put(value, pool->props.location.type); return CUDA_SUCCESS;
      case 13: put<std::uint64_t>(value, pool->props.max_size); return CUDA_SUCCESS;
      case 14: put<int>(value, 0); return CUDA_SUCCESS;
      default: return CUDA_ERROR_INVALID_VALUE;
    }
  });
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc* access, std::size_t count) {
  return driver_call("cuMemPoolSetAccess", Needs::initialised, [&](Call&) {
    const auto pool = driver().pools.find(handle);
    if (!pool || (count && !access)) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t index = 0; index < count; ++index) {
      if (access[index].flags == access_none) {
        pool->accessible_from.erase(access[index].location.id);
      } else {
        pool->accessible_from.insert(access[index].location.id);
      }
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolGetAccess(int* flags, CUmemoryPool handle, CUmemLocation* location) {
  return driver_call("cuMemPoolGetAccess", Needs::initialised, [&](Call&) {
    const auto pool = driver().pools.find(handle);
    if (!pool || !flags || !valid_location(location)) return CUDA_ERROR_INVALID_VALUE;
    const bool accessible = pool->accessible_from.count(location->id) || is_host(pool->props.location.type);
    *flags = accessible ? access_read_write : access_none;
    return CUDA_SUCCESS;
  });
}

}  // namespace emu
