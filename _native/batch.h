// Batches of raw addresses: what each address is, found per allocation, and the route that follows from it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "operation.h"

namespace aiocuda {

struct AddressesResult {
  enum Problem : int {
    kNone = 0,
    kNullAddress = 1,
    kHostToHost = 2,
    kSourceCrossesEnd = 3,       // the entry goes beyond the allocation that its source begins in
    kDestinationCrossesEnd = 4,
    kOtherDevice = 5,            // than the entries before it
    kDriver = 6,                 // index holds the driver's code
  };
  int problem = kNone;
  size_t index = 0;
  int device = -1;
  abi::Context context = nullptr;
  uint64_t nbytes = 0;
  unsigned routes = 0;  // bit set of Route
};

// Adds an entry for each pair that is not empty. Sides that are bounded are known to be memory from end to end: pinned memory may go on
// beyond its registration there, and is then staged. With n_sizes == 1 the size is that of all, and so are the attributes. On a problem the operation is
// not to be used. Makes no call that waits; about 0.1 us an entry.
AddressesResult add_addresses(Operation* operation, const uint64_t* dsts, const uint64_t* srcs, const uint64_t* sizes,
                              size_t n, size_t n_sizes, const uint32_t* attributes, size_t n_attributes,
                              bool dsts_bounded, bool srcs_bounded);

}  // namespace aiocuda
