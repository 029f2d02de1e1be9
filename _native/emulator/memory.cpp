#include "memory.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include "bytes.h"
#include "scheduler.h"

namespace emu {

namespace {

constexpr std::size_t page = 4096;
// Bigger blocks are not filled with poison and not kept: an untouched allocation must cost nothing.
constexpr std::size_t poison_limit = std::size_t{1} << 20;

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

std::size_t window_size() {
  const auto& configuration = driver().configuration;
  return configuration.device_nbytes * static_cast<std::size_t>(configuration.devices);
}

// Big allocations have pages of their own, so that those can stay untouched.
std::size_t device_size_of(std::size_t nbytes) {
  constexpr std::size_t small = 512;
  return round_up(nbytes, nbytes > poison_limit ? page : small);
}

bool overlaps(std::uintptr_t address, std::size_t nbytes) {
  const auto& allocations = driver().allocations;
  const auto next = allocations.lower_bound(address);
  if (next != allocations.end() && next->first < address + nbytes) return true;
  return allocation_at(address) != nullptr;
}

AllocationPtr remember(Allocation allocation) {
  allocation.id = driver().next_id++;
  auto shared = std::make_shared<Allocation>(std::move(allocation));
  driver().allocations[shared->base] = shared;
  return shared;
}

void* map_host(std::size_t nbytes) {
  auto& spare = driver().spare_host_memory;
  if (const auto kept = spare.find(nbytes); kept != spare.end()) {
    void* memory = kept->second;
    spare.erase(kept);
    return memory;
  }
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  if (nbytes <= poison_limit) std::memset(memory, poison_byte, nbytes);
  return memory;
}

void unmap_host(void* memory, std::size_t nbytes) {
  if (nbytes > poison_limit) {
    munmap(memory, nbytes);
    return;
  }
  std::memset(memory, poison_byte, nbytes);
  driver().spare_host_memory.emplace(nbytes, memory);
}

void give_back_range(Device& device, std::uintptr_t base, std::size_t size) {
  auto& ranges = device.free_ranges;
  auto next = ranges.lower_bound(base);
  if (next != ranges.end() && base + size == next->first) {
    size += next->second;
    next = ranges.erase(next);
  }
  if (next != ranges.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == base) {
      previous->second += size;
      return;
    }
  }
  ranges[base] = size;
}

bool mapped(std::uintptr_t address, std::size_t nbytes) {
  const std::uintptr_t first = address / page * page;
  const std::size_t length = round_up(address + nbytes, page) - first;
  // A zero advice changes nothing and fails where nothing is mapped.
  return madvise(reinterpret_cast<void*>(first), length, MADV_NORMAL) == 0;
}

}  // namespace

bool map_device_memory() {
  Driver& d = driver();
  const std::size_t size = window_size();
  const int file = memfd_create("emulated device memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return false;
  void* window = mmap(nullptr, 2 * size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (window == MAP_FAILED) return false;
  void* alias = mmap(static_cast<char*>(window) + size, size, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
  if (alias == MAP_FAILED) return false;
  // A child after fork must not see, nor pay for, the device's memory.
  madvise(window, 2 * size, MADV_DONTFORK);
  d.window = reinterpret_cast<std::uintptr_t>(window);
  watch_device_file(file, reinterpret_cast<std::uintptr_t>(alias), size);
  d.devices.resize(static_cast<std::size_t>(d.configuration.devices));
  for (std::size_t index = 0; index < d.devices.size(); ++index)
    d.devices[index].free_ranges[d.window + index * d.configuration.device_nbytes] = d.configuration.device_nbytes;
  return true;
}

bool in_device_window(std::uintptr_t address) { return address - driver().window < window_size(); }

std::byte* touchable(std::uintptr_t address) {
  return reinterpret_cast<std::byte*>(in_device_window(address) ? address + window_size() : address);
}

AllocationPtr allocation_at(std::uintptr_t address) {
  const auto& allocations = driver().allocations;
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return nullptr;
  const auto& allocation = std::prev(next)->second;
  return address - allocation->base < allocation->size ? allocation : nullptr;
}

CUresult find_range(std::uintptr_t address, std::size_t nbytes, Range& range) {
  range.allocation = allocation_at(address);
  if (range.allocation)
    return nbytes <= range.allocation->base + range.allocation->size - address ? CUDA_SUCCESS
                                                                               : CUDA_ERROR_INVALID_VALUE;
  if (address == 0 || in_device_window(address) || overlaps(address, nbytes)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

std::size_t free_device_memory(int device) {
  const Driver& d = driver();
  const std::size_t limit = std::min(d.configuration.device_nbytes, d.controls.device_limit);
  const std::size_t used = d.devices[static_cast<std::size_t>(device)].used;
  return limit > used ? limit - used : 0;
}

CUresult allocate_device(const ContextPtr& context, int device, std::size_t nbytes, AllocationPtr& allocation) {
  if (nbytes == 0) return CUDA_ERROR_INVALID_VALUE;
  Device& state = driver().devices[static_cast<std::size_t>(device)];
  if (nbytes > free_device_memory(device)) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::size_t size = device_size_of(nbytes), alignment = size % page == 0 ? page : 1;
  auto& ranges = state.free_ranges;
  const auto fit = std::find_if(ranges.begin(), ranges.end(), [&](const auto& range) {
    return range.second >= round_up(range.first, alignment) - range.first + size;
  });
  if (fit == ranges.end()) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto [first, available] = *fit;
  const std::uintptr_t base = round_up(first, alignment), end = first + available;
  ranges.erase(fit);
  if (base > first) ranges[first] = base - first;
  if (end > base + size) ranges[base + size] = end - base - size;
  state.used += size;
  if (nbytes <= poison_limit) std::memset(touchable(base), poison_byte, nbytes);
  Allocation created{Allocation::Type::device};
  created.base = base;
  created.size = nbytes;
  created.device = device;
  created.context = context;
  allocation = remember(std::move(created));
  return CUDA_SUCCESS;
}

CUresult allocate_host(const ContextPtr& context, std::size_t nbytes, unsigned flags, AllocationPtr& allocation) {
  Driver& d = driver();
  if (nbytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const std::size_t size = round_up(nbytes, page);
  if (d.pinned + nbytes > d.controls.pinned_limit) return CUDA_ERROR_OUT_OF_MEMORY;
  void* memory = map_host(size);
  if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
  d.pinned += nbytes;
  Allocation created{Allocation::Type::host};
  created.base = reinterpret_cast<std::uintptr_t>(memory);
  created.size = nbytes;
  created.device = context->device;
  created.context = context;
  created.flags = flags;
  allocation = remember(std::move(created));
  return CUDA_SUCCESS;
}

CUresult allocate_managed(const ContextPtr& context, std::size_t nbytes, AllocationPtr& allocation) {
  if (nbytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* memory = map_host(round_up(nbytes, page));
  if (!memory) return CUDA_ERROR_OUT_OF_MEMORY;
  Allocation created{Allocation::Type::managed};
  created.base = reinterpret_cast<std::uintptr_t>(memory);
  created.size = nbytes;
  created.device = context->device;
  created.context = context;
  allocation = remember(std::move(created));
  return CUDA_SUCCESS;
}

CUresult register_host(const ContextPtr& context, std::uintptr_t address, std::size_t nbytes, unsigned flags) {
  Driver& d = driver();
  if (address == 0 || nbytes == 0 || in_device_window(address) || !mapped(address, nbytes))
    return CUDA_ERROR_INVALID_VALUE;
  if (overlaps(address, nbytes)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  if (d.pinned + nbytes > d.controls.pinned_limit) return CUDA_ERROR_OUT_OF_MEMORY;
  d.pinned += nbytes;
  Allocation created{Allocation::Type::registration};
  created.base = address;
  created.size = nbytes;
  created.device = context->device;
  created.context = context;
  created.flags = flags;
  remember(std::move(created));
  return CUDA_SUCCESS;
}

void release(const AllocationPtr& allocation) {
  Driver& d = driver();
  const std::size_t size = allocation->size;
  allocation->freed = true;
  d.allocations.erase(allocation->base);
  if (allocation->pool) allocation->pool->used -= size;
  switch (allocation->type) {
    case Allocation::Type::device: {
      Device& device = d.devices[static_cast<std::size_t>(allocation->device)];
      const std::size_t rounded = device_size_of(size);
      forget_bytes(touchable(allocation->base), size);
      device.used -= rounded;
      give_back_range(device, allocation->base, rounded);
      break;
    }
    case Allocation::Type::host:
      d.pinned -= size;
      [[fallthrough]];
    case Allocation::Type::managed:
      unmap_host(reinterpret_cast<void*>(allocation->base), round_up(size, page));
      break;
    case Allocation::Type::registration:
      d.pinned -= size;
      break;
  }
}

void wait_until_unused(Call& call, const AllocationPtr& allocation) {
  call.wait_unless("memory in use", [&] { return allocation->in_use == 0; });
}

void free_memory_of(const Context& context) {
  const auto allocations = driver().allocations;
  for (const auto& [base, allocation] : allocations)
    if (allocation->context.get() == &context) release(allocation);
}

}  // namespace emu
