// Small copies that finish inside the call: copy, flag write, spin. On an idle stream that takes 6 us, less than waking
// anybody (hardware.md). What is not done by then parks: it becomes an operation that waits for an event behind the copy.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>

#include "operation.h"
#include "staging.h"

namespace aiocuda {

class InlineLane {
 public:
  enum class Outcome { kDeclined, kDone, kParked, kFailed };

  // On the engine's thread, with its context current. A lane that could not be opened declines.
  void open(abi::Context context, SlotPool* slots);
  void close() { ready_.store(false, std::memory_order_release); }

  // Runs an operation of one small part whose stream is idle. kParked and kFailed leave it to be submitted: parked with its
  // landed piece and a mark, failed with its result. Any thread, without the GIL; declines where another one is inside.
  Outcome run(Operation* operation, uint64_t spin_ns);

 private:
  std::mutex mutex_;
  std::atomic<bool> ready_{false};
  abi::Context context_ = nullptr;
  abi::Stream stream_ = nullptr;
  SlotPool* slots_ = nullptr;
  volatile uint32_t* flag_ = nullptr;
  uint32_t ticket_ = 0;
};

}  // namespace aiocuda
