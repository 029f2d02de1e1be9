// Small copies that finish inside the call: copy, flag write, spin. On an idle stream that takes 6 us, less than waking
// anybody (hardware.md); a number needs no flag, and 2 us less. What is late to the host is tried by the kernel too, which
// does not wait for the copy engine and takes 10 us. What is not done by then is left to the engine, whole; to the device,
// where there is one road, it parks: it becomes an operation that waits for an event behind the copy.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "operation.h"
#include "staging.h"

namespace aiocuda {

class CopyEngine;
class Scatter;

class InlineLane {
 public:
  explicit InlineLane(CopyEngine* copy_engine) : avoided_(copy_engine) {}

  enum class Outcome { kDeclined, kDone, kParked, kFailed };

  // A piece that is still under way although it no longer counts; its mark says when it has landed.
  struct Late {
    Piece* piece = nullptr;
    Mark mark;
  };
  struct Run {
    Outcome outcome = Outcome::kDeclined;
    size_t late_count = 0;
    Late late[2];
  };

  // On the engine's thread, with its context current. A lane that could not be opened declines.
  void open(abi::Context context, SlotPool* slots, Scatter* scatter);
  void close() { ready_.store(false, std::memory_order_release); }

  // Runs an operation of one small part whose stream is idle. kParked and kFailed leave it to be submitted: parked with its
  // landed piece and a mark, failed with its result. Any thread, without the GIL; declines where another one is inside, and
  // where copies are late on all roads.
  Run run(Operation* operation, uint64_t spin_ns);

 private:
  // One copy at a time: while a flag lacks its last ticket, the copy before is still under way.
  struct Road {
    abi::Stream stream = nullptr;
    volatile uint32_t* flag = nullptr;
    uint32_t ticket = 0;
    bool flagged = false;  // whether the flag will tell of the last copy
    bool broken = false;   // never free again
    bool free() const { return !broken && __atomic_load_n(flag, __ATOMIC_ACQUIRE) == ticket; }
  };

  Piece* new_piece(Operation* operation, Slot* slot);
  // Gives the slot of a piece back, and keeps its memory for the next one.
  void keep(Piece* piece);
  abi::Result send(Road& road, const Piece& piece);
  // Enqueues the write of the flag behind what has been sent.
  void send_flag(Road& road);
  // The road that is done first, or nullptr when the time is up.
  Road* wait(Road* first, Road* second, uint64_t spin_ns) const;
  Run park(Operation* operation, Piece* piece, const Road& road);
  // Records a mark behind what is in a road.
  abi::Result mark(const Road& road, Mark* mark);
  void lose(Piece* piece);

  CopyEngine* const avoided_;
  std::mutex mutex_;
  std::atomic<bool> ready_{false};
  abi::Context context_ = nullptr;
  SlotPool* slots_ = nullptr;
  Scatter* scatter_ = nullptr;
  std::unique_ptr<Piece> spare_;
  Slot* lane_ = nullptr;  // the flags, and the kernel's table
  Road copy_engine_;
  Road kernel_;
};

}  // namespace aiocuda
