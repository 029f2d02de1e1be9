// Contiguous copies as columns: batches of numbers come so, and leave so for the kernel's table.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace aiocuda {

// What lies between the first and the last byte of one side.
struct Hull {
  uint64_t begin = UINT64_MAX;
  uint64_t end = 0;

  void include(uint64_t address, uint64_t nbytes) {
    begin = std::min(begin, address);
    end = std::max(end, address + nbytes);
  }
};

class Columns {
 public:
  // Makes room for so many copies; once, before the first. The system gives the memory as it is filled, so that the
  // column of sizes costs nothing where all are of one.
  void reserve(size_t capacity) {
    capacity_ = capacity;
    memory_.reset(new uint64_t[3 * capacity]);
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
  End end() { return {memory_.get() + count_, memory_.get() + capacity_ + count_}; }
  void extend(size_t n, uint64_t nbytes) {
    if (count_ == 0) each_ = nbytes;
    if (nbytes != each_ && !varied_) {
      varied_ = true;
      std::fill_n(sizes(), count_, each_);
    }
    if (varied_) std::fill_n(sizes() + count_, n, nbytes);
    count_ += n;
    nbytes_ += n * nbytes;
  }

  size_t count() const { return count_; }
  size_t nbytes() const { return nbytes_; }
  bool uniform() const { return !varied_; }
  const uint64_t* dsts() const { return memory_.get(); }
  const uint64_t* srcs() const { return memory_.get() + capacity_; }
  size_t size(size_t i) const { return varied_ ? memory_[2 * capacity_ + i] : each_; }

  // They may be as wide as the allocations.
  Hull dst_hull, src_hull;

 private:
  uint64_t* sizes() { return memory_.get() + 2 * capacity_; }

  std::unique_ptr<uint64_t[]> memory_;  // destinations, sources, and sizes where they differ
  size_t capacity_ = 0;
  size_t count_ = 0;
  size_t nbytes_ = 0;
  uint64_t each_ = 0;
  bool varied_ = false;
};

}  // namespace aiocuda
