#include "channel.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "clock.h"
#include "engine.h"

namespace aiocuda {
namespace {

// A flight of small pieces takes 10 to 20 us.
constexpr uint64_t kOverdueNs = 50'000;
// So much of a copy the device has not read yet when the last of it has been written, also on a host with slow memory
// (docs/explanation/measurements.md).
constexpr size_t kNearEndBytes = size_t{16} << 20;
// Of smaller flights the time is not that of their bytes.
constexpr size_t kLargeFlight = size_t{1} << 20;

abi::Result enqueue_one(Route route, const Entry& e, abi::Stream stream) {
  const Shape& s = e.shape;
  if (s.contiguous()) {
    if (to_host(route)) return abi::driver.copy_to_host_async(reinterpret_cast<void*>(e.dst), e.src, s.width, stream);
    if (to_device(route)) {
      return abi::driver.copy_to_device_async(e.dst, reinterpret_cast<const void*>(e.src), s.width, stream);
    }
    return abi::driver.copy_async(e.dst, e.src, s.width, stream);
  }
  abi::Copy3D copy = {};
  copy.src_type = to_device(route) ? abi::kMemoryHost : abi::kMemoryDevice;
  copy.dst_type = to_host(route) ? abi::kMemoryHost : abi::kMemoryDevice;
  copy.src_host = reinterpret_cast<const void*>(e.src);
  copy.src_device = e.src;
  copy.dst_host = reinterpret_cast<void*>(e.dst);
  copy.dst_device = e.dst;
  // The driver takes the slice as a number of rows; where it is no multiple of the pitch, enqueue_copy() goes slice by slice.
  copy.src_pitch = s.src_pitch;
  copy.dst_pitch = s.dst_pitch;
  copy.src_height = s.depth > 1 ? s.src_slice / s.src_pitch : s.height;
  copy.dst_height = s.depth > 1 ? s.dst_slice / s.dst_pitch : s.height;
  copy.width = s.width;
  copy.height = s.height;
  copy.depth = s.depth;
  return abi::driver.copy_3d_async(&copy, stream);
}

// Whether one call can move all slices.
bool sliced(const Shape& s) {
  return s.depth > 1 && (s.src_slice % s.src_pitch != 0 || s.dst_slice % s.dst_pitch != 0);
}

abi::Result enqueue_copy(Route route, const Entry& entry, abi::Stream stream) {
  if (!sliced(entry.shape)) return enqueue_one(route, entry, stream);
  Entry slice = entry;
  slice.shape.depth = 1;
  for (size_t z = 0; z < entry.shape.depth; ++z) {
    slice.dst = entry.dst + z * entry.shape.dst_slice;
    slice.src = entry.src + z * entry.shape.src_slice;
    const abi::Result result = enqueue_one(route, slice, stream);
    if (result != abi::kSuccess) return result;
  }
  return abi::kSuccess;
}

}  // namespace

abi::Result Channel::open_stream(abi::Stream* stream) const {
  // The driver takes what is beyond its range for the end of it.
  return config_.first && abi::driver.stream_create_with_priority != nullptr
             ? abi::driver.stream_create_with_priority(stream, abi::kStreamNonBlocking, INT_MIN)
             : abi::driver.stream_create(stream, abi::kStreamNonBlocking);
}

abi::Result Channel::open() {
  streams_.assign(config_.streams, nullptr);
  events_.clear();
  last_event_ = nullptr;
  abi::Result result = abi::kSuccess;
  for (abi::Stream& stream : streams_) {
    if (result == abi::kSuccess) result = open_stream(&stream);
  }
  if (result == abi::kSuccess && config_.scatters) result = open_stream(&scattering_);
  return result;
}

abi::Result Channel::take_event(abi::Event* event) {
  if (events_.empty()) return abi::driver.event_create(event, abi::kEventDisableTiming);
  *event = events_.back();
  events_.pop_back();
  return abi::kSuccess;
}

void Channel::sweep() {
  for (size_t left = active_.size(); left != 0; --left) {
    Part* part = active_.front();
    active_.pop_front();
    if (part->exhausted() || engine_.stopped(*part->operation)) {
      part->next_entry = part->count();
      part->listed = false;
      engine_.settle(part);
    } else {
      active_.push_back(part);
    }
  }
}

void Channel::drop_stopped() {
  sweep();
  for (size_t left = ready_.size(); left != 0; --left) {
    Piece* piece = ready_.front();
    ready_.pop_front();
    if (piece->part != nullptr && piece->twin == nullptr && engine_.stopped(*piece->part->operation)) {
      engine_.came_back(piece);
    } else {
      ready_.push_back(piece);
    }
  }
}

Piece* Channel::cut(Part* part) {
  const bool by_kernel = !config_.small && engine_.scatter().takes(*part);
  size_t limit = config_.piece_nbytes;
  Slot* slot = nullptr;
  if (staged(part->route)) {
    slot = engine_.take_slot(part, config_.small);
    if (slot == nullptr) return nullptr;
    limit = slot->capacity;
  }
  Piece* piece = new Piece;
  piece->slot = slot;
  piece->small = config_.small;
  const bool first = part->next_entry == 0 && part->next_offset == 0;
  if (first || part->left <= limit) piece->job_nbytes = kJobBytesAtEnds;
  piece->near_end = !config_.small && part->route == Route::kToDeviceStaged &&
                    part->left <= std::max(limit, kNearEndBytes) && active_.size() == 1;
  if (!by_kernel || !engine_.scatter().cut(*part, piece)) cut_piece(*part, limit, piece);
  part->left -= std::min(part->left, piece->nbytes);
  ++part->outstanding;
  return piece;
}

bool Channel::fill() {
  if (config_.small) return false;
  bool progress = false;
  // One piece a part and turn, so that copies that run at once share the slots.
  for (bool again = true; again;) {
    again = false;
    for (Part* part : active_) {
      if (part->route != Route::kToDeviceStaged || part->exhausted() || engine_.stopped(*part->operation)) continue;
      Piece* piece = cut(part);
      if (piece == nullptr) continue;
      engine_.hand_to_workers(piece);
      again = progress = true;
    }
  }
  return progress;
}

Piece* Channel::next_piece() {
  while (!ready_.empty()) {
    Piece* piece = ready_.front();
    ready_.pop_front();
    if (piece->part != nullptr) return piece;
    engine_.discard(piece);
  }
  for (size_t left = active_.size(); left != 0; --left) {
    Part* part = active_.front();
    active_.pop_front();
    active_.push_back(part);
    if (part->exhausted() || engine_.stopped(*part->operation)) continue;
    if (part->route == Route::kToDeviceStaged && !config_.small) continue;
    Piece* piece = cut(part);
    if (piece == nullptr) continue;
    if (part->route == Route::kToDeviceStaged) run_host_copies(*piece);
    return piece;
  }
  return nullptr;
}

bool Channel::issue() {
  bool progress = false;
  while (flights_.size() < config_.depth && !(active_.empty() && ready_.empty())) {
    std::vector<Piece*> pieces;
    while (pieces.size() < config_.group) {
      Piece* piece = next_piece();
      if (piece == nullptr) break;
      pieces.push_back(piece);
    }
    sweep();
    if (pieces.empty()) break;
    if (!launch(std::move(pieces))) return true;
    progress = true;
  }
  return progress;
}

namespace {

abi::Result enqueue_batch(const Piece& piece, abi::Stream stream) {
  const Operation& operation = *piece.part->operation;
  const size_t n = piece.device_copies.size();
  std::vector<abi::DevicePointer> dsts(n), srcs(n);
  std::vector<size_t> sizes(n);
  std::vector<abi::CopyAttributes> attributes;
  std::vector<size_t> runs;
  for (size_t i = 0; i < n; ++i) {
    const Entry& e = piece.device_copies[i];
    dsts[i] = e.dst;
    srcs[i] = e.src;
    sizes[i] = e.shape.width;
    if (i == 0 || e.attributes != piece.device_copies[i - 1].attributes) {
      abi::CopyAttributes a = {};
      a.source_access_order = abi::kAccessOrderStream;
      if (!operation.attributes.empty()) a = operation.attributes[e.attributes];
      attributes.push_back(a);
      runs.push_back(i);
    }
  }
  if (abi::driver.copy_batch_async_13000 != nullptr) {
    return abi::driver.copy_batch_async_13000(dsts.data(), srcs.data(), sizes.data(), n, attributes.data(), runs.data(),
                                              runs.size(), stream);
  }
  size_t failed = 0;
  return abi::driver.copy_batch_async_12080(dsts.data(), srcs.data(), sizes.data(), n, attributes.data(), runs.data(),
                                            runs.size(), &failed, stream);
}

}  // namespace

abi::Result enqueue_piece(const Piece& piece, abi::Stream stream, bool may_batch) {
  const bool contiguous = std::all_of(piece.device_copies.begin(), piece.device_copies.end(),
                                      [](const Entry& e) { return e.shape.contiguous(); });
  const bool batch = piece.device_copies.size() > 1 || !piece.part->operation->attributes.empty();
  if (may_batch && batch && contiguous && abi::has_batch()) return enqueue_batch(piece, stream);
  for (const Entry& entry : piece.device_copies) {
    const abi::Result result = enqueue_copy(piece.part->route, entry, stream);
    if (result != abi::kSuccess) return result;
  }
  return abi::kSuccess;
}

void Channel::enqueue(Piece* piece, abi::Stream stream) {
  if (piece->table.rows != 0) {
    if (engine_.scatter().launch(*piece, stream)) return;
    engine_.scatter().give_up(piece);
  }
  engine_.report(*piece->part->operation, enqueue_piece(*piece, stream, true));
}

void Channel::gather(Piece* piece, abi::Stream stream) {
  if (!engine_.scatter().launch(*piece, stream)) engine_.scatter().give_up(piece);
}

abi::Result Channel::scatter(Piece* piece, abi::Stream stream, Flight* flight) {
  const abi::Result copied = enqueue_copy(piece->part->route, piece->bundled, stream);
  engine_.report(*piece->part->operation, copied);
  if (copied != abi::kSuccess) return abi::kSuccess;
  abi::Result result = take_event(&flight->crossed);
  if (result == abi::kSuccess) result = abi::driver.event_record(flight->crossed, stream);
  if (result == abi::kSuccess) result = abi::driver.stream_wait_event(scattering_, flight->crossed, 0);
  if (result == abi::kSuccess) enqueue(piece, scattering_);
  return result;
}

bool Channel::enqueue_table(const std::vector<Piece*>& pieces, abi::Stream stream) {
  if (config_.road == Road::kCopyEngine) return false;
  if (config_.road == Road::kKernelForCrowds && pieces.size() < kCrowd) return false;
  Piece& first = *pieces.front();
  if (!engine_.scatter().tabulate(pieces)) return false;
  if (engine_.scatter().launch(first, stream)) return true;
  engine_.scatter().give_up(&first);
  return false;
}

bool Channel::launch(std::vector<Piece*> pieces) {
  Flight flight{nullptr, std::move(pieces), now_ns()};
  abi::Stream stream = streams_[turn_++ % streams_.size()];
  // Before anything can fail: from here on they are given up as what is on the device is.
  for (Piece* piece : flight.pieces) piece->launched = true;
  Piece* const first = flight.pieces.front();
  const bool gathers = first->bundle != 0 && to_host(first->part->route);
  // The copies before it may still be on their way meanwhile.
  if (gathers) gather(first, stream);
  abi::Result result = take_event(&flight.event);
  if (result == abi::kSuccess && streams_.size() > 1 && !flights_.empty()) {
    result = abi::driver.stream_wait_event(stream, last_event_, 0);
  }
  if (result == abi::kSuccess) {
    if (gathers && first->table.rows != 0) {
      engine_.report(*first->part->operation, enqueue_copy(first->part->route, first->bundled, stream));
    } else if (first->bundle != 0 && !gathers) {
      result = scatter(first, stream, &flight);
      stream = scattering_;
    } else if (!enqueue_table(flight.pieces, stream)) {
      for (Piece* piece : flight.pieces) enqueue(piece, stream);
    }
  }
  if (result == abi::kSuccess) result = abi::driver.event_record(flight.event, stream);
  last_event_ = flight.event;
  flights_.push_back(std::move(flight));
  // Without its event nobody would learn that the flight has landed.
  if (result != abi::kSuccess) engine_.fault(result);
  return result == abi::kSuccess;
}

size_t Channel::Flight::nbytes() const {
  size_t sum = 0;
  for (const Piece* piece : pieces) sum += piece->nbytes;
  return sum;
}

uint64_t Channel::end_ns() const {
  if (flights_.size() != 1 || config_.small || bytes_per_ns_ == 0) return 0;
  const Flight& last = flights_.front();
  const Part* part = last.pieces.back()->part;
  if (part == nullptr || !part->ending()) return 0;
  return begun_ns(last) + static_cast<uint64_t>(static_cast<double>(last.nbytes()) / bytes_per_ns_);
}

void Channel::foresee(Flight& flight) {
  const uint64_t end = end_ns();
  if (flight.foreseen || end == 0) return;
  const Part& part = *flight.pieces.back()->part;
  // What goes through the workers is announced when they have come to the last of it.
  if (part.route == Route::kToHostStaged) return;
  CompletionQueue& queue = *part.operation->queue;
  if (now_ns() + queue.wake_takes_ns() < end) return;
  flight.foreseen = true;
  queue.announce();
}

bool Channel::retire() {
  bool progress = false;
  while (!flights_.empty()) {
    const abi::Result result = abi::driver.event_query(flights_.front().event);
    if (result == abi::kErrorNotReady) {
      foresee(flights_.front());
      break;
    }
    if (result != abi::kSuccess) {
      engine_.fault(result);
      return true;
    }
    Flight flight = std::move(flights_.front());
    flights_.pop_front();
    events_.push_back(flight.event);
    if (flight.crossed != nullptr) events_.push_back(flight.crossed);
    const uint64_t now = now_ns();
    if (const size_t nbytes = flight.nbytes(); nbytes >= kLargeFlight && now > begun_ns(flight)) {
      const double latest = static_cast<double>(nbytes) / static_cast<double>(now - begun_ns(flight));
      bytes_per_ns_ = bytes_per_ns_ == 0 ? latest : (bytes_per_ns_ + latest) / 2;
    }
    last_landed_ns_ = now;
    for (Piece* piece : flight.pieces) engine_.landed(piece);
    progress = true;
  }
  return progress;
}

bool Channel::overdue(uint64_t now) const {
  return !flights_.empty() && now - flights_.front().since_ns > kOverdueNs;
}

std::vector<Piece*> Channel::without_twin() const {
  std::vector<Piece*> found;
  for (const Flight& flight : flights_) {
    for (Piece* piece : flight.pieces) {
      // Where the await could not wait for both roads, there is one.
      if (piece->part != nullptr && piece->twin == nullptr && piece->part->operation->droppable &&
          !engine_.stopped(*piece->part->operation)) {
        found.push_back(piece);
      }
    }
  }
  return found;
}

void Channel::take_over(Channel& other, bool all) {
  std::deque<Part*> parts;
  parts.swap(other.active_);
  for (Part* part : parts) (all || part->operation->droppable ? active_ : other.active_).push_back(part);
}

void Channel::abandon() {
  std::deque<Flight> flights;
  flights.swap(flights_);
  for (Flight& flight : flights) {
    for (Piece* piece : flight.pieces) {
      engine_.lost(piece);
    }
  }
  std::deque<Piece*> ready;
  ready.swap(ready_);
  for (Piece* piece : ready) {
    if (piece->part != nullptr && piece->twin == nullptr) {
      engine_.came_back(piece);
      continue;
    }
    if (piece->twin != nullptr) piece->twin->twin = nullptr;
    engine_.discard(piece);
  }
  sweep();
}

}  // namespace aiocuda
