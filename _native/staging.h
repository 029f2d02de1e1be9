// Slots of page-locked memory, and the worker threads that copy between slots and pageable memory.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "operation.h"

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
  // A slot that exists and is free, or nullptr. Any thread.
  Slot* take_free(size_t capacity);
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

// Threads that run the host copies of pieces. Started when first needed, asleep when idle, never joined: at exit the
// process ends under them, which is safe because they touch neither Python nor the driver.
class Workers {
 public:
  // So many for memory without pages, most of whose cost is the kernel's zeroing (8 / 11 / 14 threads 26 / 33 / 36 GB/s).
  // To the device 14 are in each other's way on some hosts (41 to 51 GB/s), and 8 too few on
  // others (41, where 11 and 14 reach 50).
  static constexpr size_t kMost = 14;
  static constexpr size_t kMostToDevice = 11;

  // done(context, piece) is called on a worker's thread after the last job of a piece.
  Workers(size_t most, void (*done)(void*, Piece*), void* context) : most_(most), done_(done), context_(context) {}
  void submit(const std::vector<Piece*>& pieces);

 private:
  struct Job {
    Piece* piece;
    size_t begin, end;
  };

  void run();
  // The first job whose copier, and whose direction, may use another worker. Called with the mutex held.
  bool next(Job* job);

  const size_t most_;
  void (*const done_)(void*, Piece*);
  void* const context_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;
  size_t started_ = 0;
  size_t asleep_ = 0;
  size_t to_device_ = 0;      // workers in use for that
  bool passed_over_ = false;  // a job whose copier or direction had all its workers in use
};

// Processors this process may use: affinity and cgroup quota, not the machine's core count.
size_t cpu_budget();

}  // namespace aiocuda
