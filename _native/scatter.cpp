#include "scatter.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "table.h"
#include "threads.h"

namespace aiocuda {

extern const char scatter_ptx[];

struct Tuning {
  // Over the link: a stranger's small copy waits as long as beside the copy engine's pieces, which are smaller
  // (docs/explanation/measurements.md).
  size_t piece_nbytes;
  size_t table_nbytes;
  Rows rows;  // entries longer than one are shared among warps
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
};

namespace {

constexpr size_t kKiB = size_t{1} << 10;
constexpr size_t kMiB = size_t{1} << 20;

constexpr unsigned kThreads = 256;
constexpr unsigned kWarpsInBlock = kThreads / 32;
// A warp holds the rows that it takes at a time in its lanes.
constexpr unsigned kMostGroup = 32;
constexpr size_t kVector = 16;
constexpr size_t kMostTables = 80;
// Rows of rectangles that are shorter would fill more of a table than they move.
constexpr size_t kLeastWidth = 64;
// Entries that are looked at to choose the way of a piece; most batches have entries of one size.
constexpr size_t kSample = 64;

// Tables hold the rows of pieces of up to 32 MiB. How many pieces are on the device at a time is the channel's depth
// (engine.cpp).
constexpr Tuning kToHost{16 * kMiB, 256 * kKiB, {13, false}, 512 * kKiB, 64 * kKiB, 4, 16, 2 * kKiB};
constexpr Tuning kToDevice{16 * kMiB, 256 * kKiB, {13, true}, 512 * kKiB, 64 * kKiB, 12, 32, 8 * kKiB};
constexpr Tuning kOnDevice{256 * kMiB, kMiB, {14, false}, 4 * kMiB, 4 * kMiB, 0, 0, 0};
// Bundles are filled and emptied several times as fast as they cross the link.
constexpr Tuning kBundled{4 * kMiB, 256 * kKiB, {14, false}, 0, 0, 16, 128, 8 * kKiB};
// The link stands still until the first bundle is filled, or has come. Each costs a round of the engine, so that shorter
// rows, but for the end of one, are left to the kernel's own way over the link.
constexpr size_t kFirstBundle = kMiB;
constexpr size_t kLeastRow = 2 * kMiB;
constexpr size_t kLeastEnd = 64 * kKiB;
// Tiny entries fill the table of a bundle before they fill the bundle.
constexpr size_t kMostBundled = 8192;
constexpr size_t kBundles = 4;
// 80 registers a thread leave room for three.
constexpr unsigned kBlocksOnMultiprocessor = 3;

const Tuning& tuning_of(Route route) {
  return route == Route::kDeviceToDevice ? kOnDevice : to_host(route) ? kToHost : kToDevice;
}

Shape row_of(size_t nbytes) {
  Shape shape;
  shape.width = nbytes;
  return shape;
}

uintptr_t address_of(const Slot& slot) { return reinterpret_cast<uintptr_t>(slot.memory); }

// What the kernel cuts into rows by itself.
bool is_rectangle(const Shape& s, const Tuning& t) {
  return s.height != 1 && s.depth == 1 && s.width >= kLeastWidth && s.width >> t.rows.bits == 0;
}

// Whether a rectangle lies in one row on one of its sides.
bool is_one_row(const Shape& s, bool at_dst) {
  return is_rectangle(s, kBundled) && (at_dst ? s.dst_pitch : s.src_pitch) == s.width;
}

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
      if ((added != 0 && added + s.width > most) || table->rows + t.rows.most_of(s.width) > table->capacity) return added;
      table->add_rows(dst, src, s.width, t.rows);
      added += s.width;
    }
  }
  return added;
}

// What distinguishes an allocation from all others that have had its address; 0 where there is none.
uint64_t buffer_id(uint64_t address) {
  uint64_t id = 0;
  int attributes[] = {abi::kPointerBufferId};
  void* answers[] = {&id};
  return abi::driver.pointer_get_attributes(1, attributes, answers, address) == abi::kSuccess ? id : 0;
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
    bundles_.clear();
  }
  bundles_wanted_ = false;
  tables_.leak();
}

bool Scatter::ready() {
  const State state = state_.load(std::memory_order_acquire);
  if (state == State::kIdle) {
    state_.store(State::kLoading, std::memory_order_relaxed);
    const auto load_it = [this, context = context_, generation = generation_] { load(context, generation); };
    if (!try_start_thread("aiocuda-loader", load_it)) state_.store(State::kIdle, std::memory_order_relaxed);
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

size_t Scatter::piece_nbytes(const Part& part) {
  return suits_bundle(part) ? kBundled.piece_nbytes : tuning_of(part.route).piece_nbytes;
}

bool Scatter::suits(const Part& part) {
  if (!part.operation->attributes.empty()) return false;
  const Tuning& t = tuning_of(part.route);
  size_t entries = 0, rows = 0, nbytes = 0, least = SIZE_MAX, offset = part.next_offset;
  for (size_t i = part.next_entry; i < part.count() && entries < kSample && nbytes < t.piece_nbytes; ++i) {
    const Entry entry = part.entry(i);
    const Shape& s = entry.shape;
    // Rows do not lie in a slot as they do on the device.
    if (!s.contiguous() && (staged(part.route) || s.width < kLeastWidth)) break;
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
  Slot* const slot = take_table(tuning_of(part.route));
  if (slot == nullptr) return false;
  KernelTable table = cut_bundle(part, slot, piece);
  if (table.rows == 0) table = cut_columns(part, slot, piece);
  if (table.rows == 0) table = cut_rectangles(part, slot, piece);
  if (table.rows == 0) table = cut_entries(part, slot, piece);
  if (table.slot == nullptr) tables_.give(slot);
  if (table.rows == 0) return false;
  piece->part = &part;
  piece->table = table;
  return true;
}

Slot* Scatter::take_table(const Tuning& t) {
  abi::Result error = abi::kSuccess;
  Slot* const slot = tables_.take(t.table_nbytes, kMostTables, &error);
  if (slot == nullptr || reach().covers(address_of(*slot), slot->capacity)) return slot;
  tables_.give(slot);
  return nullptr;
}

bool Scatter::suits_bundle(const Part& part) {
  if (staged(part.route) || part.route == Route::kDeviceToDevice || part.next_offset != 0) return false;
  const bool gathers = to_host(part.route);
  const size_t least = part.next_entry == 0 ? kFirstBundle : kLeastRow;
  uint64_t end = 0;
  size_t nbytes = 0;
  for (size_t i = part.next_entry; i != part.count(); ++i) {
    if (i - part.next_entry == kMostBundled) return false;
    const Entry entry = part.entry(i);
    const uint64_t begin = gathers ? entry.dst : entry.src;
    if (nbytes != 0 && begin != end) return false;
    if (!entry.shape.contiguous() && !is_one_row(entry.shape, gathers)) return false;
    nbytes += entry.shape.nbytes();
    end = begin + entry.shape.nbytes();
    if (i != part.next_entry && nbytes >= least) return true;
  }
  return part.next_entry != 0 && nbytes >= kLeastEnd;
}

KernelTable Scatter::cut_bundle(Part& part, Slot* slot, Piece* piece) {
  if (!suits_bundle(part)) return {};
  const bool gathers = to_host(part.route);
  const Entry first = part.entry(part.next_entry);
  const bool alike = part.columns.count() != 0 ? part.columns.uniform() : !first.shape.contiguous();
  const size_t limit = part.next_entry == 0 ? kFirstBundle : kBundled.piece_nbytes;
  const uint64_t bundle = take_bundle();
  if (bundle == 0) return {};
  Table table(*slot, alike);
  Reach far = reach();
  const uint64_t near = gathers ? first.dst : first.src;
  size_t next = part.next_entry, used = 0;
  for (; next != part.count(); ++next) {
    const Entry entry = part.entry(next);
    const Shape& s = entry.shape;
    const size_t nbytes = s.nbytes();
    if ((gathers ? entry.dst : entry.src) != near + used || used + nbytes > limit) break;
    if (alike ? !(s == first.shape) || table.rows == table.capacity
              : !s.contiguous() || table.rows + kBundled.rows.most_of(nbytes) > table.capacity) {
      break;
    }
    if (!far.covers(gathers ? entry.src : entry.dst, extent(s, gathers ? s.src_pitch : s.dst_pitch, 0))) break;
    const uint64_t dst = gathers ? bundle + used : entry.dst, src = gathers ? entry.src : bundle + used;
    if (alike) {
      table.add(dst, src);
    } else {
      table.add_rows(dst, src, nbytes, kBundled.rows);
    }
    used += nbytes;
  }
  // A copy must not go beyond a registration.
  if (used < kLeastEnd || !reach().covers(near, used)) {
    give_bundle(bundle);
    return {};
  }
  piece->bundle = bundle;
  piece->bundled.dst = gathers ? near : bundle;
  piece->bundled.src = gathers ? bundle : near;
  piece->bundled.shape.width = used;
  if (alike) piece->each = first.shape;
  piece->nbytes = used;
  part.next_entry = next;
  return table.in(slot);
}

KernelTable Scatter::cut_columns(Part& part, Slot* slot, Piece* piece) {
  const Columns& columns = part.columns;
  if (columns.count() == 0 || !columns.uniform() || staged(part.route) || part.next_offset != 0) return {};
  Reach far = reach();
  if (!far.covers(columns.dst_hull) || !far.covers(columns.src_hull)) return {};
  const Tuning& t = tuning_of(part.route);
  const size_t each = columns.size(0), first = part.next_entry;
  Table table(*slot, true);
  // Pieces of one size: a small one at the end would cost as long as a large one. None has more rows than a table, also
  // where it needs none: over the link each takes a microsecond, however short, and who cancels waits for a piece.
  const size_t left = columns.count() - first;
  const size_t pieces = std::max((left * each + t.piece_nbytes / 2) / t.piece_nbytes,
                                 (left + table.capacity - 1) / table.capacity);
  const size_t n = (left + pieces - 1) / pieces;
  KernelTable found;
  const auto begin = reinterpret_cast<uintptr_t>(columns.dsts());
  if (columns.page_locked() && far.covers(begin, 2 * columns.capacity() * sizeof(uint64_t))) {
    found = {begin + first * sizeof(uint64_t), static_cast<uint32_t>(columns.capacity()), static_cast<uint32_t>(n)};
  } else {
    std::memcpy(table.dsts, columns.dsts() + first, n * sizeof(uint64_t));
    std::memcpy(table.srcs, columns.srcs() + first, n * sizeof(uint64_t));
    table.rows = static_cast<uint32_t>(n);
    found = table.in(slot);
  }
  piece->each.width = each;
  piece->nbytes = n * each;
  part.next_entry += n;
  return found;
}

KernelTable Scatter::cut_rectangles(Part& part, Slot* slot, Piece* piece) {
  if (part.columns.count() != 0 || staged(part.route) || part.next_offset != 0) return {};
  const Tuning& t = tuning_of(part.route);
  const Shape each = part.entry(part.next_entry).shape;
  if (!is_rectangle(each, t)) return {};
  Reach src_reach = reach(), dst_reach = reach();
  Table table(*slot, true);
  const size_t end = part.count();
  size_t next = part.next_entry, total = 0;
  for (; next != end && table.rows != table.capacity && total + each.nbytes() <= t.piece_nbytes; ++next) {
    const Entry entry = part.entry(next);
    if (!(entry.shape == each) || !src_reach.covers(entry.src, extent(each, each.src_pitch, 0)) ||
        !dst_reach.covers(entry.dst, extent(each, each.dst_pitch, 0))) {
      break;
    }
    table.add(entry.dst, entry.src);
    total += each.nbytes();
  }
  if (table.rows == 0) return {};
  piece->each = each;
  piece->nbytes = total;
  part.next_entry = next;
  return table.in(slot);
}

KernelTable Scatter::cut_entries(Part& part, Slot* slot, Piece* piece) {
  const Tuning& t = tuning_of(part.route);
  const bool is_staged = staged(part.route);
  Table table(*slot, false);
  Reach src_reach = reach(), dst_reach = reach();
  const uintptr_t staging = is_staged ? reinterpret_cast<uintptr_t>(piece->slot->memory) : 0;
  const size_t limit = is_staged ? piece->slot->capacity : t.piece_nbytes;
  if (is_staged && !(to_host(part.route) ? dst_reach : src_reach).covers(staging, limit)) return {};
  // In locals, because for all the compiler knows the table may lie over the part.
  const size_t end = part.count();
  size_t next = part.next_entry, offset = part.next_offset, used = 0, total = 0;
  for (; next != end && used < limit; ++next, offset = 0) {
    const Entry entry = part.entry(next);
    const Shape& s = entry.shape;
    if (!s.contiguous()) {
      if (is_staged || s.width > limit || s.width < kLeastWidth || offset % s.width != 0 ||
          !src_reach.covers(entry.src, extent(s, s.src_pitch, s.src_slice)) ||
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
    if (table.rows + t.rows.most_of(nbytes) > table.capacity) break;
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
    table.add_rows(dst, src, nbytes, t.rows);
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
  return table.in(slot);
}

bool Scatter::tabulate(const std::vector<Piece*>& pieces) {
  if (!ready()) return false;
  const Tuning& t = tuning_of(pieces.front()->part->route);
  Slot* const slot = take_table(t);
  if (slot == nullptr) return false;
  Table table(*slot, false);
  Reach far = reach();
  bool reachable = true;
  for (const Piece* piece : pieces) {
    for (const Entry& e : piece->device_copies) {
      const size_t nbytes = e.shape.width;
      reachable = reachable && e.shape.contiguous() && table.rows + t.rows.most_of(nbytes) <= table.capacity &&
                  far.covers(e.src, nbytes) && far.covers(e.dst, nbytes);
      if (reachable) table.add_rows(e.dst, e.src, nbytes, t.rows);
    }
  }
  if (!reachable) {
    tables_.give(slot);
    return false;
  }
  pieces.front()->table = table.in(slot);
  return true;
}

abi::Result Scatter::copy_one(const Piece& piece, char* memory, size_t nbytes, abi::Stream stream) {
  Slot slot;
  slot.memory = memory;
  slot.capacity = nbytes;
  Table table(slot, false);
  const Entry& e = piece.device_copies.front();
  if (!e.shape.contiguous() || !reach().covers(e.src, e.shape.width)) return abi::kErrorInvalidValue;
  table.add_rows(e.dst, e.src, e.shape.width, kToHost.rows);
  return enqueue(kToHost, 0, table.in(&slot), piece.each, e.shape.width, stream);
}

bool Scatter::launch(const Piece& piece, abi::Stream stream) {
  if (state() != State::kReady) return false;
  const Tuning& t = piece.bundle != 0 ? kBundled : tuning_of(piece.part->route);
  const unsigned blocks = piece.part->operation->quota->kernel_blocks;
  return enqueue(t, blocks, piece.table, piece.each, piece.nbytes, stream) == abi::kSuccess;
}

abi::Result Scatter::enqueue(const Tuning& t, unsigned wanted, const KernelTable& table, const Shape& each,
                             size_t total, abi::Stream stream) {
  const bool rectangles = each.height > 1;
  unsigned nbytes = static_cast<unsigned>(each.width), row_nbytes = 1u << t.rows.bits;
  unsigned parts = nbytes == 0 ? 1 : rectangles ? static_cast<unsigned>(each.height) : (nbytes - 1) / row_nbytes + 1;
  uint64_t dst_pitch = rectangles ? each.dst_pitch : 0, src_pitch = rectangles ? each.src_pitch : 0;
  abi::DevicePointer address = table.address;
  unsigned capacity = table.capacity, rows = table.rows * parts;
  unsigned blocks = t.blocks != 0 ? t.blocks : multiprocessors_ * kBlocksOnMultiprocessor;
  const size_t row = nbytes == 0 ? 1 : std::max<size_t>(1, total / rows);
  if (t.blocks != 0 && row < t.short_row) blocks = std::min<size_t>(t.most_blocks, blocks * t.short_row / row);
  if (t.blocks != 0 && wanted != 0) blocks = wanted;
  blocks = std::min(blocks, (rows + kWarpsInBlock - 1) / kWarpsInBlock);
  const unsigned warps = blocks * kWarpsInBlock;
  unsigned group = std::min((rows + warps - 1) / warps, kMostGroup);
  unsigned align_source = t.rows.align_source ? 1 : 0;
  void* parameters[] = {&address, &capacity, &rows, &group, &align_source,
                        &nbytes, &parts, &row_nbytes, &dst_pitch, &src_pitch};
  launches_.fetch_add(1, std::memory_order_relaxed);
  blocks_.store(blocks, std::memory_order_relaxed);
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
  const Table table(piece->table);
  const bool gathers = to_host(piece->part->route);
  const uint64_t shift = piece->bundle == 0 ? 0 : (gathers ? piece->bundled.dst : piece->bundled.src) - piece->bundle;
  const uint32_t rows = piece->device_copies.empty() ? table.rows : 0;
  for (uint32_t i = 0; i < rows; ++i) {
    const uint64_t dst = table.dsts[i] + (gathers ? shift : 0), src = table.srcs[i] + (gathers ? 0 : shift);
    const size_t nbytes = each.width != 0 ? each.width : table.sizes[i];
    if (each.contiguous() && !piece->device_copies.empty()) {
      Entry& last = piece->device_copies.back();
      const size_t width = last.shape.width;
      if (last.dst + width == dst && last.src + width == src) {
        last.shape.width += nbytes;
        continue;
      }
    }
    Entry entry;
    entry.dst = dst;
    entry.src = src;
    entry.shape = each;
    entry.shape.width = nbytes;
    piece->device_copies.push_back(entry);
  }
  if (piece->table.slot != nullptr) tables_.give(piece->table.slot);
  piece->table = {};
}

void Scatter::give_back(Piece* piece) {
  if (piece->table.slot != nullptr) tables_.give(piece->table.slot);
  if (piece->bundle != 0) give_bundle(piece->bundle);
  piece->table = {};
  piece->bundle = 0;
}

uint64_t Scatter::take_bundle() {
  if (!bundles_wanted_ && abi::driver.memory_alloc_async != nullptr) {
    making_.fetch_add(1);
    const auto make = [this, context = context_, generation = generation_] {
      make_bundles(context, generation);
      making_.fetch_sub(1);
    };
    bundles_wanted_ = try_start_thread("aiocuda-loader", make);
    if (!bundles_wanted_) making_.fetch_sub(1);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (bundles_.empty()) return 0;
  const uint64_t bundle = bundles_.back();
  bundles_.pop_back();
  return bundle;
}

void Scatter::give_bundle(uint64_t bundle) {
  std::lock_guard<std::mutex> lock(mutex_);
  bundles_.push_back(bundle);
}

void Scatter::make_bundles(abi::Context context, uint64_t generation) {
  // After a fault the next one may come before this one has ended.
  std::lock_guard<std::mutex> alone(making_mutex_);
  abi::Stream stream = nullptr;
  int mode = abi::kCaptureRelaxed;
  abi::Result result = abi::driver.context_set_current(context);
  if (result == abi::kSuccess) result = abi::driver.exchange_capture_mode(&mode);
  // That of a pool outlives its context.
  if (result == abi::kSuccess && (bundle_memory_ == 0 || buffer_id(bundle_memory_) != bundle_buffer_)) {
    // Asynchronously, because cuMemAlloc has others wait.
    result = abi::driver.stream_create(&stream, abi::kStreamNonBlocking);
    if (result == abi::kSuccess) {
      result = abi::driver.memory_alloc_async(&bundle_memory_, kBundles * kBundled.piece_nbytes, stream);
    }
    if (result == abi::kSuccess) bundle_buffer_ = buffer_id(bundle_memory_);
    if (result == abi::kSuccess) {
      while ((result = abi::driver.stream_query(stream)) == abi::kErrorNotReady) {
        const timespec nap{0, 100'000};
        nanosleep(&nap, nullptr);
      }
    }
    if (stream != nullptr) abi::driver.stream_destroy(stream);
  }
  if (result != abi::kSuccess) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) return;
  for (size_t i = 0; i < kBundles; ++i) bundles_.push_back(bundle_memory_ + i * kBundled.piece_nbytes);
}

}  // namespace aiocuda
