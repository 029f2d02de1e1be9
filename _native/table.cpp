#include "table.h"

namespace aiocuda {

Reach::Range* Reach::find(uint64_t address) {
  for (Range& known : known_) {
    if (known.holds(address)) return &known;
  }
  Range* const found = &known_[next_++ % known_.size()];
  *found = look_up(address);
  return found;
}

Reach::Range Reach::look_up(uint64_t address) const {
  uint64_t context = 0, memory_type = 0, device_address = 0, ordinal = 0, start = 0, nbytes = 0;
  int attributes[] = {abi::kPointerContext,       abi::kPointerMemoryType, abi::kPointerDevicePointer,
                      abi::kPointerDeviceOrdinal, abi::kPointerRangeStart, abi::kPointerRangeSize};
  void* answers[] = {&context, &memory_type, &device_address, &ordinal, &start, &nbytes};
  if (abi::driver.pointer_get_attributes(6, attributes, answers, address) != abi::kSuccess) return {};
  if (device_address != address) return {};
  if (static_cast<uint32_t>(memory_type) == abi::kMemoryDevice) {
    if (static_cast<int>(static_cast<uint32_t>(ordinal)) != device_) return {};
    if (context != 0 && context != reinterpret_cast<uintptr_t>(context_)) return {};
  } else if (static_cast<uint32_t>(memory_type) != abi::kMemoryHost) {
    return {};
  }
  return {start, nbytes};
}

}  // namespace aiocuda
