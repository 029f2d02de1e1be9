#include "inline_copy.h"

#include "admission.h"
#include "clock.h"

namespace aiocuda {
namespace {

constexpr size_t kFlagSlot = 4096;

bool seen(const volatile uint32_t* flag, uint32_t value) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE) == value; }

}  // namespace

void InlineLane::open(abi::Context context, SlotPool* slots) {
  std::lock_guard<std::mutex> lock(mutex_);
  abi::Result result = abi::driver.stream_create(&stream_, abi::kStreamNonBlocking);
  if (result != abi::kSuccess) return;
  // Never given back: a late flag write of a lane that was closed after a fault must not meet another use.
  Slot* slot = slots->take(kFlagSlot, SIZE_MAX, &result);
  if (slot == nullptr) return;
  flag_ = reinterpret_cast<volatile uint32_t*>(slot->memory);
  *flag_ = ticket_ = 0;
  context_ = context;
  slots_ = slots;
  ready_.store(true, std::memory_order_release);
}

InlineLane::Outcome InlineLane::run(Operation* operation, uint64_t spin_ns) {
  if (!ready_.load(std::memory_order_acquire)) return Outcome::kDeclined;
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return Outcome::kDeclined;
  Slot* slot = slots_->take_free(kSmallBytes);
  if (slot == nullptr) return Outcome::kDeclined;

  Part& part = operation->parts.front();
  Piece* piece = new Piece;
  piece->small = true;
  piece->slot = slot;
  cut_piece(part, kSmallBytes, piece);
  const bool down = part.route == Route::kToHostStaged;
  if (!down) run_host_copies(*piece);
  const Entry& entry = piece->device_copies.front();

  RelaxedCapture relaxed;
  CurrentContext current(context_);
  abi::Result result = current.result();
  if (result == abi::kSuccess) {
    result = down ? abi::driver.copy_to_host_async(slot->memory, entry.src, entry.shape.width, stream_)
                  : abi::driver.copy_to_device_async(entry.dst, slot->memory, entry.shape.width, stream_);
  }
  if (result != abi::kSuccess) {
    slots_->give(slot);
    delete piece;
    operation->result = result;
    return Outcome::kFailed;
  }
  const uint32_t ticket = ++ticket_;
  // Default flags: the write comes after the copy (hardware.md). Without the flag the event below tells.
  result = abi::driver.stream_write_value32(stream_, reinterpret_cast<abi::DevicePointer>(flag_), ticket, 0);
  if (result != abi::kSuccess) spin_ns = 0;
  bool done = seen(flag_, ticket);
  for (const uint64_t end = now_ns() + spin_ns; !done && now_ns() < end; done = seen(flag_, ticket)) {
    for (int i = 0; i < 4 && !seen(flag_, ticket); ++i) pause();
  }
  if (done) {
    if (down) run_host_copies(*piece);
    operation->nbytes_done.store(piece->nbytes, std::memory_order_relaxed);
    slots_->give(slot);
    delete piece;
    return Outcome::kDone;
  }
  operation->landed = piece;
  operation->in_stream = true;
  operation->phase.store(Phase::kAdmitted, std::memory_order_release);
  Mark mark;
  mark.context = context_;
  result = record_mark(stream_, &mark);
  if (result != abi::kSuccess) {
    operation->landed = nullptr;
    slots_->lose(slot);
    delete piece;
    operation->result = result;
    operation->leaked = true;
    return Outcome::kFailed;
  }
  operation->marks.push_back(mark);
  return Outcome::kParked;
}

}  // namespace aiocuda
