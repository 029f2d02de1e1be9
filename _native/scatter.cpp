#include "scatter.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "memory.h"
#include "threads.h"

namespace aiocuda {

extern const char scatter_ptx[];

namespace {

constexpr size_t kKiB = size_t{1} << 10;
constexpr size_t kMiB = size_t{1} << 20;

constexpr unsigned kThreads = 256;
constexpr unsigned kWarpsInBlock = kThreads / 32;
// A warp holds the rows that it takes at a time in its lanes.
constexpr unsigned kMostGroup = 32;
constexpr size_t kLine = 128;
constexpr size_t kVector = 16;
constexpr size_t kMostTables = 80;
// Rows of rectangles that are shorter would fill more of a table than they move.
constexpr size_t kLeastRow = 64;
// Entries that are looked at to choose the way of a piece; most batches have entries of one size.
constexpr size_t kSample = 64;

struct Tuning {
  // Over the link: a stranger's small copy waits as long as beside the copy engine's pieces, which are smaller
  // (docs/explanation/measurements.md).
  size_t piece_nbytes;
  size_t table_nbytes;
  unsigned row_bits;    // entries longer than rows of so many bits are shared among warps
  // From this mean size on, or where all entries are as large as the least one, the copy engine is about as fast, and
  // disturbs compute far less (docs/explanation/measurements.md).
  size_t crossover;
  size_t least;
  // Over the link the fewest that fill it: each further one slows down compute (docs/explanation/measurements.md). 0: as
  // many as run at once.
  unsigned blocks;
  // For entries of many sizes, which are seldom aligned alike, and for short rows.
  unsigned most_blocks;
  // Of a row a warp has so much in flight: with shorter ones it takes more warps to fill the link. To the device a reader
  // of memory is slowed down by 10 percent then, in place of 6, and 4 KiB arrive at 37 GB/s, in place of 34.
  size_t short_row;
  // Accesses over the link begin at a line, on the side that lies behind it.
  bool align_source;
};

// Tables hold the rows of pieces of up to 32 MiB. How many pieces are on the device at a time is the channel's depth
// (engine.cpp).
constexpr Tuning kToHost{16 * kMiB, 256 * kKiB, 13, 512 * kKiB, 64 * kKiB, 4, 16, 2 * kKiB, false};
constexpr Tuning kToDevice{16 * kMiB, 256 * kKiB, 13, 512 * kKiB, 64 * kKiB, 12, 32, 8 * kKiB, true};
constexpr Tuning kOnDevice{128 * kMiB, kMiB, 14, 4 * kMiB, 4 * kMiB, 0, 0, 0, false};
// 80 registers a thread leave room for three.
constexpr unsigned kBlocksOnMultiprocessor = 3;

const Tuning& tuning_of(Route route) {
  return route == Route::kDeviceToDevice ? kOnDevice : to_host(route) ? kToHost : kToDevice;
}

// The columns of a table, as scatter.cu reads them.
struct Table {
  Table(const Slot& slot, bool uniform)
      : capacity(static_cast<uint32_t>(slot.capacity / (uniform ? 16 : 20))),
        dsts(reinterpret_cast<uint64_t*>(slot.memory)),
        srcs(dsts + capacity),
        sizes(reinterpret_cast<uint32_t*>(srcs + capacity)) {}

  void add(uint64_t dst, uint64_t src, size_t nbytes) {
    dsts[rows] = dst;
    srcs[rows] = src;
    sizes[rows++] = static_cast<uint32_t>(nbytes);
  }

  // An entry in as many rows as it is long, each but the first beginning at a line.
  void add_entry(uint64_t dst, uint64_t src, size_t nbytes, const Tuning& t) {
    size_t most = (size_t{1} << t.row_bits) - (t.align_source ? src : dst) % kLine;
    while (nbytes > most) {
      add(dst, src, most);
      dst += most;
      src += most;
      nbytes -= most;
      most = size_t{1} << t.row_bits;
    }
    add(dst, src, nbytes);
  }

  const uint32_t capacity;
  uint64_t* const dsts;
  uint64_t* const srcs;
  uint32_t* const sizes;
  uint32_t rows = 0;
};

Shape row_of(size_t nbytes) {
  Shape shape;
  shape.width = nbytes;
  return shape;
}

size_t most_rows(size_t nbytes, const Tuning& t) { return (nbytes >> t.row_bits) + 2; }

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

  Range* find(uint64_t address) {
    for (Range& known : known_) {
      if (known.holds(address)) return &known;
    }
    Range* const found = &known_[next_++ % known_.size()];
    *found = look_up(address);
    return found;
  }

  Range look_up(uint64_t address) const {
    uint64_t context = 0, memory_type = 0, device_address = 0, ordinal = 0, start = 0, nbytes = 0;
    int attributes[] = {abi::kPointerContext,       abi::kPointerMemoryType, abi::kPointerDevicePointer,
                        abi::kPointerDeviceOrdinal, abi::kPointerRangeStart, abi::kPointerRangeSize};
    void* answers[] = {&context, &memory_type, &device_address, &ordinal, &start, &nbytes};
    if (abi::driver.pointer_get_attributes(6, attributes, answers, address) != abi::kSuccess) return {};
    if (device_address != address) return {};
    if (static_cast<uint32_t>(memory_type) == abi::kMemoryDevice) {
      if (static_cast<int>(static_cast<uint32_t>(ordinal)) != device_) return {};
      if (context != 0 && context != reinterpret_cast<uintptr_t>(context_)) return {};
    } else if (static_cast<uint32_t>(memory_type) != abi::kMemoryHost) {
      return {};
    }
    return {start, nbytes};
  }

  const abi::Context context_;
  const int device_;
  std::array<Range, 16> known_;
  Range* last_ = known_.data();
  size_t next_ = 0;
};

size_t extent(const Shape& s, size_t pitch, size_t slice) {
  return (s.depth - 1) * slice + (s.height - 1) * pitch + s.width;
}

// Fills a table with the rows of a rectangle, from an offset that is a whole number of rows on, and returns how many
// bytes it came to.
size_t add_rectangle(Table* table, const Entry& entry, size_t offset, size_t most, const Tuning& t) {
  const Shape& s = entry.shape;
  const size_t first = offset / s.width;
  size_t y = first % s.height, added = 0;
  for (size_t z = first / s.height; z < s.depth; ++z, y = 0) {
    uint64_t dst = entry.dst + z * s.dst_slice + y * s.dst_pitch;
    uint64_t src = entry.src + z * s.src_slice + y * s.src_pitch;
    for (; y < s.height; ++y, dst += s.dst_pitch, src += s.src_pitch) {
      if ((added != 0 && added + s.width > most) || table->rows + most_rows(s.width, t) > table->capacity) return added;
      table->add_entry(dst, src, s.width, t);
      added += s.width;
    }
  }
  return added;
}

int attribute(int device, abi::DeviceAttribute which) {
  int value = 0;
  abi::Device handle = 0;
  if (abi::driver.device_get(&handle, device) == abi::kSuccess) {
    abi::driver.device_get_attribute(&value, which, handle);
  }
  return value;
}

}  // namespace

void Scatter::open(abi::Context context) {
  context_ = context;
  multiprocessors_ = static_cast<unsigned>(std::max(1, attribute(device_, abi::kDeviceMultiprocessors)));
  const bool complete = abi::driver.module_load_data != nullptr && abi::driver.module_get_function != nullptr &&
                        abi::driver.launch_kernel != nullptr;
  // Elsewhere managed memory, whoever uses it, cannot be touched by the processor while any kernel runs.
  const bool harmless = attribute(device_, abi::kDeviceManagedMemory) == 0 ||
                        attribute(device_, abi::kDeviceConcurrentManagedAccess) != 0;
  std::lock_guard<std::mutex> lock(mutex_);
  ++generation_;
  state_.store(complete && harmless ? State::kIdle : State::kAbsent, std::memory_order_release);
}

void Scatter::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++generation_;
    state_.store(State::kAbsent, std::memory_order_release);
  }
  tables_.leak();
}

bool Scatter::ready() {
  const State state = state_.load(std::memory_order_acquire);
  if (state == State::kIdle) {
    state_.store(State::kLoading, std::memory_order_relaxed);
    start_thread("aiocuda-loader", [this, context = context_, generation = generation_] { load(context, generation); });
  }
  return state == State::kReady;
}

void Scatter::load(abi::Context context, uint64_t generation) {
  abi::Module module = nullptr;
  abi::Function function = nullptr;
  int mode = abi::kCaptureRelaxed;
  abi::Result result = abi::driver.context_set_current(context);
  if (result == abi::kSuccess) result = abi::driver.exchange_capture_mode(&mode);
  if (result == abi::kSuccess) result = abi::driver.module_load_data(&module, scatter_ptx);
  if (result == abi::kSuccess) {
    result = abi::driver.module_get_function(&function, module, "aiocuda_copy_scatter");
  }
  // Functions are loaded lazily otherwise: by the first launch, on the engine's thread.
  if (result == abi::kSuccess && abi::driver.function_load != nullptr) result = abi::driver.function_load(function);
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) return;
  function_ = function;
  state_.store(result == abi::kSuccess ? State::kReady : State::kAbsent, std::memory_order_release);
}

bool Scatter::takes(const Part& part) { return state() != State::kAbsent && suits(part) && ready(); }

size_t Scatter::piece_nbytes(Route route) { return tuning_of(route).piece_nbytes; }

bool Scatter::suits(const Part& part) {
  if (!part.operation->attributes.empty()) return false;
  const Tuning& t = tuning_of(part.route);
  size_t entries = 0, rows = 0, nbytes = 0, least = SIZE_MAX, offset = part.next_offset;
  for (size_t i = part.next_entry; i < part.count() && entries < kSample && nbytes < t.piece_nbytes; ++i) {
    const Entry entry = part.entry(i);
    const Shape& s = entry.shape;
    // Rows do not lie in a slot as they do on the device.
    if (!s.contiguous() && (staged(part.route) || s.width < kLeastRow)) break;
    const size_t before = nbytes;
    nbytes += std::min(s.nbytes() - offset, t.piece_nbytes - nbytes);
    rows += s.contiguous() ? 1 : (nbytes - before) / s.width + 1;
    least = std::min(least, s.contiguous() ? s.nbytes() : 0);
    offset = 0;
    ++entries;
  }
  return entries > 1 && nbytes / rows < t.crossover && least < t.least;
}

bool Scatter::cut(Part& part, Piece* piece) {
  const Tuning& t = tuning_of(part.route);
  abi::Result error = abi::kSuccess;
  Slot* const slot = tables_.take(t.table_nbytes, kMostTables, &error);
  if (slot == nullptr) return false;
  Reach own(context_, device_);
  if (own.covers(reinterpret_cast<uintptr_t>(slot->memory), slot->capacity)) {
    piece->rows = cut_columns(part, *slot, piece);
    if (piece->rows == 0) piece->rows = cut_rectangles(part, *slot, piece);
    if (piece->rows == 0) piece->rows = cut_entries(part, *slot, piece);
  }
  if (piece->rows == 0) {
    tables_.give(slot);
    return false;
  }
  piece->part = &part;
  piece->table = slot;
  return true;
}

uint32_t Scatter::cut_columns(Part& part, const Slot& slot, Piece* piece) {
  const Columns& columns = part.columns;
  if (columns.count() == 0 || !columns.uniform() || staged(part.route) || part.next_offset != 0) return 0;
  Reach reach(context_, device_);
  if (!reach.covers(columns.dst_hull) || !reach.covers(columns.src_hull)) return 0;
  const Tuning& t = tuning_of(part.route);
  const size_t each = columns.size(0), first = part.next_entry;
  const Table table(slot, true);
  const size_t n = std::min({columns.count() - first, size_t{table.capacity}, std::max<size_t>(1, t.piece_nbytes / each)});
  std::memcpy(table.dsts, columns.dsts() + first, n * sizeof(uint64_t));
  std::memcpy(table.srcs, columns.srcs() + first, n * sizeof(uint64_t));
  piece->each.width = each;
  piece->nbytes = n * each;
  part.next_entry += n;
  return static_cast<uint32_t>(n);
}

uint32_t Scatter::cut_rectangles(Part& part, const Slot& slot, Piece* piece) {
  if (part.columns.count() != 0 || staged(part.route) || part.next_offset != 0) return 0;
  const Tuning& t = tuning_of(part.route);
  const Shape each = part.entry(part.next_entry).shape;
  if (each.height == 1 || each.depth != 1 || each.width < kLeastRow || each.width >> t.row_bits != 0) return 0;
  Reach src_reach(context_, device_), dst_reach(context_, device_);
  Table table(slot, true);
  const size_t end = part.count();
  size_t next = part.next_entry, total = 0;
  for (; next != end && table.rows != table.capacity && total + each.nbytes() <= t.piece_nbytes; ++next) {
    const Entry entry = part.entry(next);
    if (!(entry.shape == each) || !src_reach.covers(entry.src, extent(each, each.src_pitch, 0)) ||
        !dst_reach.covers(entry.dst, extent(each, each.dst_pitch, 0))) {
      break;
    }
    table.dsts[table.rows] = entry.dst;
    table.srcs[table.rows++] = entry.src;
    total += each.nbytes();
  }
  if (table.rows == 0) return 0;
  piece->each = each;
  piece->nbytes = total;
  part.next_entry = next;
  return table.rows;
}

uint32_t Scatter::cut_entries(Part& part, const Slot& slot, Piece* piece) {
  const Tuning& t = tuning_of(part.route);
  const bool is_staged = staged(part.route);
  Table table(slot, false);
  Reach src_reach(context_, device_), dst_reach(context_, device_);
  const uintptr_t staging = is_staged ? reinterpret_cast<uintptr_t>(piece->slot->memory) : 0;
  const size_t limit = is_staged ? piece->slot->capacity : t.piece_nbytes;
  if (is_staged && !(to_host(part.route) ? dst_reach : src_reach).covers(staging, limit)) return 0;
  // In locals, because for all the compiler knows the table may lie over the part.
  const size_t end = part.count();
  size_t next = part.next_entry, offset = part.next_offset, used = 0, total = 0;
  for (; next != end && used < limit; ++next, offset = 0) {
    const Entry entry = part.entry(next);
    const Shape& s = entry.shape;
    if (!s.contiguous()) {
      if (is_staged || s.width > limit || s.width < kLeastRow || offset % s.width != 0 || !src_reach.covers(entry.src, extent(s, s.src_pitch, s.src_slice)) ||
          !dst_reach.covers(entry.dst, extent(s, s.dst_pitch, s.dst_slice))) {
        break;
      }
      const size_t nbytes = add_rectangle(&table, entry, offset, limit - used, t);
      total += nbytes;
      used += nbytes;
      offset += nbytes;
      if (offset != s.nbytes()) break;
      continue;
    }
    uintptr_t dst = entry.dst + offset;
    uintptr_t src = entry.src + offset;
    // In a slot an entry lies as it does on the device, so that both sides are cut into the same vectors.
    if (is_staged) {
      used = (used + kVector - 1) / kVector * kVector + (to_host(part.route) ? src : dst) % kVector;
      if (used >= limit) break;
    }
    const size_t nbytes = std::min(s.width - offset, limit - used);
    if (table.rows + most_rows(nbytes, t) > table.capacity) break;
    if (part.route == Route::kToHostStaged) {
      if (!src_reach.covers(src, nbytes)) break;
      append_host_copies(piece, {dst, staging + used, row_of(nbytes)});
      dst = staging + used;
    } else if (part.route == Route::kToDeviceStaged) {
      if (!dst_reach.covers(dst, nbytes)) break;
      append_host_copies(piece, {staging + used, src, row_of(nbytes)});
      src = staging + used;
    } else if (!src_reach.covers(src, nbytes) || !dst_reach.covers(dst, nbytes)) {
      break;
    }
    table.add_entry(dst, src, nbytes, t);
    total += nbytes;
    used += nbytes;
    if (offset + nbytes != s.width) {
      offset += nbytes;
      break;
    }
  }
  part.next_entry = next;
  part.next_offset = offset;
  piece->nbytes = total;
  return table.rows;
}

bool Scatter::tabulate(const std::vector<Piece*>& pieces) {
  if (!ready()) return false;
  const Tuning& t = tuning_of(pieces.front()->part->route);
  abi::Result error = abi::kSuccess;
  Slot* const slot = tables_.take(t.table_nbytes, kMostTables, &error);
  if (slot == nullptr) return false;
  Table table(*slot, false);
  Reach reach(context_, device_);
  bool reachable = reach.covers(reinterpret_cast<uintptr_t>(slot->memory), slot->capacity);
  for (const Piece* piece : pieces) {
    for (const Entry& e : piece->device_copies) {
      const size_t nbytes = e.shape.width;
      reachable = reachable && e.shape.contiguous() && table.rows + most_rows(nbytes, t) <= table.capacity &&
                  reach.covers(e.src, nbytes) && reach.covers(e.dst, nbytes);
      if (reachable) table.add_entry(e.dst, e.src, nbytes, t);
    }
  }
  if (!reachable) {
    tables_.give(slot);
    return false;
  }
  pieces.front()->table = slot;
  pieces.front()->rows = table.rows;
  return true;
}

abi::Result Scatter::copy_one(const Piece& piece, char* memory, size_t nbytes, abi::Stream stream) {
  Slot slot;
  slot.memory = memory;
  slot.capacity = nbytes;
  Table table(slot, false);
  const Entry& e = piece.device_copies.front();
  Reach reach(context_, device_);
  if (!e.shape.contiguous() || !reach.covers(e.src, e.shape.width)) return abi::kErrorInvalidValue;
  table.add_entry(e.dst, e.src, e.shape.width, kToHost);
  return enqueue(piece.part->route, reinterpret_cast<uintptr_t>(memory), table.capacity, table.rows, piece.each,
                 e.shape.width, stream);
}

bool Scatter::launch(const Piece& piece, abi::Stream stream) {
  if (state() != State::kReady) return false;
  const Table table(*piece.table, piece.each.width != 0);
  return enqueue(piece.part->route, reinterpret_cast<uintptr_t>(piece.table->memory), table.capacity, piece.rows,
                 piece.each, piece.nbytes, stream) == abi::kSuccess;
}

abi::Result Scatter::enqueue(Route route, abi::DevicePointer table, unsigned capacity, unsigned entries,
                             const Shape& each, size_t total, abi::Stream stream) {
  const Tuning& t = tuning_of(route);
  const bool rectangles = each.height > 1;
  unsigned nbytes = static_cast<unsigned>(each.width), row_nbytes = 1u << t.row_bits;
  unsigned parts = nbytes == 0 ? 1 : rectangles ? static_cast<unsigned>(each.height) : (nbytes - 1) / row_nbytes + 1;
  uint64_t dst_pitch = rectangles ? each.dst_pitch : 0, src_pitch = rectangles ? each.src_pitch : 0;
  unsigned rows = entries * parts;
  unsigned blocks = t.blocks != 0 ? t.blocks : multiprocessors_ * kBlocksOnMultiprocessor;
  const size_t row = nbytes == 0 ? 1 : std::max<size_t>(1, total / rows);
  if (t.blocks != 0 && row < t.short_row) blocks = std::min<size_t>(t.most_blocks, blocks * t.short_row / row);
  blocks = std::min(blocks, (rows + kWarpsInBlock - 1) / kWarpsInBlock);
  const unsigned warps = blocks * kWarpsInBlock;
  unsigned group = std::min((rows + warps - 1) / warps, kMostGroup);
  unsigned align_source = t.align_source ? 1 : 0;
  void* parameters[] = {&table, &capacity, &rows, &group, &align_source,
                        &nbytes, &parts, &row_nbytes, &dst_pitch, &src_pitch};
  launches_.fetch_add(1, std::memory_order_relaxed);
  abi::Function function;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    function = function_;
  }
  return abi::driver.launch_kernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, parameters, nullptr);
}

void Scatter::give_up(Piece* piece) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++generation_;
    state_.store(State::kAbsent, std::memory_order_release);
  }
  const Shape& each = piece->each;
  const Table table(*piece->table, each.width != 0);
  const uint32_t rows = piece->device_copies.empty() ? piece->rows : 0;
  for (uint32_t i = 0; i < rows; ++i) {
    const size_t nbytes = each.width != 0 ? each.width : table.sizes[i];
    if (each.contiguous() && !piece->device_copies.empty()) {
      Entry& last = piece->device_copies.back();
      const size_t width = last.shape.width;
      if (last.dst + width == table.dsts[i] && last.src + width == table.srcs[i]) {
        last.shape.width += nbytes;
        continue;
      }
    }
    Entry entry;
    entry.dst = table.dsts[i];
    entry.src = table.srcs[i];
    entry.shape = each;
    entry.shape.width = nbytes;
    piece->device_copies.push_back(entry);
  }
  give_table(piece);
}

void Scatter::give_table(Piece* piece) {
  if (piece->table == nullptr) return;
  tables_.give(piece->table);
  piece->table = nullptr;
}

}  // namespace aiocuda
