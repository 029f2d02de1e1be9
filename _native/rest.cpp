// When the engine's thread sleeps, what wakes it, and whom it wakes ahead of time.
#include <algorithm>

#include "clock.h"
#include "engine.h"
#include "futex.h"

namespace aiocuda {
namespace {

// After progress the engine looks again at once, and then at intervals that grow with the time it has waited: a small
// copy takes 6 us, a piece 75, a kernel anything. So a wait is lengthened by one percent, the processor is left alone
// during long ones, and the longest interval bounds what a missed wake costs.
constexpr uint64_t kSpinNs = 30'000;
// Batches take up to so long to prepare.
constexpr uint64_t kRousedNs = 150'000;
constexpr uint64_t kShortestNapNs = 5'000;
// Where there are few processors the others need them more.
constexpr uint64_t kShortestModestNapNs = 20'000;
constexpr uint64_t kLongestNapNs = 2'000'000;
constexpr uint64_t kNapsPerWait = 400;
constexpr uint64_t kModestNapsPerWait = 100;
// From then on a host function is worth its while: it wakes the engine some 70 us after the mark.
constexpr uint64_t kHintAfterNs = 5'000'000;
// A nap may last so much longer than it should.
constexpr uint64_t kNapErrorNs = 100'000;

}  // namespace

void Engine::wake() {
  signal_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst)) futex_wake(&signal_);
}

void Engine::rouse() {
  if (!may_spin_) return;
  roused_until_ns_.store(now_ns() + kRousedNs, std::memory_order_seq_cst);
  wake();
}

void Engine::hint(uint64_t now) {
  for (auto& [key, line] : waiting_) {
    Operation* operation = line.front();
    if (operation->hinted || !operation->quota->host_function_hints) continue;
    if (now - operation->waiting_since_ns < kHintAfterNs) continue;
    operation->hinted = gates_.set(operation->marks.back(), this);
  }
}

uint64_t Engine::foresee_waits(uint64_t now) {
  uint64_t next = UINT64_MAX;
  for (auto& [key, line] : waiting_) {
    Operation* operation = line.front();
    if (!operation->droppable) continue;
    const uint64_t end = forecast_.end_of(key, operation->waiting_since_ns);
    if (end == 0 || now > end + Forecast::kToleranceNs) continue;
    const uint64_t due = end - operation->queue->wake_takes_ns();
    if (now >= due && !operation->foreseen) {
      operation->foreseen = true;
      operation->queue->announce();
    }
    next = std::min(next, due - kNapErrorNs);
  }
  return next;
}

bool Engine::quiet() const {
  return alive_count_ == 0 && !small_to_host_.in_flight() && !small_by_kernel_.in_flight();
}

void Engine::rest(uint32_t seen) {
  const uint64_t now = now_ns(), since = now - last_progress_ns_;
  uint64_t next = may_spin_ ? foresee_waits(now) : UINT64_MAX;
  if (may_spin_) {
    each_channel([&](const Channel& c) {
      const uint64_t end = c.end_ns();
      if (end != 0 && now < end + kNapErrorNs) next = std::min(next, end - kNapErrorNs);
    });
  }
  // Also when there is nothing to do: the next of a row of awaits comes within microseconds, and waking a thread takes
  // longer than that.
  if (may_spin_ && (since < kSpinNs || now >= next || now < roused_until_ns_.load(std::memory_order_relaxed))) {
    for (int i = 0; i < 16; ++i) pause();
    return;
  }
  uint64_t timeout = 0;
  if (!quiet()) {
    timeout = may_spin_ ? std::clamp(since / kNapsPerWait, kShortestNapNs, kLongestNapNs)
                        : std::clamp(since / kModestNapsPerWait, kShortestModestNapNs, kLongestNapNs);
    timeout = std::min(timeout, next - now);
    hint(now);
  }
  asleep_.store(true, std::memory_order_seq_cst);
  const timespec limit{0, static_cast<long>(timeout)};
  if (signal_.load(std::memory_order_seq_cst) == seen) {
    futex_wait(&signal_, seen, timeout == 0 ? nullptr : &limit);
  }
  asleep_.store(false, std::memory_order_seq_cst);
}

}  // namespace aiocuda
