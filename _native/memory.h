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

}  // namespace aiocuda
