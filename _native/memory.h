// What the driver knows about an address, and the page-locking of host memory. C++ without Python; the caller of every
// function here has let go of the GIL.
#pragma once
#include <cstddef>
#include <cstdint>

#include "driver_abi.h"

namespace aiocuda {

struct MemoryInfo {
  abi::Context context = nullptr;
  int memory_type = 0;  // abi::MemoryType; 0 where the driver does not know the address: pageable memory
  bool managed = false;
  int ordinal = 0;
  uint64_t range_start = 0;  // the allocation, or registration, that holds the address
  uint64_t range_nbytes = 0;
  abi::Result result = abi::kSuccess;  // never kErrorInvalidValue, which is what some drivers say of pageable memory
};

// Does not touch the memory, needs no current context and does not disturb a capture.
MemoryInfo describe(uint64_t address) noexcept;

// Asks the system about its memory, where it can be asked (Linux 6.11) without reading the list of all there is.
class MemoryMap {
 public:
  MemoryMap() = default;
  ~MemoryMap();
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  // Whether an address lies in memory of the process's own that it may read and write, which no device or file lies
  // behind; and how far that goes.
  bool ordinary(uint64_t address, uint64_t* begin, uint64_t* nbytes) noexcept;

 private:
  int file_ = -1;
  bool silent_ = false;
};

// The primary context of a device, retained for the rest of the process.
abi::Result primary_context(int device, abi::Context* context) noexcept;

// Has copies between two devices go from one to the other, where the hardware lets them; else they go through the host's
// memory, at a tenth of the rate (hardware.md: 37 and 394 GB/s). May take milliseconds.
void enable_peer_access(int device, int other) noexcept;

// Whether there is more than one device.
bool several_devices() noexcept;

// The device of the context that is current in this thread; -1 where there is none.
int current_device() noexcept;

// Page-locks host memory, or lets go of it, in the primary context of a device (of current_device() for -1, and of device 0
// where there is none). Neither disturbs a capture of another thread, and the current context stays what it was.
enum : unsigned { kRegisterPortable = 1, kRegisterReadOnly = 8 };
abi::Result register_host(void* address, size_t nbytes, unsigned flags, int device) noexcept;
abi::Result unregister_host(void* address, int device) noexcept;

// Fresh zeroed memory whose pages are there, in huge pages where it is large, and which forked children do not inherit;
// nullptr where there is none.
void* map_host(size_t nbytes) noexcept;
void unmap_host(void* address, size_t nbytes) noexcept;
void zero_host(void* address, size_t nbytes) noexcept;

// Memory that nobody has written yet has no pages, and whoever is the first to write gets zeroed ones: huge ones where the
// system gives them. Of several that begin to write to one huge page each zeroes a page, and all but one throw it away.
constexpr size_t kHugePage = size_t{2} << 20;
// Whether an address lies in such memory.
bool untouched(uintptr_t address) noexcept;
// Has the system put pages behind a range at once, in place of a fault for each. Does nothing where it cannot (Linux
// before 5.14).
void populate(uintptr_t address, size_t nbytes) noexcept;

// Whether the children of a fork get a copy of mapped memory.
void inherit_host(void* address, size_t nbytes, bool inherited) noexcept;

}  // namespace aiocuda
