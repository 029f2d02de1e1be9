// Contiguous copies as columns: batches of numbers come so, and leave so for the kernel, which reads page-locked columns
// where they are.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "slots.h"

namespace aiocuda {

// Page-locked memory for columns. A batch must not wait for memory to be page-locked, so one that finds none does without,
// and some is made for the next.
class ColumnPool {
 public:
  explicit ColumnPool(int device) : slots_(device) {}

  // At least so many bytes, or nullptr. Any thread, as give().
  Slot* take(size_t nbytes);
  void give(Slot* slot) { slots_.give(slot); }

  // Makes what was not there; returns whether there was any such. The engine's thread.
  bool make_wanted();
  // Forgets all of it: its registration is gone.
  void leak() { slots_.leak(); }
  size_t nbytes_held() const { return slots_.nbytes_held(); }

 private:
  SlotPool slots_;
  std::atomic<size_t> wanted_{0};  // sizes, which are powers of two
};

// The pool of a device's engine; nullptr where there is none yet.
ColumnPool* column_pool(int device);

// What lies between the first and the last byte of one side.
struct Hull {
  uint64_t begin = UINT64_MAX;
  uint64_t end = 0;

  void include(uint64_t address, uint64_t nbytes) {
    begin = std::min(begin, address);
    end = std::max(end, address + nbytes);
  }
};

// Where the memory of columns came from.
struct Return {
  ColumnPool* pool = nullptr;
  Slot* slot = nullptr;

  void operator()(uint64_t* memory) const {
    if (slot != nullptr) {
      pool->give(slot);
    } else {
      delete[] memory;
    }
  }
};

class Columns {
 public:
  // Makes room for so many copies, from the pool if it has that; once, before the first.
  void reserve(size_t capacity, ColumnPool* pool) {
    capacity_ = capacity;
    Slot* const slot = pool == nullptr ? nullptr : pool->take(2 * capacity * sizeof(uint64_t));
    uint64_t* const memory = slot == nullptr ? new uint64_t[2 * capacity] : reinterpret_cast<uint64_t*>(slot->memory);
    addresses_ = {memory, Return{pool, slot}};
  }

  void add(uint64_t dst, uint64_t src, uint64_t nbytes) {
    end().set(dst, src);
    extend(1, nbytes);
    dst_hull.include(dst, nbytes);
    src_hull.include(src, nbytes);
  }

  // For whoever fills in many before it says how many there are, and widens the hulls itself.
  struct End {
    uint64_t* dsts;
    uint64_t* srcs;

    void set(uint64_t dst, uint64_t src) const {
      *dsts = dst;
      *srcs = src;
    }
  };
  End end() { return {addresses_.get() + count_, addresses_.get() + capacity_ + count_}; }
  void extend(size_t n, uint64_t nbytes) {
    if (count_ == 0) each_ = nbytes;
    if (nbytes != each_ && sizes_ == nullptr) {
      sizes_.reset(new uint64_t[capacity_]);
      std::fill_n(sizes_.get(), count_, each_);
    }
    if (sizes_ != nullptr) std::fill_n(sizes_.get() + count_, n, nbytes);
    count_ += n;
    nbytes_ += n * nbytes;
  }

  size_t count() const { return count_; }
  size_t capacity() const { return capacity_; }
  size_t nbytes() const { return nbytes_; }
  bool uniform() const { return sizes_ == nullptr; }
  // Whether it lay in a pool's memory when it was reserved; a registration may be gone since.
  bool page_locked() const { return addresses_.get_deleter().slot != nullptr; }
  const uint64_t* dsts() const { return addresses_.get(); }
  const uint64_t* srcs() const { return addresses_.get() + capacity_; }
  size_t size(size_t i) const { return sizes_ == nullptr ? each_ : sizes_[i]; }

  // They may be as wide as the allocations.
  Hull dst_hull, src_hull;

 private:
  std::unique_ptr<uint64_t[], Return> addresses_;  // destinations, then sources
  std::unique_ptr<uint64_t[]> sizes_;              // where they differ
  size_t capacity_ = 0;
  size_t count_ = 0;
  size_t nbytes_ = 0;
  uint64_t each_ = 0;
};

}  // namespace aiocuda
