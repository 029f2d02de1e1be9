// Slots of page-locked memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "driver_abi.h"

namespace aiocuda {

struct Slot {
  char* memory = nullptr;
  size_t capacity = 0;
  uint64_t generation = 0;  // of the pool's leak(): an older slot never comes back
};

// Slots by capacity. They are mapped, touched and registered one by one when first needed, because the driver stalls
// every thread's calls while it registers memory (hardware.md: 24 ms per GiB): a slot at a time nobody notices.
//
// They are used in rotation, and new ones are made rather than one used again that has just been emptied: the device
// writes at half the speed or less to memory that other cores have in their caches (3 slots in rotation 28 GB/s, 6 slots
// 48 to 53, 16 slots 53; docs/explanation/measurements.md).
class SlotPool {
 public:
  // With slab_nbytes, so much is registered at a time and divided: small slots would each cost as much as a large one.
  explicit SlotPool(int device, size_t slab_nbytes = 0) : device_(device), slab_nbytes_(slab_nbytes) {}

  // Any thread may give; only the engine's thread takes, since that may register memory.
  Slot* take(size_t capacity, size_t most, abi::Result* error);
  void give(Slot* slot);
  // A slot that the device might still write to is nobody's; another one may be made in its place. Any thread.
  void lose(Slot* slot);
  // A slot that exists and is free, or nullptr: the one that has been free longest, or the one that was used last. Any
  // thread.
  Slot* take_free(size_t capacity, bool last_used = false);
  // Forgets all slots without freeing them: the device may still write to them, or their registration is gone.
  void leak();
  // Unregisters and unmaps the slots of a capacity that are not in use. Not for slots of slabs.
  void trim(size_t capacity);
  size_t nbytes_held() const { return nbytes_held_.load(std::memory_order_relaxed); }

 private:
  struct Class {
    std::deque<Slot*> free;  // the longest free first
    size_t made = 0;
    size_t most = SIZE_MAX;  // lowered to what exists when the system refuses to pin more
  };

  const int device_;
  const size_t slab_nbytes_;
  std::mutex mutex_;
  uint64_t generation_ = 0;
  std::unordered_map<size_t, Class> classes_;
  std::atomic<size_t> nbytes_held_{0};
};

}  // namespace aiocuda
