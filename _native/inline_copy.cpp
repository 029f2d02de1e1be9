#include "inline_copy.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "admission.h"
#include "clock.h"
#include "roads.h"
#include "scatter.h"

namespace aiocuda {
namespace {

// A slot whose beginning holds the two flags, a line apart; the kernel's table is behind them.
constexpr size_t kLaneNbytes = 4096;
constexpr size_t kLine = 64;
constexpr size_t kTableAt = 2 * kLine;

// A number comes in one write, and is seen whole or not at all: the slot itself tells of it, and no flag is needed. So few
// bytes, aligned on both sides, are read and written by one access each.
constexpr size_t kNumberBytes = 8;
// What is in a slot until then. A number that looks like it is found out by the flag, as one that is late is.
constexpr uint64_t kNothing = 0xa5c396f15a3c690f;

bool is_number(const Piece& piece) {
  const Entry& entry = piece.device_copies.front();
  const size_t nbytes = entry.shape.width;
  return piece.device_copies.size() == 1 && nbytes == piece.nbytes && nbytes <= kNumberBytes &&
         (nbytes & (nbytes - 1)) == 0 && entry.src % nbytes == 0;
}

template <typename Number>
bool differs(const char* memory) {
  return __atomic_load_n(reinterpret_cast<const Number*>(memory), __ATOMIC_ACQUIRE) != static_cast<Number>(kNothing);
}

bool has_come(const char* memory, size_t nbytes) {
  switch (nbytes) {
    case 1: return differs<uint8_t>(memory);
    case 2: return differs<uint16_t>(memory);
    case 4: return differs<uint32_t>(memory);
    default: return differs<uint64_t>(memory);
  }
}

// The line that is looked at stays in this processor's cache until the device writes to it.
template <typename Predicate>
bool spin(uint64_t ns, Predicate done) {
  for (const uint64_t end = now_ns() + ns;;) {
    for (int i = 0; i < 8; ++i) {
      if (done()) return true;
      pause();
    }
    if (now_ns() >= end) return false;
  }
}

}  // namespace

void InlineLane::open(abi::Context context, SlotPool* slots, Scatter* scatter) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Road* road : {&copy_engine_, &kernel_}) {
    *road = Road();
    if (abi::driver.stream_create(&road->stream, abi::kStreamNonBlocking) != abi::kSuccess) return;
  }
  // Never given back: a late flag write of a lane that was closed after a fault must not meet another use.
  abi::Result result = abi::kSuccess;
  lane_ = slots->take(kLaneNbytes, SIZE_MAX, &result);
  if (lane_ == nullptr) return;
  copy_engine_.flag = reinterpret_cast<volatile uint32_t*>(lane_->memory);
  kernel_.flag = reinterpret_cast<volatile uint32_t*>(lane_->memory + kLine);
  *copy_engine_.flag = *kernel_.flag = 0;
  context_ = context;
  slots_ = slots;
  scatter_ = scatter;
  ready_.store(true, std::memory_order_release);
}

Piece* InlineLane::new_piece(Operation* operation, Slot* slot) {
  Part& part = operation->parts.front();
  part.next_entry = part.next_offset = 0;
  Piece* piece = spare_ != nullptr ? spare_.release() : new Piece;
  piece->small = true;
  piece->slot = slot;
  cut_piece(part, kSmallBytes, piece);
  return piece;
}

void InlineLane::keep(Piece* piece) {
  slots_->give(piece->slot);
  std::vector<Entry> device_copies = std::move(piece->device_copies);
  std::vector<HostCopy> host_copies = std::move(piece->host_copies);
  piece->~Piece();
  new (piece) Piece;
  device_copies.clear();
  host_copies.clear();
  piece->device_copies = std::move(device_copies);
  piece->host_copies = std::move(host_copies);
  spare_.reset(piece);
}

abi::Result InlineLane::send(Road& road, const Piece& piece) {
  const Entry& entry = piece.device_copies.front();
  road.flagged = false;
  if (&road == &kernel_) return scatter_->copy_one(piece, lane_->memory + kTableAt, kLaneNbytes - kTableAt, road.stream);
  if (piece.part->route == Route::kToHostStaged)
    return abi::driver.copy_to_host_async(piece.slot->memory, entry.src, entry.shape.width, road.stream);
  return abi::driver.copy_to_device_async(entry.dst, piece.slot->memory, entry.shape.width, road.stream);
}

void InlineLane::send_flag(Road& road) {
  // Default flags: the write comes after the copy (hardware.md). Where it is refused, the mark behind it tells.
  road.flagged = abi::driver.stream_write_value32(road.stream, reinterpret_cast<abi::DevicePointer>(road.flag),
                                                  road.ticket + 1, 0) == abi::kSuccess;
  if (road.flagged) {
    ++road.ticket;
  } else if (&road == &kernel_) {
    // Nobody would know when the kernel has read its table.
    road.broken = true;
  }
}

InlineLane::Road* InlineLane::wait(Road* first, Road* second, uint64_t spin_ns) const {
  Road* done = nullptr;
  spin(spin_ns, [&] {
    for (Road* road : {first, second}) {
      if (road != nullptr && road->flagged && road->free()) done = road;
    }
    return done != nullptr;
  });
  return done;
}

InlineLane::Run InlineLane::run(Operation* operation, uint64_t spin_ns) {
  Run run;
  if (!ready_.load(std::memory_order_acquire)) return run;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return run;
  // To the device small copies do not starve, and two writes of one destination could not be told apart.
  const bool down = operation->parts.front().route == Route::kToHostStaged;
  const bool kernel_free = down && scatter_->state() == Scatter::State::kReady && kernel_.free();
  const bool by_kernel = kernel_free && (!copy_engine_.free() || avoided_->avoided(now_ns()));
  Road* const first = by_kernel ? &kernel_ : copy_engine_.free() ? &copy_engine_ : nullptr;
  // What the device writes to again and again it finds sooner (docs/explanation/measurements.md).
  Slot* slot = first == nullptr ? nullptr : slots_->take_free(kSmallBytes, /*last_used=*/true);
  if (slot == nullptr) return run;
  Piece* piece = new_piece(operation, slot);
  if (!down) run_host_copies(*piece);

  RelaxedCapture relaxed;
  CurrentContext current(context_);
  abi::Result result = current.result();
  const bool number = down && first == &copy_engine_ && is_number(*piece);
  if (number) std::memcpy(slot->memory, &kNothing, sizeof kNothing);
  if (result == abi::kSuccess) result = send(*first, *piece);
  if (result != abi::kSuccess) {
    slots_->give(slot);
    delete piece;
    operation->parts.front().next_entry = operation->parts.front().next_offset = 0;
    // The kernel may be refused, or not reach the memory; then the copy engine is waited for.
    if (first == &kernel_) return run;
    operation->result = result;
    run.outcome = Outcome::kFailed;
    return run;
  }
  Road* done = nullptr;
  const uint64_t number_ns = number ? road_times.number_ns.load(std::memory_order_relaxed) : 0;
  if (number && spin(number_ns, [&] { return has_come(piece->slot->memory, piece->nbytes); })) {
    done = first;
  } else {
    send_flag(*first);
    done = wait(first, nullptr, spin_ns - std::min(number_ns, spin_ns));
  }
  Road* second = nullptr;
  Piece* second_piece = nullptr;
  if (done == nullptr && down && first == &copy_engine_) {
    slot = kernel_free ? slots_->take_free(kSmallBytes, /*last_used=*/true) : nullptr;
    if (slot != nullptr) {
      second_piece = new_piece(operation, slot);
      if (send(kernel_, *second_piece) == abi::kSuccess) {
        send_flag(kernel_);
        second = &kernel_;
        done = wait(first, second, spin_ns);
      } else {
        slots_->give(slot);
        delete second_piece;
        second_piece = nullptr;
      }
    } else {
      scatter_->want();
    }
  }
  if (done == nullptr && !down) return park(operation, piece, *first);
  // One that was done while the kernel was at it had only been slow.
  if (down && first == &copy_engine_ && (done == first || first->flagged)) {
    done == first ? avoided_->prompt() : avoided_->late(now_ns());
  }
  for (Road* road : {first, second}) {
    Piece* const sent = road == first ? piece : second_piece;
    if (road == nullptr || road == done) continue;
    // It is let land. Where there can be no mark nobody learns when, and its slot is lost.
    Late& late = run.late[run.late_count];
    sent->part = nullptr;
    if (mark(*road, &late.mark) == abi::kSuccess) {
      late.piece = sent;
      ++run.late_count;
    } else {
      lose(sent);
    }
  }
  if (done == nullptr) {
    // Nothing of what has been sent counts: the engine tries again on both roads, which the operation is then whole for.
    operation->parts.front().next_entry = operation->parts.front().next_offset = 0;
    return run;
  }
  Piece* const landed = done == first ? piece : second_piece;
  if (down) run_host_copies(*landed);
  operation->nbytes_done.store(landed->nbytes, std::memory_order_relaxed);
  keep(landed);
  run.outcome = Outcome::kDone;
  return run;
}

InlineLane::Run InlineLane::park(Operation* operation, Piece* piece, const Road& road) {
  Run run;
  Mark end;
  const abi::Result result = mark(road, &end);
  if (result != abi::kSuccess) {
    lose(piece);
    operation->result = result;
    operation->leaked = true;
    run.outcome = Outcome::kFailed;
    return run;
  }
  operation->landed = piece;
  operation->in_stream = true;
  operation->phase.store(Phase::kAdmitted, std::memory_order_release);
  operation->marks.push_back(end);
  run.outcome = Outcome::kParked;
  return run;
}

abi::Result InlineLane::mark(const Road& road, Mark* mark) {
  mark->context = context_;
  return record_mark(road.stream, mark);
}

void InlineLane::lose(Piece* piece) {
  slots_->lose(piece->slot);
  delete piece;
}

}  // namespace aiocuda
