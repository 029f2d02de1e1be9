// The loop's side of a submission: what is asked of, and recorded in, the caller's stream. None of it waits: event
// records take 0.35 us, also the 200,000th behind a busy kernel, while copies, kernels and flag writes block the caller
// from 1,021 entries on (hardware.md, docs/explanation/measurements.md).
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "driver_abi.h"
#include "operation.h"

namespace aiocuda {

class Engine;

constexpr uint64_t kLegacyHandle = 1;
constexpr uint64_t kPerThreadHandle = 2;

// Results of admission beside the driver's codes.
constexpr int kResultCapturing = -2;

// Sets the calling thread's capture mode to relaxed: a query or an allocation on one thread kills a global capture of
// another otherwise. Within another one it does nothing.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const bool outermost_;
  int mode_ = abi::kCaptureRelaxed;
};

// Makes a context current where it is not, and puts back what was.
class CurrentContext {
 public:
  explicit CurrentContext(abi::Context context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  abi::Result result() const { return result_; }

 private:
  bool pushed_ = false;
  abi::Result result_ = abi::kSuccess;
};

// The context of a stream; of the driver's special handles it is the fallback.
abi::Result context_of(uint64_t stream, abi::Context fallback, abi::Context* context);

// The ordinal of a context's device.
abi::Result device_of(abi::Context context, int* device);

// The id of a stream, which the driver never gives to another one, as it does with handles: the two names of the legacy
// stream are one, every context has its own, and every thread its own per-thread stream. Of a stream that is not under
// capture: the question would invalidate that.
uint64_t stream_key(uint64_t stream, abi::Context context);

// Says in which stream an operation is, which has been marked there, or found idle.
void know_stream(Operation* operation, uint64_t stream, abi::Context context, bool marked);

// kResultCapturing when the stream is under capture (or the legacy stream beside a capture it would break), else the
// driver's code. Leaves every capture valid.
int check_not_capturing(uint64_t stream, abi::Context context);

// Adds to the marks what must fire before the work that is now in the stream is done: nothing when the stream is idle,
// unless always. The context is that of the driver's special handles.
int mark_stream(uint64_t stream, abi::Context context, bool always, std::vector<Mark>* marks);

// Has what is enqueued in the stream from now on wait for the marks.
abi::Result wait_for_marks(uint64_t stream, const std::vector<Mark>& marks);

// Enqueues the operation's parts as ordinary work of the stream and marks the end of it.
int enqueue_in_stream(uint64_t stream, abi::Context context, Operation* operation);

// Records an event in a stream; the mark's context is set, and current.
abi::Result record_mark(abi::Stream stream, Mark* mark);

// Hands a mark's event back to the pool of its context. Any thread.
void give_mark(const Mark& mark);

// Streams that wake the engine by a host function when a caller's stream has reached a mark, so that a long wait ends
// promptly without looking often. A gate serves one mark at a time: one that never fires holds up no other. They are
// launched on a thread of their own: as long as any caller is blocked on a full stream, as a training loop that runs ahead
// of the GPU is most of the time, the driver makes every launch of a host function wait
// (docs/explanation/measurements.md).
class Gates {
 public:
  // Whether a gate was free; without one the engine looks again by itself. The engine's thread.
  bool set(const Mark& mark, Engine* engine);
  // After a fault the gates' host functions never run.
  void forget();

 private:
  static constexpr size_t kMost = 16;
  struct Gate {
    abi::Stream stream = nullptr;
    Engine* engine = nullptr;
    std::atomic<bool> busy{false};
  };
  static void opened(void* gate);
  void launch();

  std::vector<Gate*> gates_;
  bool started_ = false;
  uint64_t retry_ns_ = 0;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::deque<Gate*> to_launch_;
};

}  // namespace aiocuda
