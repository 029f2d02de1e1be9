#include "call.h"

#include <atomic>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace emu {

namespace {

// Without destructors, so that a call from a thread that is ending still works.
struct ThreadContexts {
  std::array<CUcontext, 64> stack;
  std::size_t depth;
};
thread_local ThreadContexts contexts;
thread_local bool host_function_thread = false;
thread_local int per_thread_default = 0;
thread_local pid_t cached_thread_id = 0;

std::atomic<bool> forked_flag{false};

constexpr std::size_t log_limit = 100000;

CUresult planned_failure(const char* name) {
  auto& plans = driver().controls.failing_calls;
  CUresult code = CUDA_SUCCESS;
  for (auto plan = plans.begin(); plan != plans.end();) {
    if (plan->name != name || --plan->remaining > 0) {
      ++plan;
      continue;
    }
    code = plan->code;
    plan = plans.erase(plan);
  }
  return code;
}

}  // namespace

Driver& driver() {
  static Driver& instance = [&]() -> Driver& {
    // The child may do nothing but look at a flag: its copies of locks and threads are of no use.
    pthread_atfork(nullptr, nullptr, [] { forked_flag.store(true, std::memory_order_relaxed); });
    return *new Driver;
  }();
  return instance;
}

pid_t thread_id() {
  if (cached_thread_id == 0) cached_thread_id = static_cast<pid_t>(syscall(SYS_gettid));
  return cached_thread_id;
}

bool forked() { return forked_flag.load(std::memory_order_relaxed); }
bool inside_host_function() { return host_function_thread; }
void mark_host_function_thread() { host_function_thread = true; }

PerThreadDefaultStream::PerThreadDefaultStream() { ++per_thread_default; }
PerThreadDefaultStream::~PerThreadDefaultStream() { --per_thread_default; }

void Call::note_wait(const char* reason) {
  auto& waits = driver().waits;
  if (waits.size() < log_limit) waits.push_back({static_cast<std::uint64_t>(thread_id()), name_, reason});
}

CUresult admit(Call& call, Needs needs) {
  Driver& d = driver();
  ++d.calls[call.name()];
  if (call.manner == Manner::acts)
    call.wait_unless("pinning", [&d] { return d.pinning_thread == 0 || d.pinning_thread == thread_id(); });
  if (const auto code = planned_failure(call.name()); code != CUDA_SUCCESS) return code;
  if (needs == Needs::nothing) return CUDA_SUCCESS;
  if (!d.initialised) return CUDA_ERROR_NOT_INITIALIZED;
  call.context = current_context();
  if (needs == Needs::initialised) return CUDA_SUCCESS;
  if (call.context) return call.context->fault;
  if (needs == Needs::healthy) return CUDA_SUCCESS;
  return current_context_handle() ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
}

void note_result(Call& call, CUresult result) {
  Driver& d = driver();
  if (d.controls.log_calls && d.call_log.size() < log_limit)
    d.call_log.push_back({static_cast<std::uint64_t>(thread_id()), call.name(), result});
}

CUcontext current_context_handle() { return contexts.depth ? contexts.stack[contexts.depth - 1] : nullptr; }

ContextPtr current_context() { return driver().contexts.find(current_context_handle()); }

void set_current_context(CUcontext handle) {
  if (contexts.depth) --contexts.depth;
  if (handle) contexts.stack[contexts.depth++] = handle;
}

bool push_context(CUcontext handle) {
  if (contexts.depth == contexts.stack.size()) return false;
  contexts.stack[contexts.depth++] = handle;
  return true;
}

CUcontext pop_context() { return contexts.depth ? contexts.stack[--contexts.depth] : nullptr; }

void forget_context(CUcontext handle) {
  if (current_context_handle() == handle) pop_context();
}

CUresult resolve_stream(Call& call, CUstream handle, StreamPtr& stream) {
  auto value = reinterpret_cast<std::uintptr_t>(handle);
  if (value == 0) value = per_thread_default ? per_thread_stream_handle : legacy_stream_handle;
  if (value > per_thread_stream_handle) {
    stream = driver().streams.find(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  } else {
    if (!call.context) return CUDA_ERROR_INVALID_CONTEXT;
    stream = value == legacy_stream_handle ? call.context->legacy_stream : per_thread_stream(call.context);
  }
  return stream->context->fault;
}

CUresult find_event(CUevent handle, EventPtr& event) {
  event = driver().events.find(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  return event->context->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : event->context->fault;
}

}  // namespace emu
