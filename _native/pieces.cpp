#include <algorithm>
#include <cstring>

#include "memory.h"
#include "operation.h"
#include "staging.h"
#include "streaming_copy.h"

namespace aiocuda {
namespace {

// A library stream takes about a thousand entries before the driver blocks the caller (hardware.md: 1,021); two pieces
// of single copies stay far below.
constexpr size_t kMaxDeviceCopies = 256;
// Pieces up to this size are likely to be read again soon: ordinary stores leave them in the cache.
constexpr size_t kCacheable = size_t{256} << 10;
constexpr size_t kSlotAlignment = 64;
// Where memory gets small pages, so much of it gets them and is written at a time: while the zeroes are in the cache.
constexpr size_t kFreshStep = size_t{256} << 10;

uintptr_t address_at(uintptr_t base, size_t row, size_t x, size_t height, size_t pitch, size_t slice) {
  return base + (row / height) * slice + (row % height) * pitch + x;
}

// The rectangle of an entry that begins at a packed offset and holds at most room bytes; or at most one row of it.
Entry portion_of(const Entry& entry, size_t offset, size_t room, bool by_rows) {
  const Shape& s = entry.shape;
  Entry out;
  out.attributes = entry.attributes;
  const size_t row = offset / s.width;
  const size_t x = offset % s.width;
  out.dst = address_at(entry.dst, row, x, s.height, s.dst_pitch, s.dst_slice);
  out.src = address_at(entry.src, row, x, s.height, s.src_pitch, s.src_slice);
  if (x != 0 || room < s.width || s.contiguous() || by_rows) {
    out.shape.width = std::min(s.width - x, room);
    return out;
  }
  const size_t rows = room / s.width;
  const size_t y = row % s.height;
  out.shape = s;
  out.shape.depth = 1;
  if (y == 0 && rows >= s.height) {
    out.shape.depth = std::min(rows / s.height, s.depth - row / s.height);
  } else {
    out.shape.height = std::min(rows, s.height - y);
  }
  return out;
}

void pack_dst(Shape* s) {
  s->dst_pitch = s->width;
  s->dst_slice = s->width * s->height;
}

void pack_src(Shape* s) {
  s->src_pitch = s->width;
  s->src_slice = s->width * s->height;
}

}  // namespace

Part& Operation::only_part(Route route) {
  if (parts.empty()) return part_of(route);
  Part& part = parts.front();
  part.route = route;
  part.entries.clear();
  part.next_entry = part.next_offset = 0;
  nbytes_done.store(0, std::memory_order_relaxed);
  return part;
}

Part& Operation::part_of(Route route) {
  for (Part& part : parts) {
    if (part.route == route && part.columns.count() == 0) return part;
  }
  Part& part = parts.emplace_back();
  part.operation = this;
  part.route = route;
  return part;
}

Part& Operation::columns_of(Route route, size_t capacity, ColumnPool* pool) {
  for (Part& part : parts) {
    if (part.route == route && part.columns.count() != 0) return part;
  }
  Part& part = parts.emplace_back();
  part.operation = this;
  part.route = route;
  part.columns.reserve(capacity, pool);
  return part;
}

void append_host_copies(Piece* piece, const HostCopy& copy) {
  const Shape& s = copy.shape;
  std::vector<HostCopy>* const out = &piece->host_copies;
  const size_t most = piece->job_nbytes;
  if (piece->fresh && s.contiguous()) {
    for (size_t x = 0; x < s.width;) {
      HostCopy page{copy.dst + x, copy.src + x, {}};
      page.shape.width = std::min(s.width - x, kHugePage - page.dst % kHugePage);
      out->push_back(page);
      x += page.shape.width;
    }
    return;
  }
  if (s.nbytes() <= most) {
    out->push_back(copy);
    return;
  }
  for (size_t z = 0; z < s.depth; ++z) {
    const uintptr_t dst = copy.dst + z * s.dst_slice;
    const uintptr_t src = copy.src + z * s.src_slice;
    const size_t rows = std::max<size_t>(1, most / s.width);
    for (size_t y = 0; y < s.height; y += rows) {
      HostCopy part{dst + y * s.dst_pitch, src + y * s.src_pitch, s};
      part.shape.depth = 1;
      part.shape.height = std::min(rows, s.height - y);
      if (part.shape.height > 1 || s.width <= most) {
        out->push_back(part);
        continue;
      }
      for (size_t x = 0; x < s.width; x += most) {
        HostCopy row{part.dst + x, part.src + x, {}};
        row.shape.width = std::min(most, s.width - x);
        out->push_back(row);
      }
    }
  }
}

bool cut_piece(Part& part, size_t limit, Piece* piece) {
  piece->part = &part;
  size_t used = 0;
  if (part.route == Route::kToHostStaged && limit > kHugePage && !part.exhausted()) {
    const Entry entry = part.entry(part.next_entry);
    const uintptr_t dst = entry.dst + part.next_offset;
    piece->fresh = entry.shape.contiguous() && untouched(dst);
    // The next piece begins with a huge page of its own.
    if (piece->fresh && limit < entry.shape.width - part.next_offset) limit -= (dst + limit) % kHugePage;
  }
  // Attributes reach the driver with contiguous copies only.
  const bool by_rows = !part.operation->attributes.empty();
  while (!part.exhausted() && used < limit && piece->device_copies.size() < kMaxDeviceCopies) {
    const Entry entry = part.entry(part.next_entry);
    const size_t room = limit - used;
    // A row is torn only where it has a piece to itself.
    if (room < entry.shape.width && !entry.shape.contiguous() && used != 0) break;
    Entry portion = portion_of(entry, part.next_offset, room, by_rows);
    const size_t nbytes = portion.shape.nbytes();
    if (staged(part.route)) {
      const uintptr_t slot = reinterpret_cast<uintptr_t>(piece->slot->memory) + used;
      HostCopy host{portion.dst, portion.src, portion.shape};
      if (part.route == Route::kToHostStaged) {
        portion.dst = slot;
        pack_dst(&portion.shape);
        host.src = slot;
        pack_src(&host.shape);
      } else {
        portion.src = slot;
        pack_src(&portion.shape);
        host.dst = slot;
        pack_dst(&host.shape);
      }
      append_host_copies(piece, host);
    }
    piece->device_copies.push_back(portion);
    piece->nbytes += nbytes;
    used += nbytes;
    if (staged(part.route)) used = (used + kSlotAlignment - 1) & ~(kSlotAlignment - 1);
    part.next_offset += nbytes;
    if (part.next_offset == entry.shape.nbytes()) {
      ++part.next_entry;
      part.next_offset = 0;
    }
  }
  return !piece->device_copies.empty();
}

void run_host_copy(const HostCopy& copy, bool streaming) {
  const Shape& s = copy.shape;
  for (size_t z = 0; z < s.depth; ++z) {
    uintptr_t dst = copy.dst + z * s.dst_slice;
    uintptr_t src = copy.src + z * s.src_slice;
    for (size_t y = 0; y < s.height; ++y, dst += s.dst_pitch, src += s.src_pitch) {
      void* to = reinterpret_cast<void*>(dst);
      const void* from = reinterpret_cast<const void*>(src);
      if (streaming) {
        streaming_copy(to, from, s.width);
      } else {
        std::memcpy(to, from, s.width);
      }
    }
  }
}

namespace {

// A huge page that comes at the first touch is written as other memory is. Small ones are asked for in steps, and those
// written through the cache: 21 GB/s in place of 14 (docs/explanation/measurements.md).
void run_fresh_copy(const HostCopy& copy) {
  const size_t nbytes = copy.shape.width;
  populate(copy.dst, 1);
  if (!untouched(copy.dst + nbytes - 1)) {
    streaming_copy(reinterpret_cast<void*>(copy.dst), reinterpret_cast<const void*>(copy.src), nbytes);
    return;
  }
  for (size_t x = 0; x < nbytes; x += kFreshStep) {
    const size_t step = std::min(kFreshStep, nbytes - x);
    populate(copy.dst + x, step);
    std::memcpy(reinterpret_cast<void*>(copy.dst + x), reinterpret_cast<const void*>(copy.src + x), step);
  }
}

}  // namespace

void run_host_copies(const Piece& piece) { run_host_copies(piece, 0, piece.host_copies.size()); }

void run_host_copies(const Piece& piece, size_t begin, size_t end) {
  // Stores into a slot stay in the cache, where the device reads them, unless the processors are about to go to sleep:
  // from the caches of those it reads at a third of the rate (docs/explanation/measurements.md). Stores to the caller's
  // memory would only push others out of the cache.
  const bool streaming = (piece.part->route == Route::kToHostStaged || piece.near_end) && piece.nbytes > kCacheable;
  for (size_t i = begin; i < end; ++i) {
    const HostCopy& copy = piece.host_copies[i];
    if (piece.fresh && copy.shape.contiguous()) {
      run_fresh_copy(copy);
    } else {
      run_host_copy(copy, streaming);
    }
  }
}

void copy_out(const Piece& landed) {
  if (landed.part->route == Route::kToHostStaged) run_host_copies(landed);
}

size_t job_end(const Piece& piece, size_t begin) {
  size_t nbytes = 0;
  size_t i = begin;
  while (i < piece.host_copies.size() && nbytes < piece.job_nbytes) nbytes += piece.host_copies[i++].shape.nbytes();
  return i;
}

}  // namespace aiocuda
