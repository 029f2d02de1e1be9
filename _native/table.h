// The table that tells the kernel what to move, and what the kernel can reach.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "memory.h"
#include "operation.h"

namespace aiocuda {

// How long entries become rows: of so many bits, all but the first beginning at a line of the side that lies behind the
// link.
struct Rows {
  static constexpr size_t kLine = 128;

  unsigned bits;
  bool align_source;

  size_t most_of(size_t nbytes) const { return (nbytes >> bits) + 2; }
};

// The columns of a table, as scatter.cu reads them.
class Table {
 public:
  // Without sizes where all entries are alike.
  Table(const Slot& slot, bool alike)
      : Table(reinterpret_cast<uintptr_t>(slot.memory), static_cast<uint32_t>(slot.capacity / (alike ? 16 : 20))) {}
  explicit Table(const KernelTable& table) : Table(table.address, table.capacity) { rows = table.rows; }

  void add(uint64_t dst, uint64_t src) {
    dsts[rows] = dst;
    srcs[rows++] = src;
  }
  // An entry in as many rows as it is long.
  void add_rows(uint64_t dst, uint64_t src, size_t nbytes, const Rows& as) {
    size_t most = (size_t{1} << as.bits) - (as.align_source ? src : dst) % Rows::kLine;
    while (nbytes > most) {
      add(dst, src, most);
      dst += most;
      src += most;
      nbytes -= most;
      most = size_t{1} << as.bits;
    }
    add(dst, src, nbytes);
  }

  KernelTable in(Slot* slot) const { return {reinterpret_cast<uintptr_t>(slot->memory), capacity, rows, slot}; }

  const uint32_t capacity;
  uint64_t* const dsts;
  uint64_t* const srcs;
  uint32_t* const sizes;
  uint32_t rows = 0;

 private:
  Table(uintptr_t address, uint32_t rows_at_most)
      : capacity(rows_at_most),
        dsts(reinterpret_cast<uint64_t*>(address)),
        srcs(dsts + capacity),
        sizes(reinterpret_cast<uint32_t*>(srcs + capacity)) {}

  void add(uint64_t dst, uint64_t src, size_t nbytes) {
    sizes[rows] = static_cast<uint32_t>(nbytes);
    add(dst, src);
  }
};

// What the kernel can touch, found per allocation: memory whose address is the same on the device, and which belongs to
// this device and to no other context than the engine's. Memory from a pool belongs to none.
class Reach {
 public:
  Reach(abi::Context context, int device) : context_(context), device_(device) {}

  // Needs the context current.
  bool covers(uint64_t address, size_t nbytes) {
    if (!last_->holds(address)) last_ = find(address);
    return last_->holds(address) && nbytes <= last_->begin + last_->nbytes - address;
  }
  bool covers(const Hull& hull) { return covers(hull.begin, hull.end - hull.begin); }

 private:
  struct Range {
    uint64_t begin = 0;
    size_t nbytes = 0;

    bool holds(uint64_t address) const { return address - begin < nbytes; }
  };

  Range* find(uint64_t address);
  Range look_up(uint64_t address) const;

  const abi::Context context_;
  const int device_;
  std::array<Range, 16> known_;
  Range* last_ = known_.data();
  size_t next_ = 0;
};

}  // namespace aiocuda
