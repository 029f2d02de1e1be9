// The emulator's own interface, for tests: what makes the device hold still, fail or tell. Streams are given by handle, with
// the meaning that they have for the calling thread; without a current context the default streams are device 0's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi.h"

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

struct EmuWait {
  std::uint64_t thread_id;
  char entry_point[48];
  char reason[32];
};

struct EmuCall {
  std::uint64_t thread_id;
  char entry_point[48];
  int result;
};

struct EmuLive {
  std::uint64_t streams, events, device_allocations, managed_allocations, host_allocations, registrations, contexts,
      graphs, user_objects;
};

// Before cuInit; false afterwards, unless it changes nothing.
EMU_EXPORT bool emu_configure(int devices, int driver_version, std::uint64_t device_nbytes);
EMU_EXPORT void emu_reset();

// A stream that does not exist is answered with false or -1.
EMU_EXPORT bool emu_hold(std::uintptr_t stream);
EMU_EXPORT bool emu_release(std::uintptr_t stream);
EMU_EXPORT void emu_hold_all();
EMU_EXPORT void emu_release_all();
EMU_EXPORT std::int64_t emu_step(std::uintptr_t stream, std::uint64_t n);
// Kinds, one a line; the length that the whole text has.
EMU_EXPORT std::size_t emu_busy_streams(std::uintptr_t* handles, std::size_t capacity);
EMU_EXPORT std::int64_t emu_pending(std::uintptr_t stream, char* text, std::size_t size);
// Waits until the stream's next operation has begun, and is not done.
EMU_EXPORT bool emu_await_begun(std::uintptr_t stream, double seconds);
EMU_EXPORT void emu_settle();
EMU_EXPORT emu::CUresult emu_kernel(std::uintptr_t stream, double milliseconds);

// Names, one a line; the length that the whole text has.
EMU_EXPORT std::size_t emu_entry_points(char* text, std::size_t size);
EMU_EXPORT std::size_t emu_kinds(char* text, std::size_t size);
EMU_EXPORT void emu_fail_call(const char* name, std::uint64_t nth, int code);
EMU_EXPORT void emu_fail_operation(const char* kind, std::uint64_t nth, int code);
EMU_EXPORT bool emu_fault(int device, int code);
EMU_EXPORT void emu_stall_host_functions(bool stall);
EMU_EXPORT void emu_drop_host_functions(std::uint64_t n);
EMU_EXPORT void emu_linger(std::uint64_t queries);
EMU_EXPORT void emu_limit_memory(std::uint64_t device_nbytes, std::uint64_t pinned_nbytes);
EMU_EXPORT std::uint64_t emu_pinned_nbytes();
EMU_EXPORT void emu_throttle(double gigabytes_per_second, double latency_us, double pinning_ms_per_gib);
EMU_EXPORT void emu_hold_pinning(bool hold);
EMU_EXPORT void emu_virtual_clock(bool enabled);

EMU_EXPORT std::uint64_t emu_calls(const char* name);
EMU_EXPORT void emu_log_calls(bool enabled);
EMU_EXPORT std::size_t emu_call_log(EmuCall* calls, std::size_t capacity);
EMU_EXPORT std::size_t emu_waits(EmuWait* waits, std::size_t capacity);
// Waits until so many threads are inside a driver call that waits: a test learns that another thread has got there.
EMU_EXPORT bool emu_await_waiting(std::uint64_t threads, double seconds);
EMU_EXPORT void emu_live(EmuLive* live);

EMU_EXPORT bool emu_read(std::uint64_t address, void* data, std::size_t nbytes);
EMU_EXPORT bool emu_write(std::uint64_t address, const void* data, std::size_t nbytes);
