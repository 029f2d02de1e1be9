#include "controls.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "memory.h"
#include "scheduler.h"

namespace {

using namespace emu;

std::unique_lock<std::mutex> locked() { return std::unique_lock(driver().mutex); }

StreamPtr stream_of(std::uintptr_t handle) {
  if (handle > per_thread_stream_handle) return driver().streams.find(reinterpret_cast<CUstream>(handle));
  auto context = current_context();
  if (!context && !driver().devices.empty()) context = driver().devices.front().primary;
  if (!context) return nullptr;
  return handle == per_thread_stream_handle ? per_thread_stream(context) : context->legacy_stream;
}

template <std::size_t size>
void put_text(char (&to)[size], const std::string& text) {
  std::strncpy(to, text.c_str(), size - 1);
  to[size - 1] = '\0';
}

std::size_t put_lines(char* text, std::size_t size, const std::vector<const char*>& names) {
  std::string lines;
  for (const auto* name : names) lines += std::string(name) + "\n";
  if (size > 0) {
    std::strncpy(text, lines.c_str(), size - 1);
    text[size - 1] = '\0';
  }
  return lines.size();
}

void restart_host_functions() {
  for (const auto& context : driver().contexts.all()) context->host_work.notify_all();
}

void changed() {
  wake_scheduler();
  restart_host_functions();
  driver().progress.notify_all();
}

bool set_hold(std::uintptr_t handle, Hold hold) {
  const auto lock = locked();
  const auto stream = stream_of(handle);
  if (!stream) return false;
  stream->hold = hold;
  changed();
  return true;
}

void release_everything() {
  Driver& d = driver();
  d.controls.hold_all = false;
  auto streams = d.streams.all();
  streams.insert(streams.end(), d.active.begin(), d.active.end());
  for (const auto& context : d.contexts.all()) {
    streams.push_back(context->legacy_stream);
    for (const auto& [thread, stream] : context->per_thread_streams) streams.push_back(stream);
  }
  for (const auto& stream : streams) {
    stream->hold = Hold::inherit;
    stream->lingering = 0;
  }
  changed();
}

}  // namespace

bool emu_configure(int devices, int driver_version, std::uint64_t device_nbytes) {
  const auto lock = locked();
  Driver& d = driver();
  const auto& current = d.configuration;
  if (d.initialised)
    return current.devices == devices && current.driver_version == driver_version &&
           current.device_nbytes == device_nbytes;
  d.configuration = {devices, driver_version, device_nbytes};
  return true;
}

void emu_reset() {
  auto lock = locked();
  Driver& d = driver();
  d.controls = {};
  release_everything();
  if (d.initialised) {
    for (auto& [finish, stream] : d.timed) finish = 0;
    wake_scheduler();
    // Streams that wait for something that never comes are given up.
    settle(lock);
    for (const auto& context : d.contexts.all()) {
      drop_queued_work(*context);
      context->fault = CUDA_SUCCESS;
    }
    changed();
  }
  d.calls.clear();
  d.waits.clear();
  d.call_log.clear();
}

bool emu_hold(std::uintptr_t stream) { return set_hold(stream, Hold::held); }
bool emu_release(std::uintptr_t stream) { return set_hold(stream, Hold::released); }

void emu_hold_all() {
  const auto lock = locked();
  release_everything();
  driver().controls.hold_all = true;
}

void emu_release_all() {
  const auto lock = locked();
  release_everything();
}

std::int64_t emu_step(std::uintptr_t handle, std::uint64_t n) {
  auto lock = locked();
  const auto stream = stream_of(handle);
  if (!stream) return -1;
  std::uint64_t ran = 0;
  step_stream(lock, stream, n, ran);
  return static_cast<std::int64_t>(ran);
}

std::int64_t emu_pending(std::uintptr_t handle, char* text, std::size_t size) {
  const auto lock = locked();
  const auto stream = stream_of(handle);
  if (!stream) return -1;
  std::vector<const char*> kinds;
  for (const auto& entry : stream->queue) kinds.push_back(name_of(entry.work->kind));
  return static_cast<std::int64_t>(put_lines(text, size, kinds));
}

std::size_t emu_busy_streams(std::uintptr_t* handles, std::size_t capacity) {
  const auto lock = locked();
  std::size_t found = 0;
  for (const auto& stream : driver().active) {
    if (found < capacity) handles[found] = reinterpret_cast<std::uintptr_t>(stream->handle);
    ++found;
  }
  return found;
}

bool emu_await_begun(std::uintptr_t handle, double seconds) {
  auto lock = locked();
  const auto stream = stream_of(handle);
  return stream && driver().progress.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return !stream->queue.empty() && stream->queue.front().running;
  });
}

void emu_settle() {
  auto lock = locked();
  if (driver().initialised) settle(lock);
}

emu::CUresult emu_kernel(std::uintptr_t handle, double milliseconds) {
  return driver_call("emu_kernel", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, reinterpret_cast<CUstream>(handle), stream); result != CUDA_SUCCESS)
      return result;
    Work work{Kind::kernel};
    work.duration_ns = static_cast<std::int64_t>(milliseconds * 1e6);
    return submit(call, stream, std::move(work), node_kernel);
  });
}

std::size_t emu_entry_points(char* text, std::size_t size) { return put_lines(text, size, entry_point_names()); }

std::size_t emu_kinds(char* text, std::size_t size) {
  std::vector<const char*> kinds;
  for (int kind = 0; kind <= static_cast<int>(Kind::free); ++kind) kinds.push_back(name_of(static_cast<Kind>(kind)));
  return put_lines(text, size, kinds);
}

void emu_fail_call(const char* name, std::uint64_t nth, int code) {
  const auto lock = locked();
  driver().controls.failing_calls.push_back({name, nth, static_cast<CUresult>(code)});
}

void emu_fail_operation(const char* kind, std::uint64_t nth, int code) {
  const auto lock = locked();
  driver().controls.failing_operations.push_back({kind, nth, static_cast<CUresult>(code)});
}

bool emu_fault(int device, int code) {
  const auto lock = locked();
  Driver& d = driver();
  if (device < 0 || static_cast<std::size_t>(device) >= d.devices.size()) return false;
  const auto& context = d.devices[static_cast<std::size_t>(device)].primary;
  if (!context) return false;
  fault_context(*context, static_cast<CUresult>(code));
  return true;
}

void emu_stall_host_functions(bool stall) {
  const auto lock = locked();
  driver().controls.stall_host_functions = stall;
  changed();
}

void emu_drop_host_functions(std::uint64_t n) {
  const auto lock = locked();
  driver().controls.drop_host_functions = n;
}

void emu_linger(std::uint64_t queries) {
  const auto lock = locked();
  driver().controls.linger = queries;
}

void emu_limit_memory(std::uint64_t device_nbytes, std::uint64_t pinned_nbytes) {
  const auto lock = locked();
  driver().controls.device_limit = device_nbytes;
  driver().controls.pinned_limit = pinned_nbytes;
}

std::uint64_t emu_pinned_nbytes() {
  const auto lock = locked();
  return driver().pinned;
}

void emu_throttle(double gigabytes_per_second, double latency_us, double pinning_ms_per_gib) {
  const auto lock = locked();
  Controls& controls = driver().controls;
  controls.gigabytes_per_second = gigabytes_per_second;
  controls.latency_us = latency_us;
  controls.pinning_ms_per_gib = pinning_ms_per_gib;
}

void emu_hold_pinning(bool hold) {
  const auto lock = locked();
  driver().controls.hold_pinning = hold;
  driver().progress.notify_all();
}

void emu_virtual_clock(bool enabled) {
  const auto lock = locked();
  Driver& d = driver();
  // Time goes on from where it is, so that no running operation is left behind.
  d.virtual_ns = now_ns();
  d.controls.virtual_clock = enabled;
  wake_scheduler();
}

std::uint64_t emu_calls(const char* name) {
  const auto lock = locked();
  const auto& calls = driver().calls;
  if (name) {
    const auto count = calls.find(name);
    return count == calls.end() ? 0 : count->second;
  }
  return std::accumulate(calls.begin(), calls.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const auto& count) { return sum + count.second; });
}

void emu_log_calls(bool enabled) {
  const auto lock = locked();
  driver().controls.log_calls = enabled;
}

std::size_t emu_call_log(EmuCall* calls, std::size_t capacity) {
  const auto lock = locked();
  const auto& log = driver().call_log;
  for (std::size_t index = 0; index < std::min(capacity, log.size()); ++index) {
    calls[index].thread_id = log[index].thread_id;
    put_text(calls[index].entry_point, log[index].entry_point);
    calls[index].result = log[index].result;
  }
  return log.size();
}

std::size_t emu_waits(EmuWait* waits, std::size_t capacity) {
  const auto lock = locked();
  const auto& log = driver().waits;
  for (std::size_t index = 0; index < std::min(capacity, log.size()); ++index) {
    waits[index].thread_id = log[index].thread_id;
    put_text(waits[index].entry_point, log[index].entry_point);
    put_text(waits[index].reason, log[index].reason);
  }
  return log.size();
}

bool emu_await_waiting(std::uint64_t threads, double seconds) {
  auto lock = locked();
  return driver().progress.wait_for(lock, std::chrono::duration<double>(seconds),
                                    [&] { return driver().threads_waiting >= threads; });
}

void emu_live(EmuLive* live) {
  const auto lock = locked();
  const Driver& d = driver();
  *live = {};
  live->streams = d.streams.size();
  const auto events = d.events.all();
  live->events = static_cast<std::uint64_t>(std::count_if(
      events.begin(), events.end(), [](const auto& event) { return !event->context->destroyed; }));
  live->contexts = d.contexts.size();
  live->graphs = d.graphs.size() + d.graph_execs.size();
  live->user_objects = d.user_objects.size();
  for (const auto& [base, allocation] : d.allocations) {
    switch (allocation->type) {
      case Allocation::Type::device: ++live->device_allocations; break;
      case Allocation::Type::managed: ++live->managed_allocations; break;
      case Allocation::Type::host: ++live->host_allocations; break;
      case Allocation::Type::registration: ++live->registrations; break;
    }
  }
}

bool emu_read(std::uint64_t address, void* data, std::size_t nbytes) {
  const auto lock = locked();
  const auto allocation = allocation_at(address);
  if (!allocation || nbytes > allocation->base + allocation->size - address) return false;
  std::memcpy(data, touchable(address), nbytes);
  return true;
}

bool emu_write(std::uint64_t address, const void* data, std::size_t nbytes) {
  const auto lock = locked();
  const auto allocation = allocation_at(address);
  if (!allocation || nbytes > allocation->base + allocation->size - address) return false;
  std::memcpy(touchable(address), data, nbytes);
  return true;
}
