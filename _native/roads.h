// The two roads of small copies to the host, see roads.cpp.
#pragma once
#include <atomic>
#include <cstdint>

namespace aiocuda {

// They may be changed at any time, which tests do.
struct RoadTimes {
  // Somebody who keeps the copy engine busy does so for a while: after a copy was late there others go by the kernel at
  // once, for so long at most. So few are on both roads, which are those whose awaits the slower road may hold up.
  std::atomic<uint64_t> avoided_ns{100'000'000};
  // An await whose copy is on both roads waits for the slower one, which still reads the source, but no longer than that:
  // behind somebody's bulk it may take seconds.
  std::atomic<uint64_t> linger_ns{10'000'000};
  // A call looks at its slot for so long, and asks for a flag only then.
  std::atomic<uint64_t> number_ns{5'000};
};
inline RoadTimes road_times;

// What is known of a device's copy engine. Any thread.
class CopyEngine {
 public:
  // One late copy may be the first after a pause; each further one that is late when it is tried again doubles the time.
  void late(uint64_t now_ns) {
    const unsigned steps = steps_.load(std::memory_order_relaxed);
    if (!avoided(now_ns) && steps != 0) steps_.store(steps - 1, std::memory_order_relaxed);
    late_at_ns_.store(now_ns, std::memory_order_relaxed);
  }
  void prompt() {
    const unsigned steps = steps_.load(std::memory_order_relaxed);
    if (steps != kSteps) steps_.store(steps + 1, std::memory_order_relaxed);
  }
  bool avoided(uint64_t now_ns) const {
    return now_ns < late_at_ns_.load(std::memory_order_relaxed) +
                        (road_times.avoided_ns.load(std::memory_order_relaxed) >> steps_.load(std::memory_order_relaxed));
  }

 private:
  static constexpr unsigned kSteps = 8;

  std::atomic<uint64_t> late_at_ns_{0};
  std::atomic<unsigned> steps_{kSteps};  // the time is halved so often
};

}  // namespace aiocuda
