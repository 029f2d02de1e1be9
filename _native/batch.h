// Batches of numbers: what each address is, found per allocation, and the route that follows from it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "memory.h"
#include "operation.h"

namespace aiocuda {

// What memory is, by allocation. Entries of one batch mostly lie in few allocations, so the last answers are kept; pageable
// memory has no allocation that the driver knows, and is asked for again and again.
class RangeCache {
 public:
  // The answer is valid until the next question.
  const MemoryInfo& find(uint64_t address);

 private:
  MemoryInfo known_[32];
  size_t last_ = 0;
  size_t next_ = 0;
};

// One side of a batch: addresses, or offsets into memory of the caller's.
struct BatchSide {
  const uint64_t* values = nullptr;
  uint64_t base = 0;      // is added to each
  // Bounded sides are known to be memory from end to end: pinned memory may go on beyond its registration there, and is
  // then staged.
  bool bounded = false;
  uint64_t nbytes = 0;
};

// What there is one of for all entries, or one for each.
template <typename T>
struct PerEntry {
  const T* values = nullptr;
  bool one = true;

  T operator[](size_t i) const { return values[one ? 0 : i]; }
};

struct AddressesResult {
  enum Problem : int {
    kNone = 0,
    kNullAddress = 1,
    kHostToHost = 2,
    kSourceCrossesEnd = 3,       // the entry goes beyond the allocation that its source begins in
    kDestinationCrossesEnd = 4,
    kOtherDevice = 5,            // than the entries before it
    kDriver = 6,                 // index holds the driver's code
    kSourceOutside = 7,          // of the memory that bounds its side
    kDestinationOutside = 8,
  };
  int problem = kNone;
  size_t index = 0;  // of the entry that has the problem; else of the first one that has not been looked at
  int device = -1;
  abi::Context context = nullptr;
  MemoryInfo dst, src;  // what the first entry that is not empty lies in
};

// Adds the copies from `first` on that are not empty, until all are done or, once the device is known, the time has
// come; with a device other than -1 that of the entries before. On a problem the operation is not to be used. Makes no
// call that waits.
AddressesResult add_addresses(Operation* operation, const BatchSide& dsts, const BatchSide& srcs,
                              PerEntry<uint64_t> sizes, PerEntry<uint32_t> attributes, size_t first, size_t n,
                              int device, uint64_t until_ns);

// What an object says of its memory.
enum class Claim : uint8_t { kHost, kDevice, kEither };

// Whether the driver knows the memory that bounds a side as what it claims to be; and, where it is on a device, all of it,
// on this one and in this context. What is known of an entry of it may save the question.
bool as_claimed(const BatchSide& side, Claim claim, const MemoryInfo& known, int device, abi::Context context);

// Slices of rows of bytes; of no width where the memory is contiguous.
struct Strided {
  size_t width = 0, height = 1, depth = 1;
  size_t pitch = 0, slice = 0;

  size_t extent() const { return (depth - 1) * slice + (height - 1) * pitch + width; }
};

// Copies between objects, of which each may be in an allocation of its own. Takes those that are what they seem, between
// memory of one device and context and memory of the host, and leaves all else to who can say what is wrong. Without a
// device it is that of the first.
class PlainBatch {
 public:
  struct Pair {
    uint64_t dst, src;
    size_t nbytes;
    Claim dst_claim, src_claim;
    Strided dst_strided, src_strided;  // one of them at most
  };

  PlainBatch() = default;
  PlainBatch(Operation* operation, size_t capacity, int device, abi::Context context)
      : operation_(operation), capacity_(capacity), device_(device), context_(context) {}

  // Adds pairs up to the first that is not plain; returns how many. Makes no call that waits.
  size_t add(const Pair* pairs, size_t n);

  int device() const { return device_; }
  abi::Context context() const { return context_; }

 private:
  Operation* operation_ = nullptr;
  size_t capacity_ = 0;
  int device_ = -1;
  abi::Context context_ = nullptr;
  RangeCache dsts_, srcs_;
};

enum class Overlap : int { kNone = 0, kSome = 1, kUnknown = 2 };

// Whether destinations of the operation overlap; strided ones may interleave, and are not looked at. Finds out in a few
// passes where they ascend or, if there are not too many, are of one size and lie on multiples of it; anything that takes
// longer is done only when it may be.
Overlap find_overlap(const Operation& operation, bool may_take_long);

}  // namespace aiocuda
