// What the emulated driver knows. Everything here is guarded by Driver::mutex unless a comment says otherwise.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <sys/types.h>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"
#include "handles.h"

namespace emu {

enum class Engine { none, device_to_host, host_to_device, host_thread };
enum class Kind { copy, memset, kernel, host_function, event_record, event_wait, write_value, wait_value, allocate, free };
const char* name_of(Kind kind);

struct Context;
struct Stream;
struct Capture;
struct Graph;
struct GraphExec;
struct Node;
using ContextPtr = std::shared_ptr<Context>;
using StreamPtr = std::shared_ptr<Stream>;

struct Pool {
  CUmemoryPool handle = nullptr;
  CUmemPoolProps props{};
  std::uint64_t release_threshold = 0;
  std::uint64_t used = 0, used_high = 0;
  std::array<int, 3> reuse{1, 1, 1};
  std::set<int> accessible_from;
};
using PoolPtr = std::shared_ptr<Pool>;

struct Allocation {
  enum class Type { device, managed, host, registration };
  Type type;
  std::uintptr_t base = 0;
  std::size_t size = 0;
  int device = 0;
  ContextPtr context{};
  unsigned flags = 0;
  PoolPtr pool{};
  std::uint64_t id = 0;
  bool freed = false;  // operations that still refer to it fault when they run
  int in_use = 0;      // operations running on it: freeing waits for them, because the bytes are moved without the lock
};
using AllocationPtr = std::shared_ptr<Allocation>;

// One thing a stream does. Immutable once submitted, so that a graph can replay it.
struct Work {
  Kind kind;
  Engine engine = Engine::none;
  int device = 0;
  std::size_t nbytes = 0;
  std::int64_t duration_ns = 0;
  std::vector<AllocationPtr> touches{};
  std::function<bool()> ready{};   // lock held
  std::function<void()> begin{};   // lock held
  std::function<void()> move{};    // lock not held
  std::function<void()> finish{};  // lock held
  CUhostFn function = nullptr;
  void* argument = nullptr;
  // In a stream with nothing to do it is done when it is enqueued. So is an event that is not to know the time: the driver
  // takes note of where the stream is, and asks the device nothing.
  bool at_once = false;
};
using WorkPtr = std::shared_ptr<const Work>;
using WorkFactory = std::function<WorkPtr()>;

// What the streams of a context share of the GPU's channels: each kind has a few.
enum class Channels : std::uint8_t { to_host, to_device, compute };

struct Usage {
  std::size_t places = 0;    // of the entries behind their streams' first
  std::size_t segments = 0;  // host functions that follow other work
};

struct Entry {
  WorkPtr work;
  std::vector<std::pair<StreamPtr, std::uint64_t>> after;  // what default-stream ordering makes it wait for
  bool running = false;
  std::optional<Channels> place{}, segment{};  // what it takes until it is the first, and until it has left the queue
};

enum class Hold { inherit, held, released };

struct Stream {
  CUstream handle = nullptr;
  ContextPtr context;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t id = 0;
  bool legacy = false;

  std::deque<Entry> queue;
  std::uint64_t enqueued = 0, completed = 0;
  bool active = false;
  std::uint64_t served = 0;
  Usage usage;
  std::optional<Channels> since_host_function;  // where the last work goes that no host function has followed yet
  // Queries that still say the stream is busy: a value write is seen before the stream that ends with it is done.
  std::uint64_t lingering = 0;

  Hold hold = Hold::inherit;
  std::uint64_t allowance = 0;

  std::shared_ptr<Capture> capture;
  std::vector<CUgraphNode> capture_tail;

  bool blocking() const { return !legacy && !(flags & stream_non_blocking); }
};

// What one cuEventRecord stands for; the event may be recorded again, or gone, before it is reached.
struct Record {
  bool done = false;
  std::int64_t time_ns = 0;
  std::weak_ptr<Capture> capture;
  std::vector<CUgraphNode> capture_tail;
};

struct Event {
  CUevent handle = nullptr;
  ContextPtr context;
  unsigned flags = 0;
  std::shared_ptr<Record> record;
};
using EventPtr = std::shared_ptr<Event>;

struct Context {
  CUcontext handle = nullptr;
  int device = 0;
  unsigned flags = 0;
  std::uint64_t id = 0;
  bool primary = false;
  bool destroyed = false;
  CUresult fault = CUDA_SUCCESS;
  StreamPtr legacy_stream;
  std::map<pid_t, StreamPtr> per_thread_streams;
  std::set<CUcontext> peers;
  std::array<Usage, 3> usage;
  std::size_t blocked = 0;  // callers that wait for a full stream, and whom host functions wait for

  std::deque<StreamPtr> host_queue;
  std::condition_variable host_work;
  bool host_thread = false;
};

struct EngineState {
  StreamPtr last;
  bool busy = false;
};

struct Device {
  ContextPtr primary;
  int primary_references = 0;
  unsigned primary_flags = 0;
  PoolPtr default_pool, current_pool;
  std::size_t used = 0;
  std::map<std::uintptr_t, std::size_t> free_ranges;
  std::array<EngineState, 2> copy_engines;
};

struct Module {
  CUmodule handle = nullptr;
  ContextPtr context;
};

struct UserObject {
  CUuserObject handle = nullptr;
  void* pointer = nullptr;
  CUhostFn destroy = nullptr;
  std::uint64_t references = 0;
};

struct Wait {
  std::uint64_t thread_id;
  std::string entry_point, reason;
};

struct LoggedCall {
  std::uint64_t thread_id;
  std::string entry_point;
  int result;
};

// What a test sets; `Driver::controls = {}` is the reset.
struct Controls {
  bool hold_all = false;
  bool stall_host_functions = false;
  bool hold_pinning = false;
  bool virtual_clock = false;
  bool log_calls = false;
  std::uint64_t drop_host_functions = 0;
  std::uint64_t linger = 1;
  std::size_t device_limit = SIZE_MAX, pinned_limit = SIZE_MAX;
  double gigabytes_per_second = 0, latency_us = 0, pinning_ms_per_gib = 0;
  struct Failure {
    std::string name;
    std::uint64_t remaining;
    CUresult code;
  };
  std::vector<Failure> failing_calls, failing_operations;
};

struct Configuration {
  int devices = 1;
  int driver_version = 13000;
  std::size_t device_nbytes = std::size_t{16} << 30;
};

struct Driver {
  std::mutex mutex;
  std::condition_variable work;      // the scheduler sleeps on it
  std::condition_variable progress;  // everybody else does

  Configuration configuration;
  bool initialised = false;
  std::uintptr_t window = 0;         // device addresses; the writable alias follows right behind
  std::vector<Device> devices;

  HandleTable<CUcontext, Context> contexts{0x5e0100000000};
  HandleTable<CUstream, Stream> streams{0x5e0200000000};
  HandleTable<CUevent, Event> events{0x5e0300000000};
  HandleTable<CUmemoryPool, Pool> pools{0x5e0400000000};
  HandleTable<CUgraph, Graph> graphs{0x5e0500000000};
  HandleTable<CUgraphExec, GraphExec> graph_execs{0x5e0600000000};
  HandleTable<CUgraphNode, Node> nodes{0x5e0700000000};
  HandleTable<CUuserObject, UserObject> user_objects{0x5e0800000000};
  HandleTable<CUmodule, Module> modules{0x5e0900000000};

  std::map<std::uintptr_t, AllocationPtr> allocations;  // by base address; ranges never overlap
  std::size_t pinned = 0;
  PoolPtr host_pool;
  std::multimap<std::size_t, void*> spare_host_memory;
  std::uint64_t next_id = 1;

  std::vector<std::weak_ptr<Capture>> captures;
  std::vector<std::shared_ptr<GraphExec>> dying_graphs;  // destroyed while they run

  std::vector<StreamPtr> active;     // streams with something queued
  std::vector<std::pair<std::int64_t, StreamPtr>> timed;
  std::int64_t virtual_ns = 0;
  std::uint64_t served = 0;
  bool idle = false;                 // the scheduler found nothing to do since it was last woken
  int host_functions_running = 0;

  pid_t pinning_thread = 0;
  std::uint64_t threads_waiting = 0;

  Controls controls;
  std::unordered_map<std::string, std::uint64_t> calls;
  std::vector<Wait> waits;
  std::vector<LoggedCall> call_log;

  Device& device_of(const Context& context) { return devices[static_cast<std::size_t>(context.device)]; }
};

// Never destroyed: the scheduler's and the host functions' threads outlive static destructors.
Driver& driver();

pid_t thread_id();

}  // namespace emu
