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
#include "table.h"

namespace aiocuda {

struct Tuning;

class Scatter {
 public:
  enum class State : int { kIdle = 0, kLoading = 1, kReady = 2, kAbsent = 3 };

  explicit Scatter(int device) : device_(device), tables_(device), columns_(device) {}

  // On the engine's thread, as everything that is not marked otherwise. The module goes with its context.
  void open(abi::Context context);
  void close();

  // Whether the kernel is the better way for what comes next of a part. The first time it is, loading begins, on a thread
  // of its own because it waits for running kernels; until that has ended the answer is no.
  bool takes(const Part& part);

  // The same of sizes alone: whether the kernel is the better way once it is there. And the bytes of its pieces.
  static bool suits(const Part& part);
  static size_t piece_nbytes(const Part& part);

  // Whether what comes next lies in one row on the host, so that it goes by a bundle: the kernel gathers it on the device,
  // or scatters it there, and one copy takes it over the link. That is quicker than the kernel's own accesses over the link,
  // and disturbs compute less (docs/explanation/measurements.md).
  static bool suits_bundle(const Part& part);

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

  // Enqueues what the kernel does of a piece; of a bundle the copy is the caller's. Returns false, with nothing enqueued,
  // where the driver refuses, or has refused a piece since this one was cut.
  bool launch(const Piece& piece, abi::Stream stream);

  // Turns the piece into one of device copies, where it is not that as well, for the copy engines, and does without the
  // kernel from now on.
  void give_up(Piece* piece);

  // The device no longer uses the piece's table, or its bundle.
  void give_back(Piece* piece);

  // Where columns find memory that the kernel reads in place.
  ColumnPool& columns() { return columns_; }

  // Any thread.
  State state() const { return state_.load(std::memory_order_acquire); }
  // Whether a thread is about to make what the kernel needs.
  bool loading() const { return state() == State::kLoading || making_.load() != 0; }
  uint64_t launches() const { return launches_.load(std::memory_order_relaxed); }
  unsigned blocks() const { return blocks_.load(std::memory_order_relaxed); }  // of the last launch
  size_t nbytes_held() const { return tables_.nbytes_held() + columns_.nbytes_held(); }

  // Whether the kernel can be used. Loading begins when this is asked for the first time.
  bool ready();

 private:
  // Each returns a table, in the slot or elsewhere; one without rows where this is not the way. The first takes what goes by
  // a bundle, the second entries of one size as they lie in their columns, the third rectangles of one shape; the last looks
  // at one after the other.
  KernelTable cut_bundle(Part& part, Slot* slot, Piece* piece);
  KernelTable cut_columns(Part& part, Slot* slot, Piece* piece);
  KernelTable cut_rectangles(Part& part, Slot* slot, Piece* piece);
  KernelTable cut_entries(Part& part, Slot* slot, Piece* piece);
  Slot* take_table(const Tuning& tuning);
  Reach reach() const { return Reach(context_, device_); }
  // Entries of one shape, each, are cut into rows by the kernel; without a width the table has a size for each. They
  // come to so many bytes. Over the link it takes so many blocks, or what is best for 0.
  abi::Result enqueue(const Tuning& tuning, unsigned blocks, const KernelTable& table, const Shape& each, size_t nbytes,
                      abi::Stream stream);
  // Device memory; 0 where there is none. It is made when it is asked for the first time, on a thread of its own.
  uint64_t take_bundle();
  void give_bundle(uint64_t bundle);
  void make_bundles(abi::Context context, uint64_t generation);
  void load(abi::Context context, uint64_t generation);

  const int device_;
  std::atomic<State> state_{State::kAbsent};
  std::atomic<uint64_t> launches_{0};
  std::atomic<unsigned> blocks_{0};
  std::atomic<bool> wanted_{false};
  std::atomic<int> making_{0};  // bundles

  std::mutex making_mutex_;  // guards the two below
  abi::DevicePointer bundle_memory_ = 0;
  uint64_t bundle_buffer_ = 0;
  abi::Context context_ = nullptr;
  unsigned multiprocessors_ = 1;
  SlotPool tables_;
  ColumnPool columns_;
  bool bundles_wanted_ = false;

  std::mutex mutex_;  // guards what is below, and changes of the state
  uint64_t generation_ = 0;
  abi::Function function_ = nullptr;
  std::vector<uint64_t> bundles_;  // that are free
};

}  // namespace aiocuda
