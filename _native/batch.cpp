#include "batch.h"

#include <algorithm>

#include "memory.h"

namespace aiocuda {
namespace {

enum class Side : uint8_t { kDevice, kPinned, kPageable };

// Entries of one batch mostly lie in few allocations, so the last answer is kept. Pageable memory has no allocation the
// driver knows, and each address is asked for.
class Lookup {
 public:
  abi::Result find(uint64_t address) {
    if (address - info_.range_start < info_.range_nbytes) return abi::kSuccess;
    info_ = describe(address);
    return info_.result;
  }
  // The side that memory counts as where it may be either.
  Side side(bool managed_on_device) const {
    if (info_.memory_type == 0) return Side::kPageable;
    if (info_.managed) return managed_on_device ? Side::kDevice : Side::kPageable;
    return info_.memory_type == abi::kMemoryDevice ? Side::kDevice : Side::kPinned;
  }
  bool crosses_end(uint64_t address, uint64_t nbytes) const {
    return info_.range_nbytes != 0 && nbytes > info_.range_start + info_.range_nbytes - address;
  }
  const MemoryInfo& info() const { return info_; }

 private:
  MemoryInfo info_;
};

Route route_of(Side src, Side dst) {
  if (src == Side::kDevice && dst == Side::kDevice) return Route::kDeviceToDevice;
  if (src == Side::kDevice) return dst == Side::kPinned ? Route::kToHostDirect : Route::kToHostStaged;
  return src == Side::kPinned ? Route::kToDeviceDirect : Route::kToDeviceStaged;
}

Part* part_of(Operation* operation, Route route) {
  for (Part& part : operation->parts) {
    if (part.route == route) return &part;
  }
  Part part;
  part.operation = operation;
  part.route = route;
  operation->parts.push_back(std::move(part));
  return &operation->parts.back();
}

}  // namespace

AddressesResult add_addresses(Operation* operation, const uint64_t* dsts, const uint64_t* srcs, const uint64_t* sizes,
                              size_t n, size_t n_sizes, const uint32_t* attributes, size_t n_attributes,
                              bool dsts_bounded, bool srcs_bounded) {
  AddressesResult result;
  Lookup src, dst;
  Part* part = nullptr;
  const auto problem = [&](AddressesResult::Problem what, size_t index) {
    result.problem = what;
    result.index = index;
    return result;
  };
  for (size_t i = 0; i < n; ++i) {
    const uint64_t nbytes = sizes[n_sizes == 1 ? 0 : i];
    if (nbytes == 0) continue;
    if (srcs[i] == 0 || dsts[i] == 0) return problem(AddressesResult::kNullAddress, i);
    abi::Result code = src.find(srcs[i]);
    if (code == abi::kSuccess) code = dst.find(dsts[i]);
    if (code != abi::kSuccess) return problem(AddressesResult::kDriver, static_cast<size_t>(code));
    // Managed memory counts as the device side, unless the other side already is that.
    Side src_side = src.side(true);
    Side dst_side = dst.side(src_side != Side::kDevice);
    if (src_side != Side::kDevice && dst_side != Side::kDevice) return problem(AddressesResult::kHostToHost, i);
    if (src.crosses_end(srcs[i], nbytes)) {
      if (!srcs_bounded || src_side != Side::kPinned) return problem(AddressesResult::kSourceCrossesEnd, i);
      src_side = Side::kPageable;
    }
    if (dst.crosses_end(dsts[i], nbytes)) {
      if (!dsts_bounded || dst_side != Side::kPinned) return problem(AddressesResult::kDestinationCrossesEnd, i);
      dst_side = Side::kPageable;
    }
    const Route route = route_of(src_side, dst_side);
    const MemoryInfo& device_side = to_host(route) ? src.info() : dst.info();
    if (result.device < 0) {
      result.device = device_side.ordinal;
      result.context = device_side.context;
    } else if (result.device != device_side.ordinal) {
      return problem(AddressesResult::kOtherDevice, i);
    }
    if (part == nullptr || part->route != route) {
      part = part_of(operation, route);
      if (part->entries.empty()) part->entries.reserve(n);
      result.routes |= 1u << static_cast<unsigned>(route);
    }
    Entry entry;
    entry.dst = dsts[i];
    entry.src = srcs[i];
    entry.shape.width = nbytes;
    entry.attributes = attributes[n_attributes == 1 ? 0 : i];
    part->entries.push_back(entry);
    result.nbytes += nbytes;
  }
  return result;
}

}  // namespace aiocuda
