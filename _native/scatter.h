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

  // The same of sizes alone: whether the kernel is the better way once it is there. And the bytes of its pieces.
  static bool suits(const Part& part);
  static size_t piece_nbytes(Route route);

  // Cuts the next piece off a part that takes() said yes to, like cut_piece(). Returns false, with nothing cut, where the
  // kernel cannot reach what comes next.
  bool cut(Part& part, Piece* piece);

  // Makes the table of small pieces that are to travel together, which the first of them holds. Returns false, with nothing
  // done, where the kernel is not there or cannot reach them all.
  bool tabulate(const std::vector<Piece*>& pieces);

  // Enqueues one contiguous copy to the host whose table goes to memory that the caller keeps until it has run. Any thread,
  // with the context current, once the state is kReady.
  abi::Result copy_one(const Piece& piece, char* table, size_t table_nbytes, abi::Stream stream);

  // Asks the engine's thread to load the kernel. Any thread.
  void want() { wanted_.store(true, std::memory_order_relaxed); }
  void load_if_wanted() {
    if (wanted_.load(std::memory_order_relaxed)) ready();
  }

  // Returns false, with nothing enqueued, where the driver refuses, or has refused a piece since this one was cut.
  bool launch(const Piece& piece, abi::Stream stream);

  // Turns the piece into one of device copies, where it is not that as well, for the copy engines, and does without the
  // kernel from now on.
  void give_up(Piece* piece);

  // The device no longer reads the piece's table.
  void give_table(Piece* piece);

  // Any thread.
  State state() const { return state_.load(std::memory_order_acquire); }
  uint64_t launches() const { return launches_.load(std::memory_order_relaxed); }
  size_t nbytes_held() const { return tables_.nbytes_held(); }

  // Whether the kernel can be used. Loading begins when this is asked for the first time.
  bool ready();

 private:
  // Each returns how many rows of the table it has filled. The first takes entries of one size as they lie in their
  // columns, the second rectangles of one shape; where neither can be done, the third looks at one after the other.
  uint32_t cut_columns(Part& part, const Slot& slot, Piece* piece);
  uint32_t cut_rectangles(Part& part, const Slot& slot, Piece* piece);
  uint32_t cut_entries(Part& part, const Slot& slot, Piece* piece);
  // Entries of one shape, each, are cut into rows by the kernel; without a width the table has a size for each. They
  // come to so many bytes.
  abi::Result enqueue(Route route, abi::DevicePointer table, unsigned capacity, unsigned entries, const Shape& each,
                      size_t nbytes, abi::Stream stream);
  void load(abi::Context context, uint64_t generation);

  const int device_;
  std::atomic<State> state_{State::kAbsent};
  std::atomic<uint64_t> launches_{0};
  std::atomic<bool> wanted_{false};
  abi::Context context_ = nullptr;
  unsigned multiprocessors_ = 1;
  SlotPool tables_;

  std::mutex mutex_;  // guards the three below, and changes of the state
  uint64_t generation_ = 0;
  abi::Function function_ = nullptr;
};

}  // namespace aiocuda
