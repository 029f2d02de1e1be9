// Batches of small copies by a kernel (scatter.cu): the copy engines do 2 to 15 GB/s on pieces of 4 to 16 KiB, a few
// multiprocessors fill the link.
//
// A kernel reports a bad address by failing the whole context, where a copy reports an error. So every entry is looked
// up before it is put into a table, and what the kernel might not be able to reach is left to the copy engines.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "operation.h"
#include "staging.h"

namespace aiocuda {

class Scatter {
 public:
  enum class State : int { kIdle = 0, kLoading = 1, kReady = 2, kAbsent = 3 };

  explicit Scatter(int device) : device_(device), tables_(device) {}

  // On the engine's thread, as everything that is not marked otherwise. The module goes with its context.
  void open(abi::Context context);
  void close();

  // Whether the kernel is the better way for what comes next of a part. The first time it is, loading begins, on a thread
  // of its own because it waits for running kernels; until that has ended the answer is no.
  bool takes(const Part& part);

  // Cuts the next piece off a part that takes() said yes to, like cut_piece(). Returns false, with nothing cut, where the
  // kernel cannot reach what comes next.
  bool cut(Part& part, Piece* piece);

  // Returns false, with nothing enqueued, where the driver refuses, or has refused a piece since this one was cut.
  bool launch(const Piece& piece, abi::Stream stream);

  // Turns the piece into one of device copies, for the copy engines, and does without the kernel from now on.
  void give_up(Piece* piece);

  // The device no longer reads the piece's table.
  void give_table(Piece* piece);

  // Any thread.
  State state() const { return state_.load(std::memory_order_acquire); }
  uint64_t launches() const { return launches_.load(std::memory_order_relaxed); }
  size_t nbytes_held() const { return tables_.nbytes_held(); }

 private:
  // Each returns how many rows of the table it has filled. The first takes entries of one size as they lie in their
  // columns; where that cannot be done, the second looks at one after the other.
  uint32_t cut_columns(Part& part, const Slot& slot, Piece* piece);
  uint32_t cut_entries(Part& part, const Slot& slot, Piece* piece);
  bool ready();
  void load(abi::Context context, uint64_t generation);

  const int device_;
  std::atomic<State> state_{State::kAbsent};
  std::atomic<uint64_t> launches_{0};
  abi::Context context_ = nullptr;
  unsigned multiprocessors_ = 1;
  SlotPool tables_;

  std::mutex mutex_;  // guards the three below, and changes of the state
  uint64_t generation_ = 0;
  abi::Function function_ = nullptr;
};

}  // namespace aiocuda
