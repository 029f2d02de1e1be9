#include "admission.h"

#include <mutex>
#include <optional>
#include <unordered_map>

#include "clock.h"
#include "engine.h"
#include "threads.h"

namespace aiocuda {
namespace {

// Whether one is in force on this thread.
thread_local bool relaxed = false;

constexpr unsigned kNonBlocking = 1;
constexpr size_t kMostPooledEvents = 4096;
// A system that has refused a thread is left alone for so long.
constexpr uint64_t kRetryNs = 100'000'000;

abi::Stream handle(uint64_t stream) { return reinterpret_cast<abi::Stream>(stream); }
bool special(uint64_t stream) { return stream <= kPerThreadHandle; }

// Never destroyed: threads may use them while the process exits.
struct Events {
  std::mutex mutex;
  std::unordered_map<abi::Context, std::vector<abi::Event>> free;
};
Events& events() {
  static Events* const instance = new Events;
  return *instance;
}

int capture_status(uint64_t stream) {
  int status = abi::kCaptureNone;
  const abi::Result result = abi::driver.stream_is_capturing(handle(stream), &status);
  // The legacy stream beside a capture of a blocking stream: using it would end that capture.
  if (result == abi::kErrorStreamCaptureImplicit) return kResultCapturing;
  if (result != abi::kSuccess) return result;
  return status == abi::kCaptureNone ? abi::kSuccess : kResultCapturing;
}

// Whether everything that an operation enqueued now would come after is done. A stream that synchronises with the legacy
// stream comes after that one's work too, which its own query does not see.
int stream_idle(uint64_t stream, bool* idle) {
  abi::Result result = abi::driver.stream_query(handle(stream));
  *idle = result == abi::kSuccess;
  if (result == abi::kErrorNotReady) return abi::kSuccess;
  if (result != abi::kSuccess || stream < kPerThreadHandle) return result;
  unsigned flags = 0;
  result = abi::driver.stream_get_flags(handle(stream), &flags);
  if (result != abi::kSuccess || (flags & kNonBlocking) != 0) return result;
  if (capture_status(kLegacyHandle) != abi::kSuccess) {
    *idle = false;
    return abi::kSuccess;
  }
  result = abi::driver.stream_query(handle(kLegacyHandle));
  *idle = result == abi::kSuccess;
  return result == abi::kErrorNotReady ? abi::kSuccess : result;
}

abi::Result enqueue_parts(uint64_t stream, Operation* operation) {
  for (Part& part : operation->parts) {
    while (true) {
      Piece piece;
      if (!cut_piece(part, SIZE_MAX, &piece)) break;
      // The driver refuses batches on the legacy stream.
      const abi::Result result = enqueue_piece(piece, handle(stream), stream >= kPerThreadHandle);
      if (result != abi::kSuccess) return result;
    }
  }
  return abi::kSuccess;
}

// In a stream of the caller's. The mark's context is set, and current.
abi::Result record_end_of(uint64_t stream, Mark* mark) {
  const abi::Result result = abi::driver.stream_get_id(handle(stream), &mark->stream_id);
  return result == abi::kSuccess ? record_mark(handle(stream), mark) : result;
}

abi::Event pooled_event(abi::Context context) {
  Events& pool = events();
  std::lock_guard<std::mutex> lock(pool.mutex);
  std::vector<abi::Event>& free = pool.free[context];
  if (free.empty()) return nullptr;
  const abi::Event event = free.back();
  free.pop_back();
  return event;
}

}  // namespace

RelaxedCapture::RelaxedCapture() : outermost_(!relaxed) {
  if (outermost_) abi::driver.exchange_capture_mode(&mode_);
  relaxed = true;
}

RelaxedCapture::~RelaxedCapture() {
  if (!outermost_) return;
  abi::driver.exchange_capture_mode(&mode_);
  relaxed = false;
}

CurrentContext::CurrentContext(abi::Context context) {
  abi::Context current = nullptr;
  if (context == nullptr || (abi::driver.context_get_current(&current) == abi::kSuccess && current == context)) return;
  result_ = abi::driver.context_push(context);
  pushed_ = result_ == abi::kSuccess;
}

CurrentContext::~CurrentContext() {
  abi::Context popped = nullptr;
  if (pushed_) abi::driver.context_pop(&popped);
}

abi::Result context_of(uint64_t stream, abi::Context fallback, abi::Context* context) {
  if (special(stream)) {
    *context = fallback;
    return abi::kSuccess;
  }
  return abi::driver.stream_get_context(handle(stream), context);
}

abi::Result device_of(abi::Context context, int* device) {
  CurrentContext current(context);
  if (current.result() != abi::kSuccess) return current.result();
  return abi::driver.context_get_device(device);
}

uint64_t stream_key(uint64_t stream, abi::Context context) {
  RelaxedCapture relaxed;
  CurrentContext current(special(stream) ? context : nullptr);
  unsigned long long id = 0;
  return abi::driver.stream_get_id(handle(stream), &id) == abi::kSuccess ? id : kNoStreamKey;
}

void know_stream(Operation* operation, uint64_t stream, abi::Context context, bool marked) {
  operation->stream_marked = marked;
  operation->stream_key = marked ? operation->marks.back().stream_id : stream_key(stream, context);
}

int check_not_capturing(uint64_t stream, abi::Context context) {
  RelaxedCapture relaxed;
  CurrentContext current(special(stream) ? context : nullptr);
  if (current.result() != abi::kSuccess) return current.result();
  return capture_status(stream);
}

int mark_stream(uint64_t stream, abi::Context context, bool always, std::vector<Mark>* marks) {
  // Of all that is called here only the question whether the stream is idle disturbs others' captures.
  std::optional<RelaxedCapture> relaxed;
  if (!always) relaxed.emplace();
  CurrentContext current(special(stream) ? context : nullptr);
  if (current.result() != abi::kSuccess) return current.result();
  int result = capture_status(stream);
  if (result != abi::kSuccess) return result;
  bool idle = false;
  if (!always) {
    result = stream_idle(stream, &idle);
    if (result != abi::kSuccess || idle) return result;
  }
  Mark mark;
  result = context_of(stream, context, &mark.context);
  if (result != abi::kSuccess) return result;
  // Creating an event needs the stream's context; recording one does not.
  CurrentContext own(mark.context);
  if (own.result() != abi::kSuccess) return own.result();
  result = record_end_of(stream, &mark);
  if (result == abi::kSuccess) marks->push_back(mark);
  return result;
}

abi::Result wait_for_marks(uint64_t stream, const std::vector<Mark>& marks) {
  for (const Mark& mark : marks) {
    const abi::Result result = abi::driver.stream_wait_event(handle(stream), mark.event, 0);
    if (result != abi::kSuccess) return result;
  }
  return abi::kSuccess;
}

int enqueue_in_stream(uint64_t stream, abi::Context fallback, Operation* operation) {
  RelaxedCapture relaxed;
  abi::Context context = nullptr;
  int result = context_of(stream, fallback, &context);
  if (result != abi::kSuccess) return result;
  CurrentContext current(context);
  if (current.result() != abi::kSuccess) return current.result();
  result = capture_status(stream);
  if (result != abi::kSuccess) return result;
  result = wait_for_marks(stream, operation->marks);
  if (result != abi::kSuccess) return result;
  const abi::Result copied = enqueue_parts(stream, operation);
  // Also after a failure: copies enqueued before it still touch the caller's memory, and the event says until when.
  Mark end;
  end.context = context;
  result = record_end_of(stream, &end);
  if (result != abi::kSuccess) {
    operation->leaked = true;
    return copied != abi::kSuccess ? copied : result;
  }
  for (const Mark& mark : operation->marks) give_mark(mark);
  operation->marks.assign(1, end);
  operation->in_stream = true;
  operation->result = copied;
  return abi::kSuccess;
}

abi::Result record_mark(abi::Stream stream, Mark* mark) {
  static std::atomic<uint64_t> sequence{0};
  mark->sequence = sequence.fetch_add(1, std::memory_order_relaxed);
  // Pooled events die with their context, whose handle a later context may be given again.
  while ((mark->event = pooled_event(mark->context)) != nullptr) {
    if (abi::driver.event_record(mark->event, stream) == abi::kSuccess) return abi::kSuccess;
    abi::driver.event_destroy(mark->event);
  }
  abi::Result result = abi::driver.event_create(&mark->event, abi::kEventDisableTiming);
  if (result != abi::kSuccess) return result;
  result = abi::driver.event_record(mark->event, stream);
  if (result != abi::kSuccess) abi::driver.event_destroy(mark->event);
  return result;
}

void give_mark(const Mark& mark) {
  if (!mark.owned) return;
  Events& pool = events();
  {
    std::lock_guard<std::mutex> lock(pool.mutex);
    std::vector<abi::Event>& free = pool.free[mark.context];
    if (free.size() < kMostPooledEvents) {
      free.push_back(mark.event);
      return;
    }
  }
  abi::driver.event_destroy(mark.event);
}

bool Gates::set(const Mark& mark, Engine* engine) {
  if (!started_) {
    const uint64_t now = now_ns();
    if (now < retry_ns_) return false;
    retry_ns_ = now + kRetryNs;
    started_ = try_start_thread("aiocuda-gates", [this] { launch(); });
    if (!started_) return false;
  }
  Gate* gate = nullptr;
  for (Gate* candidate : gates_) {
    if (!candidate->busy.load(std::memory_order_acquire)) {
      gate = candidate;
      break;
    }
  }
  if (gate == nullptr) {
    if (gates_.size() == kMost) return false;
    gate = new Gate;
    gate->engine = engine;
    if (abi::driver.stream_create(&gate->stream, abi::kStreamNonBlocking) != abi::kSuccess) {
      delete gate;
      return false;
    }
    gates_.push_back(gate);
  }
  if (abi::driver.stream_wait_event(gate->stream, mark.event, 0) != abi::kSuccess) return false;
  gate->busy.store(true, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    to_launch_.push_back(gate);
  }
  wanted_.notify_one();
  return true;
}

void Gates::launch() {
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_.wait(lock, [this] { return !to_launch_.empty(); });
    Gate* const gate = to_launch_.front();
    to_launch_.pop_front();
    lock.unlock();
    if (abi::driver.launch_host_function(gate->stream, opened, gate) != abi::kSuccess) gate->busy.store(false);
  }
}

void Gates::forget() {
  gates_.clear();
  std::lock_guard<std::mutex> lock(mutex_);
  to_launch_.clear();
}

void Gates::opened(void* gate) {
  Gate* const self = static_cast<Gate*>(gate);
  Engine* const engine = self->engine;
  self->busy.store(false, std::memory_order_release);
  engine->wake();
}

}  // namespace aiocuda
