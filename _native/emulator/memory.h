// Device memory, host memory and what is known about an address.
#pragma once

#include "call.h"
#include "state.h"

namespace emu {

constexpr unsigned char poison_byte = 0xE5;

bool map_device_memory();
bool in_device_window(std::uintptr_t address);
// Where the emulator itself can touch what is at an address.
std::byte* touchable(std::uintptr_t address);
AllocationPtr allocation_at(std::uintptr_t address);

struct Range {
  AllocationPtr allocation;  // none: pageable memory
  bool on_device() const {
    return allocation && (allocation->type == Allocation::Type::device || allocation->type == Allocation::Type::managed);
  }
};
// Refuses ranges that leave the allocation or the registration that they begin in.
CUresult find_range(std::uintptr_t address, std::size_t nbytes, Range& range);

CUresult allocate_device(const ContextPtr& context, int device, std::size_t nbytes, AllocationPtr& allocation);
CUresult allocate_host(const ContextPtr& context, std::size_t nbytes, unsigned flags, AllocationPtr& allocation);
CUresult allocate_managed(const ContextPtr& context, std::size_t nbytes, AllocationPtr& allocation);
CUresult register_host(const ContextPtr& context, std::uintptr_t address, std::size_t nbytes, unsigned flags);
void release(const AllocationPtr& allocation);
// Waits until nothing that runs uses the allocation: the bytes are moved without the lock.
void wait_until_unused(Call& call, const AllocationPtr& allocation);
void free_memory_of(const Context& context);
std::size_t free_device_memory(int device);

}  // namespace emu
