// One engine per device and process: admits operations when their streams have reached them, feeds the device, watches,
// completes. Everything but submit(), cancel() and the functions marked so runs on the engine's own thread, which has
// the device's primary context current and its capture mode relaxed for good.
//
// Completion is decided by asking events, never by a host function having run: after a fault no host function runs, and
// one that has run says nothing about errors (hardware.md). Host functions only hint that it is worth asking again.
#pragma once
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "admission.h"
#include "channel.h"
#include "forecast.h"
#include "inline_copy.h"
#include "operation.h"
#include "roads.h"
#include "scatter.h"
#include "staging.h"

namespace aiocuda {

class Engine {
 public:
  static constexpr int kMostDevices = 128;

  // The engine of a device, made at its first use; nullptr where there is no such device, or no thread for it. Any thread.
  static Engine* of_device(int device);
  // All engines there are. Any thread.
  static std::vector<Engine*> all();

  // Takes the operation; it comes back through its completion queue. Any thread, never waits.
  void submit(Operation* operation);
  // Stops the operation, if nothing else at its next piece; its completion says when the library has let go. The thread that
  // will take the completion, before it does.
  Cancelled cancel(Operation* operation);
  // Runs a small copy whose stream is idle in the calling thread, for so long at most. Any thread, without the GIL.
  InlineLane::Run run_inline(Operation* operation, uint64_t spin_ns) { return inline_lane_.run(operation, spin_ns); }
  // A small operation's piece has been copied out of its slot, which is nobody's when the device might still work on it.
  // Whoever gives slots back wakes the engine behind the last of them. Any thread.
  void give_back(Piece* landed, bool lost);
  void wake();  // Any thread, also the driver's.
  // Says that an operation is about to be submitted: waking up takes about as long as preparing it. Any thread.
  void rouse();

  int device() const { return device_; }
  // Whether small copies to the host go by the kernel for a while. Any thread.
  bool avoids_copy_engine() const;
  size_t nbytes_held() const { return slots_.nbytes_held() + small_slots_.nbytes_held() + scatter_.nbytes_held(); }
  // Frees the idle slots of a size. Any thread.
  void trim(size_t slot_nbytes) { slots_.trim(slot_nbytes); }
  // Asks the thread to end and waits for it, at most so long. For the interpreter's exit.
  bool stop(uint64_t timeout_ns);

  // For channels, on the engine's thread.
  Scatter& scatter() { return scatter_; }
  Slot* take_slot(Part* part, bool small);
  bool stopped(const Operation& operation) const;
  void report(Operation& operation, abi::Result result);
  void hand_to_workers(Piece* piece) { for_workers_.push_back(piece); }
  void landed(Piece* piece);
  void came_back(Piece* piece);
  void lost(Piece* piece);  // the device may still be at it
  void discard(Piece* piece);  // one without a part that is not on the device
  void settle(Part* part);
  void fault(abi::Result result);
  abi::Result fault_code() const { return fault_; }

  // The road of a part, as far as is known before it is on its way, and the bytes of the pieces that it is cut into.
  struct Planned {
    bool by_kernel;
    bool bundled;
    size_t piece_nbytes;
  };
  Planned plan(const Part& part);

 private:
  explicit Engine(int device);

  void run();
  abi::Result start();
  bool revive();
  bool take_inbox();
  bool take_done();
  bool admit_waiting();
  bool feed_workers();
  // The roads of small copies to the host, see roads.cpp.
  bool choose_roads();
  bool take_other_road(Channel& late, Channel& other);
  // The twin of a piece has landed: it is let land too, into a slot that is nobody's until then.
  void disown(Piece* piece);
  void end_reading(Operation* operation);
  // What has its outcome, but is still read by the device, is told its loop when that has ended, or has taken long.
  void linger(Operation* operation);
  bool end_lingering();
  // Announces the end of what the workers have come to the last piece of.
  void foresee(Part* part);
  void arrive(Operation* operation);
  void admit(Operation* operation);
  // Asks for the quick way between two devices, once.
  void meet_peer(const Part& part);
  // Whether the marks have fired; the operation's result is set when asking failed.
  bool reached(Operation* operation);
  void pop_mark(Operation* operation);
  void suspect();
  bool sweep_cancelled();
  void finish(Operation* operation);
  void hint(uint64_t now);
  // Announces the waits that are about to end. When it has to look again without sleeping.
  uint64_t foresee_waits(uint64_t now);
  void rest(uint32_t seen);
  bool quiet() const;

  using Line = std::deque<Operation*>;
  // How many of a line are behind marks that have fired, by a few questions however many they are.
  static size_t fired_marks(const Line& line);

  template <typename Function>
  void each_channel(Function f) {
    for (Channel* channel : channels_) f(*channel);
  }

  const int device_;
  abi::Context context_ = nullptr;
  abi::Result fault_ = abi::kSuccess;
  abi::Result lost_ = abi::kSuccess;  // a fault that has been noticed among the marks, where nothing can be given up yet
  const bool may_spin_;
  std::vector<bool> peers_;  // devices that have been met

  std::atomic<QueueNode*> inbox_{nullptr};
  std::atomic<QueueNode*> done_{nullptr};
  std::atomic<uint32_t> signal_{0};
  std::atomic<bool> asleep_{false};
  std::atomic<uint64_t> roused_until_ns_{0};
  std::atomic<bool> cancellations_{false};
  std::atomic<size_t> landed_{0};  // small pieces that wait in their slots for their loops
  std::atomic<bool> stop_{false};
  std::atomic<bool> stopped_{false};

  // Marks of one stream fire in order, so only the first operation of each stream is looked at until it may go on.
  std::unordered_map<unsigned long long, Line> waiting_;
  Forecast forecast_;
  std::deque<Operation*> lingering_;  // the longest first
  std::vector<Operation*> stragglers_;  // reached by their own stream, waiting for another one's mark
  Operation* alive_ = nullptr;
  size_t alive_count_ = 0;
  uint64_t last_progress_ns_ = 0;

  Workers workers_;
  std::vector<Piece*> for_workers_;
  SlotPool slots_;
  SlotPool small_slots_;
  Scatter scatter_;
  Channel to_host_;
  Channel to_device_;
  Channel between_devices_;
  Channel small_to_host_;
  Channel small_by_kernel_;  // to the host as well
  Channel small_to_device_;
  Channel* const channels_[6];
  Gates gates_;
  CopyEngine copy_engine_;
  InlineLane inline_lane_{&copy_engine_};
};

// Enqueues a piece's copies, as a batch where the driver has that and the stream takes it. What was enqueued before an error
// still lands.
abi::Result enqueue_piece(const Piece& piece, abi::Stream stream, bool may_batch);

}  // namespace aiocuda
