#include "scheduler.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <pthread.h>
#include <thread>
#include <utility>

#include "capture.h"

namespace emu {

void host_function_loop(ContextPtr context);

namespace {

// Measured: what a channel accepts behind a kernel before a call blocks, and how many there are of each kind. A stream has
// one to itself as long as there are some left. The front entry is with the hardware and takes no place.
constexpr std::size_t channel_places = 1021;
constexpr std::size_t channel_segments = 56;
constexpr std::array<std::size_t, 3> channels{4, 4, 8};
// Small copies to the device are not the copy engine's. (4 bytes were seen not to be, and 1 MiB to be.)
constexpr std::size_t small_bytes = 64 << 10;

bool takes_place(Kind kind) {
  return kind != Kind::event_record && kind != Kind::event_wait && kind != Kind::host_function;
}

Channels channels_of(const Work& work) {
  switch (work.engine) {
    case Engine::device_to_host: return Channels::to_host;
    case Engine::host_to_device: return work.nbytes > small_bytes ? Channels::to_device : Channels::compute;
    default: return Channels::compute;
  }
}

bool has_room(const Usage& usage, std::size_t n) {
  return usage.places < n * channel_places && usage.segments < n * channel_segments;
}

bool has_room(const Stream& stream, const Work& work) {
  const auto context_has_room = [&stream](Channels kind) {
    const auto index = static_cast<std::size_t>(kind);
    return has_room(stream.context->usage[index], channels[index]);
  };
  if (work.kind == Kind::host_function)
    return !stream.since_host_function ||
           (stream.usage.segments < channel_segments && context_has_room(*stream.since_host_function));
  if (!takes_place(work.kind)) return true;
  return stream.usage.places < channel_places && context_has_room(channels_of(work));
}

Usage& shared_usage(const Stream& stream, Channels kind) {
  return stream.context->usage[static_cast<std::size_t>(kind)];
}

void give_place(Stream& stream, Entry& entry) {
  if (!entry.place) return;
  --stream.usage.places;
  --shared_usage(stream, *entry.place).places;
  entry.place.reset();
}

void give_segment(Stream& stream, const Entry& entry) {
  if (!entry.segment) return;
  --stream.usage.segments;
  --shared_usage(stream, *entry.segment).segments;
}

// Takes what an entry needs of its channels until it is done.
void take_room(Stream& stream, Entry& entry) {
  if (entry.work->kind == Kind::host_function) {
    entry.segment = std::exchange(stream.since_host_function, std::nullopt);
    if (!entry.segment) return;
    ++stream.usage.segments;
    ++shared_usage(stream, *entry.segment).segments;
  } else if (takes_place(entry.work->kind)) {
    stream.since_host_function = channels_of(*entry.work);
    if (stream.queue.empty()) return;
    entry.place = channels_of(*entry.work);
    ++stream.usage.places;
    ++shared_usage(stream, *entry.place).places;
  }
}

// Blocks the caller while the stream is full. Measured: as long as somebody is blocked so, unless by flag writes, every
// launch of a host function in the context waits too.
void wait_for_room(Call& call, Stream& stream, const Work& work) {
  Context& context = *stream.context;
  if (work.kind == Kind::host_function)
    call.wait_unless("full queue", [&] { return context.fault != CUDA_SUCCESS || context.blocked == 0; });
  const auto room = [&] { return context.fault != CUDA_SUCCESS || has_room(stream, work); };
  if (room()) return;
  const bool blocks_others = work.kind != Kind::write_value;
  context.blocked += blocks_others;
  call.wait("full queue", room);
  context.blocked -= blocks_others;
  driver().progress.notify_all();
}

void start_thread(void (*body)(ContextPtr), ContextPtr context) {
  // Signals belong to the program's own threads.
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  std::thread(body, std::move(context)).detach();
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

std::int64_t duration_of(const Stream& stream, const Work& work) {
  const Controls& controls = driver().controls;
  if (held(stream)) return 0;
  double ns = static_cast<double>(work.duration_ns);
  if (work.kind == Kind::copy) {
    ns += controls.latency_us * 1e3;
    if (controls.gigabytes_per_second > 0) ns += static_cast<double>(work.nbytes) / controls.gigabytes_per_second;
  }
  return static_cast<std::int64_t>(ns);
}

bool runnable(const Stream& stream) {
  return !stream.queue.empty() && !stream.queue.front().running && (!held(stream) || stream.allowance > 0) &&
         front_is_ready(stream);
}

void pop_front(Stream& stream) {
  give_segment(stream, stream.queue.front());
  stream.queue.pop_front();
  if (!stream.queue.empty()) give_place(stream, stream.queue.front());
  ++stream.completed;
  driver().progress.notify_all();
}

CUresult planned_failure(Kind kind) {
  auto& plans = driver().controls.failing_operations;
  CUresult code = CUDA_SUCCESS;
  for (auto plan = plans.begin(); plan != plans.end();) {
    if (plan->name != name_of(kind) || --plan->remaining > 0) {
      ++plan;
      continue;
    }
    code = plan->code;
    plan = plans.erase(plan);
  }
  return code;
}

// Lets the front of the stream happen. The bytes are moved without the lock: a big copy must not stall every call.
void complete(std::unique_lock<std::mutex>& lock, const StreamPtr& stream) {
  const WorkPtr work = stream->queue.front().work;
  if (work->move) {
    lock.unlock();
    work->move();
    lock.lock();
  }
  for (const auto& allocation : work->touches) --allocation->in_use;
  if (work->engine != Engine::none)
    driver().devices[static_cast<std::size_t>(work->device)].copy_engines[work->engine == Engine::host_to_device].busy =
        false;
  pop_front(*stream);
  if (work->kind == Kind::write_value && stream->queue.empty()) stream->lingering = driver().controls.linger;
  if (work->finish && stream->context->fault == CUDA_SUCCESS) work->finish();
}

void start(std::unique_lock<std::mutex>& lock, const StreamPtr& stream) {
  Driver& d = driver();
  Entry& entry = stream->queue.front();
  const Work& work = *entry.work;
  if (held(*stream)) --stream->allowance;

  CUresult failure = planned_failure(work.kind);
  for (const auto& allocation : work.touches)
    if (allocation->freed) failure = CUDA_ERROR_ILLEGAL_ADDRESS;
  if (failure != CUDA_SUCCESS) {
    fault_context(*stream->context, failure);
    return;
  }

  entry.running = true;
  if (work.engine == Engine::host_thread) {
    Context& context = *stream->context;
    if (!context.host_thread) {
      context.host_thread = true;
      start_thread(host_function_loop, stream->context);
    }
    context.host_queue.push_back(stream);
    context.host_work.notify_one();
    return;
  }
  if (work.engine != Engine::none) {
    auto& engine =
        d.devices[static_cast<std::size_t>(work.device)].copy_engines[work.engine == Engine::host_to_device];
    engine.busy = true;
    engine.last = stream;
    stream->served = ++d.served;
  }
  for (const auto& allocation : work.touches) ++allocation->in_use;
  const auto duration = duration_of(*stream, work);
  if (duration == 0) {
    complete(lock, stream);
  } else {
    if (work.begin) work.begin();
    d.timed.emplace_back(now_ns() + duration, stream);
    d.progress.notify_all();
  }
}

bool wants_engine(const Stream& stream, Engine engine, int device) {
  if (stream.queue.empty()) return false;
  const Work& work = *stream.queue.front().work;
  return work.engine == engine && work.device == device && runnable(stream);
}

// Measured: towards the host the engine stays with a stream that has more; towards the device streams take turns.
StreamPtr next_for_engine(Engine engine, int device) {
  Driver& d = driver();
  const auto& state = d.devices[static_cast<std::size_t>(device)].copy_engines[engine == Engine::host_to_device];
  if (state.busy) return nullptr;
  if (engine == Engine::device_to_host && state.last && wants_engine(*state.last, engine, device)) return state.last;
  StreamPtr next;
  for (const auto& stream : d.active)
    if (wants_engine(*stream, engine, device) && (!next || stream->served < next->served)) next = stream;
  return next;
}

bool run_front_ends(std::unique_lock<std::mutex>& lock) {
  bool progressed = false;
  const auto streams = driver().active;
  for (const auto& stream : streams) {
    while (runnable(*stream)) {
      const Engine engine = stream->queue.front().work->engine;
      if (engine == Engine::device_to_host || engine == Engine::host_to_device) break;
      start(lock, stream);
      progressed = true;
    }
  }
  return progressed;
}

bool run_copy_engines(std::unique_lock<std::mutex>& lock) {
  bool progressed = false;
  for (int device = 0; device < driver().configuration.devices; ++device) {
    for (const Engine engine : {Engine::device_to_host, Engine::host_to_device}) {
      if (const auto stream = next_for_engine(engine, device)) {
        start(lock, stream);
        progressed = true;
      }
    }
  }
  return progressed;
}

bool finish_timed(std::unique_lock<std::mutex>& lock) {
  Driver& d = driver();
  if (d.timed.empty()) return false;
  const auto next = std::min_element(d.timed.begin(), d.timed.end(),
                                     [](const auto& a, const auto& b) { return a.first < b.first; });
  if (next->first > now_ns()) return false;
  const auto stream = next->second;
  d.timed.erase(next);
  complete(lock, stream);
  return true;
}

void forget_empty_streams() {
  auto& active = driver().active;
  const auto empty = [](const StreamPtr& stream) {
    if (!stream->queue.empty()) return false;
    stream->active = false;
    return true;
  };
  active.erase(std::remove_if(active.begin(), active.end(), empty), active.end());
}

void sleep_until_work(std::unique_lock<std::mutex>& lock) {
  Driver& d = driver();
  const auto earliest = [&d] {
    std::int64_t first = INT64_MAX;
    for (const auto& [finish, stream] : d.timed) first = std::min(first, finish);
    return first;
  };
  if (d.controls.virtual_clock && !d.timed.empty()) {
    d.virtual_ns = std::max(d.virtual_ns, earliest());
    return;
  }
  if (!d.dying_graphs.empty()) {
    std::vector<std::function<void()>> actions;
    reap_graphs(actions);
    lock.unlock();
    for (auto& action : actions) action();
    lock.lock();
    if (!actions.empty()) return;
  }
  d.idle = true;
  d.progress.notify_all();
  const auto woken = [&d] { return !d.idle; };
  // Memory that a stream waits on changes without telling anyone.
  const bool watches = std::any_of(d.active.begin(), d.active.end(), [](const StreamPtr& stream) {
    return !stream->queue.empty() && stream->queue.front().work->kind == Kind::wait_value;
  });
  auto pause = std::chrono::nanoseconds::max();
  if (!d.timed.empty()) pause = std::chrono::nanoseconds(std::max<std::int64_t>(earliest() - now_ns(), 0));
  if (watches) pause = std::min<std::chrono::nanoseconds>(pause, std::chrono::milliseconds(1));
  if (pause == std::chrono::nanoseconds::max()) {
    d.work.wait(lock, woken);
  } else {
    d.work.wait_for(lock, pause, woken);
  }
  d.idle = false;
}

void scheduler_loop(ContextPtr) {
  std::unique_lock lock(driver().mutex);
  for (;;) {
    bool progressed = run_front_ends(lock);
    progressed |= run_copy_engines(lock);
    progressed |= finish_timed(lock);
    forget_empty_streams();
    if (!progressed) sleep_until_work(lock);
  }
}

// What legacy default-stream semantics make new work wait for.
std::vector<std::pair<StreamPtr, std::uint64_t>> implicit_dependencies(const StreamPtr& stream) {
  std::vector<std::pair<StreamPtr, std::uint64_t>> after;
  for (const auto& other : driver().active) {
    if (other == stream || other->context != stream->context || other->queue.empty()) continue;
    if ((stream->legacy && other->blocking()) || (stream->blocking() && other->legacy))
      after.emplace_back(other, other->enqueued);
  }
  return after;
}

}  // namespace

void host_function_loop(ContextPtr context) {
  mark_host_function_thread();
  Driver& d = driver();
  std::unique_lock lock(d.mutex);
  for (;;) {
    context->host_work.wait(lock, [&] {
      return context->destroyed || (!context->host_queue.empty() && !d.controls.stall_host_functions);
    });
    if (context->destroyed) return;
    const auto stream = context->host_queue.front();
    context->host_queue.pop_front();
    const auto work = stream->queue.front().work;
    const bool dropped = d.controls.drop_host_functions > 0;
    if (dropped) --d.controls.drop_host_functions;
    if (!dropped) {
      ++d.host_functions_running;
      lock.unlock();
      work->function(work->argument);
      lock.lock();
      --d.host_functions_running;
    }
    pop_front(*stream);
    wake_scheduler();
  }
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::copy: return "copy";
    case Kind::memset: return "memset";
    case Kind::kernel: return "kernel";
    case Kind::host_function: return "host_function";
    case Kind::event_record: return "event_record";
    case Kind::event_wait: return "event_wait";
    case Kind::write_value: return "write_value";
    case Kind::wait_value: return "wait_value";
    case Kind::allocate: return "allocate";
    case Kind::free: return "free";
  }
  return "";
}

void start_scheduler() { start_thread(scheduler_loop, nullptr); }

void wake_scheduler() {
  driver().idle = false;
  driver().work.notify_one();
}

std::int64_t now_ns() {
  const Driver& d = driver();
  if (d.controls.virtual_clock) return d.virtual_ns;
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

bool held(const Stream& stream) {
  return stream.hold == Hold::held || (stream.hold == Hold::inherit && driver().controls.hold_all);
}

bool front_is_ready(const Stream& stream) {
  if (stream.context->fault != CUDA_SUCCESS) return false;
  const Entry& entry = stream.queue.front();
  const bool in_order = std::all_of(entry.after.begin(), entry.after.end(),
                                    [](const auto& other) { return other.first->completed >= other.second; });
  return in_order && (!entry.work->ready || entry.work->ready());
}

CUresult enqueue(Call& call, const StreamPtr& stream, WorkPtr work) {
  Driver& d = driver();
  Context& context = *stream->context;
  wait_for_room(call, *stream, *work);
  if (context.fault != CUDA_SUCCESS) return context.fault;

  Entry entry{std::move(work), implicit_dependencies(stream)};
  take_room(*stream, entry);
  stream->lingering = 0;
  stream->queue.push_back(std::move(entry));
  ++stream->enqueued;
  if (!stream->active) {
    stream->active = true;
    d.active.push_back(stream);
  }
  wake_scheduler();
  return CUDA_SUCCESS;
}

CUresult submit(Call& call, const StreamPtr& stream, Work work, CUgraphNodeType node_type) {
  const auto shared = std::make_shared<const Work>(std::move(work));
  if (stream->capture) return capture_node(*stream, node_type, [shared] { return shared; });
  if (const auto result = refuse_beside_capture(*stream); result != CUDA_SUCCESS) return result;
  const auto& planned = driver().controls.failing_operations;
  const bool may_fail =
      std::any_of(planned.begin(), planned.end(), [&](const auto& plan) { return plan.name == name_of(shared->kind); });
  if (shared->at_once && !may_fail && stream->queue.empty() && implicit_dependencies(stream).empty()) {
    shared->finish();
    return CUDA_SUCCESS;
  }
  return enqueue(call, stream, shared);
}

CUresult drain(Call& call, const StreamPtr& stream, const char* reason) {
  const auto target = stream->enqueued;
  const auto& context = *stream->context;
  stream->lingering = 0;
  call.wait_unless(reason, [&] { return context.fault != CUDA_SUCCESS || stream->completed >= target; });
  return context.fault;
}

void drop_queued_work(Context& context) {
  for (const auto& stream : driver().active) {
    if (stream->context.get() != &context) continue;
    // What is running still lands; it leaves the queue when it has.
    const std::size_t keep = !stream->queue.empty() && stream->queue.front().running;
    while (stream->queue.size() > keep) {
      give_place(*stream, stream->queue.back());
      give_segment(*stream, stream->queue.back());
      stream->queue.pop_back();
      ++stream->completed;
    }
    stream->since_host_function.reset();
  }
  for (const auto& stream : context.host_queue) pop_front(*stream);
  context.host_queue.clear();
}

void fault_context(Context& context, CUresult code) {
  if (context.fault != CUDA_SUCCESS) return;
  context.fault = code;
  drop_queued_work(context);
  driver().progress.notify_all();
  wake_scheduler();
}

void step_stream(std::unique_lock<std::mutex>& lock, const StreamPtr& stream, std::uint64_t n, std::uint64_t& ran) {
  Driver& d = driver();
  stream->allowance = n;
  wake_scheduler();
  d.progress.wait(lock, [&] {
    if (stream->queue.empty()) return true;
    const Entry& front = stream->queue.front();
    if (front.running)
      return front.work->engine == Engine::host_thread && d.controls.stall_host_functions &&
             d.host_functions_running == 0;
    return stream->allowance == 0 || (d.idle && !front_is_ready(*stream));
  });
  ran = n - stream->allowance;
  stream->allowance = 0;
}

void settle(std::unique_lock<std::mutex>& lock) {
  Driver& d = driver();
  d.progress.wait(lock, [&] {
    if (!d.idle || !d.timed.empty() || d.host_functions_running > 0) return false;
    if (d.controls.stall_host_functions) return true;
    const auto contexts = d.contexts.all();
    return std::all_of(contexts.begin(), contexts.end(), [](const auto& c) { return c->host_queue.empty(); });
  });
  for (const auto& stream : d.streams.all()) stream->lingering = 0;
}

}  // namespace emu
