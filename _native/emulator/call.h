// The frame of every entry point: counting, the lock, planned failures, the thread's context, sticky faults.
#pragma once

#include <mutex>
#include <utility>

#include "state.h"

namespace emu {

enum class Needs {
  nothing,      // works before cuInit
  initialised,  // works also when the current context has failed
  healthy,      // a fault of the current context, if there is one, is returned
  context,      // there must be a current context
};

enum class Manner {
  acts,
  asks,  // is answered in a host function too, and while another thread pins memory
};

class Call {
 public:
  Call(const char* name, Manner manner) : manner(manner), lock(driver().mutex), name_(name) {}

  // Blocks the calling thread, and puts that on record for the tests that assert who waited.
  template <class Predicate>
  void wait(const char* reason, Predicate done) {
    note_wait(reason);
    ++driver().threads_waiting;
    driver().progress.notify_all();
    driver().progress.wait(lock, done);
    --driver().threads_waiting;
  }
  template <class Predicate>
  void wait_unless(const char* reason, Predicate done) {
    if (!done()) wait(reason, done);
  }
  void note_wait(const char* reason);

  const char* name() const { return name_; }

  const Manner manner;
  std::unique_lock<std::mutex> lock;
  ContextPtr context;                             // the thread's current one
  std::vector<std::function<void()>> afterwards;  // foreign code, which must not run under the lock

 private:
  const char* name_;
};

// What has to hold before an entry point does anything.
CUresult admit(Call& call, Needs needs);
void note_result(Call& call, CUresult result);
bool forked();
bool inside_host_function();
void mark_host_function_thread();

template <class Body>
CUresult driver_call(const char* name, Needs needs, Body&& body, Manner manner = Manner::acts) {
  // In a forked child the lock may be held by a thread that does not exist there.
  if (forked()) return CUDA_ERROR_NOT_INITIALIZED;
  if (inside_host_function() && needs != Needs::nothing && manner == Manner::acts) return CUDA_ERROR_NOT_PERMITTED;
  std::vector<std::function<void()>> afterwards;
  CUresult result;
  {
    Call call(name, manner);
    result = admit(call, needs);
    if (result == CUDA_SUCCESS) result = body(call);
    note_result(call, result);
    afterwards = std::move(call.afterwards);
  }
  for (auto& action : afterwards) action();
  return result;
}

template <class Body>
CUresult query_call(const char* name, Needs needs, Body&& body) {
  return driver_call(name, needs, std::forward<Body>(body), Manner::asks);
}

// Contexts of the calling thread.
ContextPtr current_context();
CUcontext current_context_handle();
void set_current_context(CUcontext handle);
bool push_context(CUcontext handle);
CUcontext pop_context();
void forget_context(CUcontext handle);

// Those of the entry points, as cuGetProcAddress finds them; one with several signatures is there several times.
std::vector<const char*> entry_point_names();

// What handles 0, 1 and 2 and created streams mean to the calling thread. Returns the fault of the stream's context.
CUresult resolve_stream(Call& call, CUstream handle, StreamPtr& stream);
CUresult find_event(CUevent handle, EventPtr& event);
ContextPtr create_context(int device, unsigned flags);
void destroy_context(Call& call, const ContextPtr& context);
StreamPtr per_thread_stream(const ContextPtr& context);

// While one is alive, handle 0 means the per-thread default stream.
class PerThreadDefaultStream {
 public:
  PerThreadDefaultStream();
  ~PerThreadDefaultStream();
};

template <auto function>
struct PerThread;
template <class... Arguments, CUresult (*function)(Arguments...)>
struct PerThread<function> {
  static CUresult call(Arguments... arguments) {
    PerThreadDefaultStream scope;
    return function(arguments...);
  }
};

}  // namespace emu
