// One call of a user's host function, with what it needs until it has run: a copy of the user data, and the owner of the
// function. After a device fault the driver runs no host function any more and does not say so; whether it still might
// cannot be known, so such a call is never freed. Everywhere else its memory is freed exactly once.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "driver_abi.h"

namespace aiocuda {

struct HostCall {
  abi::HostFunction function;
  void* data;
  void* owner;
  HostCall* next;
};

// Calls that have run and whose owner waits for a thread that may let go of it, which needs the GIL: pushed by the driver's
// thread without a lock, taken as a whole by the next launch.
inline std::atomic<HostCall*> finished_host_calls{nullptr};

inline HostCall* new_host_call(abi::HostFunction function, void* address, const void* bytes, size_t nbytes,
                               void* owner) noexcept {
  auto* call = static_cast<HostCall*>(std::malloc(sizeof(HostCall) + (bytes != nullptr ? nbytes : 0)));
  if (call == nullptr) return nullptr;
  *call = HostCall{function, address, owner, nullptr};
  if (bytes != nullptr) {
    call->data = call + 1;
    std::memcpy(call->data, bytes, nbytes);
  }
  return call;
}

inline void free_host_call(HostCall* call) noexcept { std::free(call); }

inline HostCall* take_finished_host_calls() noexcept {
  return finished_host_calls.exchange(nullptr, std::memory_order_acquire);
}

// The host function that the driver gets in place of the user's.
extern "C" inline void aiocuda_run_host_call(void* data) noexcept {
  auto* call = static_cast<HostCall*>(data);
  call->function(call->data);
  if (call->owner == nullptr) {
    free_host_call(call);
    return;
  }
  call->next = finished_host_calls.load(std::memory_order_relaxed);
  while (!finished_host_calls.compare_exchange_weak(call->next, call, std::memory_order_release,
                                                    std::memory_order_relaxed)) {
  }
}

struct LaunchResult {
  bool enqueuing;  // whether the code is the enqueue's; else it is that of the question before it
  abi::Result code;
  int capture_status;
};

// Asks whether the stream is being captured and enqueues only where it is not. In relaxed mode neither call can invalidate
// a capture that another thread has under way.
inline LaunchResult enqueue_host_call(abi::Stream stream, HostCall* call) noexcept {
  LaunchResult result{false, abi::kSuccess, abi::kCaptureNone};
  int mode = abi::kCaptureRelaxed;
  const bool exchanged = abi::driver.exchange_capture_mode(&mode) == abi::kSuccess;
  result.code = abi::driver.stream_is_capturing(stream, &result.capture_status);
  if (result.code == abi::kErrorStreamCaptureImplicit) {
    // The legacy default stream beside a blocking stream that is being captured: work on it would end that capture.
    result.code = abi::kSuccess;
    result.capture_status = abi::kCaptureActive;
  }
  if (result.code == abi::kSuccess && result.capture_status == abi::kCaptureNone) {
    result.enqueuing = true;
    result.code = abi::driver.launch_host_function(stream, aiocuda_run_host_call, call);
  }
  if (exchanged) abi::driver.exchange_capture_mode(&mode);
  return result;
}

}  // namespace aiocuda
