// The two roads of small copies to the host, see roads.cpp.
#pragma once
#include <atomic>
#include <cstdint>

namespace aiocuda {

// Both may be changed at any time, which tests do.
struct RoadTimes {
  // Somebody who keeps the copy engine busy does so for a while: for so long after a copy was late there, others go by the
  // kernel at once. So few are on both roads, which are those whose awaits the slower road may hold up.
  std::atomic<uint64_t> avoided_ns{100'000'000};
  // An await whose copy is on both roads waits for the slower one, which still reads the source, but no longer than that:
  // behind somebody's bulk it may take seconds.
  std::atomic<uint64_t> linger_ns{10'000'000};
};
inline RoadTimes road_times;

// What is known of a device's copy engine. Any thread.
class CopyEngine {
 public:
  void late(uint64_t now_ns) { late_at_ns_.store(now_ns, std::memory_order_relaxed); }
  bool avoided(uint64_t now_ns) const {
    return now_ns < late_at_ns_.load(std::memory_order_relaxed) + road_times.avoided_ns.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<uint64_t> late_at_ns_{0};
};

}  // namespace aiocuda
