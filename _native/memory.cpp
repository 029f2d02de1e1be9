#include "memory.h"

namespace aiocuda {

static constexpr abi::Result kNotInitialized = 3;

MemoryInfo describe(uint64_t address) noexcept {
  MemoryInfo info;
  if (address == 0) return info;
  if (abi::driver.pointer_get_attributes == nullptr) {
    info.result = kNotInitialized;
    return info;
  }
  // The widths of the answers differ (int, unsigned, pointer, size_t), and the documentation does not give all of them:
  // each gets eight zeroed bytes.
  uint64_t context = 0, memory_type = 0, managed = 0, ordinal = 0, start = 0, nbytes = 0;
  int attributes[] = {abi::kPointerContext,       abi::kPointerMemoryType, abi::kPointerIsManaged,
                      abi::kPointerDeviceOrdinal, abi::kPointerRangeStart, abi::kPointerRangeSize};
  void* answers[] = {&context, &memory_type, &managed, &ordinal, &start, &nbytes};
  abi::Result result = abi::driver.pointer_get_attributes(6, attributes, answers, address);
  if (result == abi::kErrorInvalidValue) return info;
  info.result = result;
  if (result != abi::kSuccess || static_cast<uint32_t>(memory_type) == 0) return info;
  info.context = reinterpret_cast<abi::Context>(context);
  info.memory_type = static_cast<int>(static_cast<uint32_t>(memory_type));
  info.managed = (managed & 0xff) != 0;
  info.ordinal = static_cast<int>(static_cast<uint32_t>(ordinal));
  info.range_start = start;
  info.range_nbytes = nbytes;
  return info;
}

}  // namespace aiocuda
