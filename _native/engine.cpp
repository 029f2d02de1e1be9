#include "engine.h"

#include <sys/prctl.h>

#include <algorithm>
#include <memory>

#include "clock.h"
#include "memory.h"
#include "threads.h"

namespace aiocuda {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

constexpr size_t kMostSlots = 64;
constexpr size_t kMostSmallSlots = 256;
// What has landed waits in its slot for its loop. Loops that do not come round must leave slots to the others.
constexpr size_t kMostLanded = kMostSmallSlots / 2;

// Pieces of 4 MiB leave a stranger's small copy waiting for 118 us at 0.96 of the link. To the device strangers do not wait
// however bulk is queued, and larger pieces in one stream gain two percent. Copies inside a device are so fast that a piece must be large to be worth a
// round of the engine.
constexpr Channel::Config kToHost{false, 2, 2, 1, 4 * kMiB, true};
constexpr Channel::Config kToDevice{false, 1, 2, 1, 8 * kMiB, true, Channel::Road::kCopyEngine, true};
constexpr Channel::Config kBetweenDevices{false, 2, 2, 1, 64 * kMiB};
constexpr Channel::Config kSmallToHost{true, 1, 8, 32, kSmallBytes};
constexpr Channel::Config kSmallByKernel{true, 1, 8, 32, kSmallBytes, true, Channel::Road::kKernel};
// To the device small copies do not starve, so they need no second road.
constexpr Channel::Config kSmallToDevice{true, 1, 8, 32, kSmallBytes, true, Channel::Road::kKernelForCrowds};

std::atomic<Engine*> engines[Engine::kMostDevices];

// Oldest first.
QueueNode* take_all(std::atomic<QueueNode*>* list) {
  if (list->load(std::memory_order_relaxed) == nullptr) return nullptr;
  return oldest_first(list->exchange(nullptr, std::memory_order_acquire));
}

// Of synchronisations of one stream each waits for the copies by itself.
bool waits_for(const Operation& synchronization, const Operation& other) {
  if (synchronization.synchronizes == Synchronizes::kQuota) return other.quota == synchronization.quota;
  return other.synchronizes == Synchronizes::kNothing && synchronization.stream_key != kNoStreamKey &&
         (other.stream_key == synchronization.stream_key || other.also_key == synchronization.stream_key);
}

// Whom a copier that is being closed waits with is nobody's that counts.
bool counts(const Operation& operation) { return operation.synchronizes != Synchronizes::kQuota; }

bool is_small(const Operation& operation) {
  if (operation.parts.size() != 1 || operation.in_stream) return false;
  const Part& part = operation.parts.front();
  return part.route != Route::kDeviceToDevice && part.count() == 1 && part.nbytes() <= kSmallBytes;
}

}  // namespace

Engine* Engine::of_device(int device) {
  static std::mutex* const mutex = new std::mutex;
  if (device < 0 || device >= kMostDevices) return nullptr;
  if (Engine* engine = engines[device].load(std::memory_order_acquire)) return engine;
  std::lock_guard<std::mutex> lock(*mutex);
  if (Engine* engine = engines[device].load(std::memory_order_relaxed)) return engine;
  std::unique_ptr<Engine> engine(new Engine(device));
  if (!try_start_thread("aiocuda-engine", [started = engine.get()] { started->run(); })) return nullptr;
  engines[device].store(engine.get(), std::memory_order_release);
  return engine.release();
}

ColumnPool* column_pool(int device) {
  if (device < 0 || device >= Engine::kMostDevices) return nullptr;
  Engine* const engine = engines[device].load(std::memory_order_acquire);
  return engine == nullptr ? nullptr : &engine->scatter().columns();
}

std::vector<Engine*> Engine::all() {
  std::vector<Engine*> found;
  for (auto& slot : engines) {
    if (Engine* engine = slot.load(std::memory_order_acquire)) found.push_back(engine);
  }
  return found;
}

Engine::Engine(int device)
    : device_(device),
      may_spin_(cpu_budget() > 2),
      workers_(std::clamp<size_t>(cpu_budget() - std::min<size_t>(cpu_budget(), 2), 1, Workers::kMost),
               [](void* engine, Piece* piece) {
                 push_node(&static_cast<Engine*>(engine)->done_, &piece->node);
                 static_cast<Engine*>(engine)->wake();
               },
               this),
      slots_(device),
      small_slots_(device, 2 * kMiB),
      scatter_(device),
      to_host_(*this, kToHost),
      to_device_(*this, kToDevice),
      between_devices_(*this, kBetweenDevices),
      small_to_host_(*this, kSmallToHost),
      small_by_kernel_(*this, kSmallByKernel),
      small_to_device_(*this, kSmallToDevice),
      channels_{&to_host_, &to_device_, &between_devices_, &small_to_host_, &small_by_kernel_, &small_to_device_} {}

// ---- any thread

void Engine::submit(Operation* operation) {
  operation->quota->references.fetch_add(1, std::memory_order_relaxed);
  if (counts(*operation)) operation->quota->submitted.fetch_add(1, std::memory_order_relaxed);
  operation->early.early = true;
  operation->droppable = !operation->unowned && is_small(*operation) && to_host(operation->parts.front().route);
  push_node(&inbox_, &operation->node);
  wake();
}

Cancelled Engine::cancel(Operation* operation) {
  if (operation->only_read) return Cancelled::kDropped;
  operation->cancel.store(true, std::memory_order_release);
  Cancelled outcome = Cancelled::kMustWait;
  Phase expected = Phase::kWaiting;
  // A synchronisation touches nothing, and what it waits for may take long.
  if (operation->phase.compare_exchange_strong(expected, Phase::kCancelled, std::memory_order_acq_rel) ||
      operation->parts.empty()) {
    outcome = Cancelled::kUntouched;
  } else if (operation->droppable && expected == Phase::kAdmitted &&
             operation->phase.compare_exchange_strong(expected, Phase::kCancelled, std::memory_order_acq_rel)) {
    outcome = Cancelled::kDropped;
  }
  cancellations_.store(true, std::memory_order_release);
  wake();
  return outcome;
}

void Engine::give_back(Piece* landed, bool lost) {
  if (landed->counted) landed_.fetch_sub(1, std::memory_order_relaxed);
  if (lost) {
    small_slots_.lose(landed->slot);
  } else {
    small_slots_.give(landed->slot);
  }
  delete landed;
}

bool Engine::stop(uint64_t timeout_ns) {
  stop_.store(true, std::memory_order_release);
  wake();
  const uint64_t end = now_ns() + timeout_ns;
  while (!stopped_.load(std::memory_order_acquire) || scatter_.loading()) {
    if (now_ns() > end) return false;
    const timespec nap{0, 200'000};
    nanosleep(&nap, nullptr);
  }
  return true;
}

// ---- for channels

Slot* Engine::take_slot(Part* part, bool small) {
  abi::Result error = abi::kSuccess;
  Slot* slot = nullptr;
  if (small) {
    slot = small_slots_.take(kSmallBytes, kMostSmallSlots, &error);
  } else {
    Quota& quota = *part->operation->quota;
    if (quota.slots_in_use.load(std::memory_order_relaxed) >= quota.slots) return nullptr;
    slot = slots_.take(quota.slot_nbytes, kMostSlots, &error);
    if (slot != nullptr) quota.slots_in_use.fetch_add(1, std::memory_order_relaxed);
  }
  report(*part->operation, error);
  return slot;
}

bool Engine::stopped(const Operation& operation) const {
  return operation.result != 0 || operation.cancel.load(std::memory_order_acquire);
}

void Engine::report(Operation& operation, abi::Result result) {
  if (operation.result == 0) operation.result = result;
}

void Engine::landed(Piece* piece) {
  scatter_.give_back(piece);
  if (piece->part == nullptr) {
    Operation* operation = piece->reading;
    discard(piece);
    end_reading(operation);
    return;
  }
  disown(piece->twin);
  Operation& operation = *piece->part->operation;
  if (piece->part->route == Route::kToHostStaged && !stopped(operation)) {
    const bool crowded = piece->small && landed_.load(std::memory_order_relaxed) >= kMostLanded;
    Phase expected = Phase::kAdmitted;
    if (!piece->small) foresee(piece->part);
    if (!piece->small ||
        (crowded && operation.phase.compare_exchange_strong(expected, Phase::kDelivered, std::memory_order_acq_rel))) {
      hand_to_workers(piece);
      return;
    }
    if (crowded) {  // and cancelled just now
      came_back(piece);
      return;
    }
    landed_.fetch_add(1, std::memory_order_relaxed);
    piece->counted = true;
    operation.landed = piece;
    operation.nbytes_done.fetch_add(piece->nbytes, std::memory_order_relaxed);
    --piece->part->outstanding;
    settle(piece->part);
    return;
  }
  came_back(piece);
}

void Engine::came_back(Piece* piece) {
  Part* part = piece->part;
  Operation& operation = *part->operation;
  scatter_.give_back(piece);
  if (Slot* slot = piece->slot) {
    if (piece->small) {
      small_slots_.give(slot);
    } else {
      operation.quota->slots_in_use.fetch_sub(1, std::memory_order_relaxed);
      slots_.give(slot);
    }
  }
  operation.nbytes_done.fetch_add(piece->nbytes, std::memory_order_relaxed);
  --part->outstanding;
  if (!piece->small) foresee(part);
  delete piece;
  settle(part);
}

void Engine::foresee(Part* part) {
  if (part->route == Route::kToHostStaged && part->ending()) part->operation->queue->announce();
}

void Engine::lost(Piece* piece) {
  if (piece->part == nullptr) {
    Operation* operation = piece->reading;
    operation->leaked = true;
    delete piece;
    end_reading(operation);
    return;
  }
  disown(piece->twin);
  Operation& operation = *piece->part->operation;
  operation.leaked = true;
  // What the device might still touch is nobody's any more, so it does not count against the quota either.
  if (piece->slot != nullptr && !piece->small) operation.quota->slots_in_use.fetch_sub(1, std::memory_order_relaxed);
  piece->slot = nullptr;
  piece->table = {};
  piece->bundle = 0;
  came_back(piece);
}

void Engine::settle(Part* part) {
  if (!part->exhausted() || part->listed || part->outstanding != 0) return;
  Operation* operation = part->operation;
  if (--operation->unfinished_parts == 0) finish(operation);
}

void Engine::fault(abi::Result result) {
  fault_ = result;
  inline_lane_.close();
  // First: what is pushed below gives its columns back, which a kernel may still read.
  scatter_.columns().leak();
  for (Operation* operation = alive_; operation != nullptr; operation = operation->following) report(*operation, result);
  each_channel([](Channel& c) { c.abandon(); });
  std::vector<Operation*> waiting;
  waiting.swap(stragglers_);
  for (auto& [key, line] : waiting_) waiting.insert(waiting.end(), line.begin(), line.end());
  waiting_.clear();
  for (Operation* operation : waiting) {
    operation->leaked |= operation->in_stream;
    admit(operation);
  }
  // What the device might still write to stays out of the pools for good.
  slots_.leak();
  small_slots_.leak();
  scatter_.close();
  gates_.forget();
}

// ---- the engine's thread

abi::Result Engine::start() {
  peers_.assign(kMostDevices, false);
  abi::Result result = primary_context(device_, &context_);
  if (result == abi::kSuccess) result = abi::driver.context_set_current(context_);
  int mode = abi::kCaptureRelaxed;
  if (result == abi::kSuccess) result = abi::driver.exchange_capture_mode(&mode);
  each_channel([&](Channel& c) {
    if (result == abi::kSuccess) result = c.open();
  });
  if (result == abi::kSuccess) inline_lane_.open(context_, &small_slots_, &scatter_);
  if (result == abi::kSuccess) scatter_.open(context_);
  return result;
}

// A context that was reset works again, with nothing of what was made in it before.
bool Engine::revive() {
  if (start() != abi::kSuccess) return false;
  fault_ = abi::kSuccess;
  return true;
}

void Engine::run() {
  prctl(PR_SET_TIMERSLACK, 1);
  fault_ = start();
  last_progress_ns_ = now_ns();
  while (true) {
    const uint32_t seen = signal_.load(std::memory_order_seq_cst);
    bool progress = take_inbox();
    progress |= sweep_cancelled();
    progress |= admit_waiting();
    if (lost_ != abi::kSuccess) {
      if (fault_ == abi::kSuccess) fault(lost_);
      lost_ = abi::kSuccess;
    }
    progress |= take_done();
    each_channel([&](Channel& c) { progress |= c.retire(); });
    progress |= choose_roads();
    progress |= end_lingering();
    // The device first: handing out work takes a while.
    each_channel([&](Channel& c) { progress |= c.issue(); });
    each_channel([&](Channel& c) { progress |= c.fill(); });
    progress |= feed_workers();
    if (progress) {
      last_progress_ns_ = now_ns();
      continue;
    }
    if (stop_.load(std::memory_order_acquire)) break;
    if (fault_ == abi::kSuccess && scatter_.columns().make_wanted()) continue;
    rest(seen);
  }
  stopped_.store(true, std::memory_order_release);
}

bool Engine::take_inbox() {
  QueueNode* node = take_all(&inbox_);
  if (node == nullptr) return false;
  while (node != nullptr) {
    QueueNode* next = node->next;
    arrive(reinterpret_cast<Operation*>(node));
    node = next;
  }
  return true;
}

void Engine::arrive(Operation* operation) {
  operation->following = alive_;
  if (alive_ != nullptr) alive_->previous = operation;
  alive_ = operation;
  ++alive_count_;
  operation->waiting_since_ns = now_ns();
  operation->unfinished_parts = operation->in_stream ? 0 : operation->parts.size();
  if (operation->only_read) linger(operation);
  // A synchronisation of a stream of another device's has no mark here: it is about the copies for that stream alone.
  const bool of_another_device = operation->synchronizes == Synchronizes::kStream && operation->marks.empty();
  if (fault_ != abi::kSuccess && !of_another_device && !revive()) {
    report(*operation, fault_);
    operation->leaked |= operation->in_stream;
    finish(operation);
    return;
  }
  if (operation->synchronizes != Synchronizes::kNothing) {
    for (Operation* other = operation->following; other != nullptr; other = other->following) {
      if (!waits_for(*operation, *other)) continue;
      other->dependents.push_back(operation);
      ++operation->dependencies;
    }
  }
  if (operation->marks.empty()) {
    admit(operation);
  } else if (operation->stream_marked) {
    // An operation may arrive after others that were marked later: planning a batch, or growing the pool, takes a while.
    Line& line = waiting_[operation->marks.back().stream_id];
    auto at = line.end();
    while (at != line.begin() && (*std::prev(at))->marks.back().sequence > operation->marks.back().sequence) --at;
    line.insert(at, operation);
  } else {
    stragglers_.push_back(operation);
  }
}

bool Engine::reached(Operation* operation) {
  while (!operation->marks.empty()) {
    const abi::Result result = abi::driver.event_query(operation->marks.back().event);
    if (result == abi::kErrorNotReady) return false;
    if (result == abi::kSuccess) {
      pop_mark(operation);
      continue;
    }
    // The stream's context has failed or is gone; its events are of no more use.
    report(*operation, result);
    suspect();
    operation->leaked |= operation->in_stream;
    operation->marks.clear();
  }
  return true;
}

void Engine::pop_mark(Operation* operation) {
  give_mark(operation->marks.back());
  operation->marks.pop_back();
}

size_t Engine::fired_marks(const Line& line) {
  const auto has_fired = [](const Operation* operation) {
    return abi::driver.event_query(operation->marks.back().event) == abi::kSuccess;
  };
  return static_cast<size_t>(std::partition_point(line.begin(), line.end(), has_fired) - line.begin());
}

// A mark may have failed because its stream is gone, or because the engine's own context is lost. Then nothing that is
// alive may end as a success, not even a synchronisation whose own marks have fired.
void Engine::suspect() {
  if (fault_ != abi::kSuccess || lost_ != abi::kSuccess) return;
  const abi::Result result = small_to_host_.query();
  if (result == abi::kSuccess || result == abi::kErrorNotReady) return;
  lost_ = result;
  for (Operation* operation = alive_; operation != nullptr; operation = operation->following) report(*operation, result);
}

bool Engine::admit_waiting() {
  bool progress = false;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Line& line = it->second;
    size_t fired = 0;
    while (!line.empty()) {
      Operation* operation = line.front();
      // The stream's own mark is the last; when it has fired, what is left are marks of other streams, which must not
      // hold up those behind.
      const size_t before = operation->marks.size();
      if (fired != 0) pop_mark(operation);
      const bool done = reached(operation);
      if (!done && operation->marks.size() == before) break;
      if (operation->droppable && line.size() == 1) {
        forecast_.learn(it->first, now_ns() - operation->waiting_since_ns);
      }
      line.pop_front();
      progress = true;
      if (done) {
        admit(operation);
      } else {
        stragglers_.push_back(operation);
      }
      fired = fired != 0 ? fired - 1 : fired_marks(line);
      if (fired == 0) break;
    }
    it = line.empty() ? waiting_.erase(it) : std::next(it);
  }
  for (size_t i = 0; i < stragglers_.size();) {
    if (!reached(stragglers_[i])) {
      ++i;
      continue;
    }
    Operation* operation = stragglers_[i];
    stragglers_.erase(stragglers_.begin() + static_cast<ptrdiff_t>(i));
    admit(operation);
    progress = true;
  }
  return progress;
}

void Engine::admit(Operation* operation) {
  // A synchronisation touches nobody's memory: its await may end at once, whatever it still depends on.
  if (operation->dependencies == 0) {
    Phase expected = Phase::kWaiting;
    operation->phase.compare_exchange_strong(expected, Phase::kAdmitted, std::memory_order_acq_rel);
  }
  if (operation->droppable && !operation->in_stream && operation->stream_marked) operation->queue->announce();
  operation->reached = true;
  if (stopped(*operation) || operation->unfinished_parts == 0) {
    if (operation->dependencies == 0) finish(operation);
    return;
  }
  if (is_small(*operation)) {
    Part* part = &operation->parts.front();
    // Small copies always take a slot, also to and from page-locked memory, so that cancelling is dropping.
    part->route = to_host(part->route) ? Route::kToHostStaged : Route::kToDeviceStaged;
    operation->quota->nbytes_small.fetch_add(part->nbytes(), std::memory_order_relaxed);
    (to_host(part->route) ? small_to_host_ : small_to_device_).add(part);
    return;
  }
  for (Part& part : operation->parts) {
    Channel& channel = part.route == Route::kDeviceToDevice ? between_devices_
                       : to_host(part.route)                ? to_host_
                                                            : to_device_;
    if (part.route == Route::kDeviceToDevice) meet_peer(part);
    part.left = part.nbytes();
    operation->quota->nbytes_by_route[static_cast<int>(part.route)].fetch_add(part.left, std::memory_order_relaxed);
    channel.add(&part);
  }
}

void Engine::meet_peer(const Part& part) {
  const Entry entry = part.entry(0);
  for (const uint64_t address : {entry.src, entry.dst}) {
    const MemoryInfo info = describe(address);
    if (info.result != abi::kSuccess || info.memory_type != abi::kMemoryDevice || info.ordinal == device_) continue;
    if (info.ordinal < 0 || info.ordinal >= kMostDevices || peers_[static_cast<size_t>(info.ordinal)]) continue;
    peers_[static_cast<size_t>(info.ordinal)] = true;
    enable_peer_access(device_, info.ordinal);
  }
}

bool Engine::sweep_cancelled() {
  if (!cancellations_.exchange(false, std::memory_order_acq_rel)) return false;
  std::vector<Operation*> dropped;
  const auto cancelled = [&](Operation* operation) {
    if (operation->phase.load(std::memory_order_acquire) != Phase::kCancelled) return false;
    dropped.push_back(operation);
    return true;
  };
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Line& line = it->second;
    line.erase(std::remove_if(line.begin(), line.end(), cancelled), line.end());
    it = line.empty() ? waiting_.erase(it) : std::next(it);
  }
  stragglers_.erase(std::remove_if(stragglers_.begin(), stragglers_.end(), cancelled), stragglers_.end());
  for (Operation* operation : dropped) admit(operation);
  dropped.clear();
  for (Operation* operation : lingering_) {
    if (operation->cancel.load(std::memory_order_acquire)) dropped.push_back(operation);
  }
  for (Operation* operation : dropped) finish(operation);
  each_channel([](Channel& c) { c.drop_stopped(); });
  return true;
}

bool Engine::feed_workers() {
  if (for_workers_.empty()) return false;
  workers_.submit(for_workers_);
  for_workers_.clear();
  return true;
}

bool Engine::take_done() {
  QueueNode* node = take_all(&done_);
  if (node == nullptr) return false;
  while (node != nullptr) {
    QueueNode* next = node->next;
    Piece* piece = reinterpret_cast<Piece*>(node);
    if (piece->part->route == Route::kToDeviceStaged && !stopped(*piece->part->operation)) {
      to_device_.ready(piece);
    } else {
      came_back(piece);
    }
    node = next;
  }
  return true;
}

void Engine::finish(Operation* operation) {
  if (operation->readers != 0 && operation->lingers_until_ns == 0) {
    linger(operation);
    return;
  }
  if (operation->lingers_until_ns != 0) {
    lingering_.erase(std::remove(lingering_.begin(), lingering_.end(), operation), lingering_.end());
  }
  if (operation->previous != nullptr) operation->previous->following = operation->following;
  if (operation->following != nullptr) operation->following->previous = operation->previous;
  if (alive_ == operation) alive_ = operation->following;
  --alive_count_;
  for (const Mark& mark : operation->marks) give_mark(mark);
  operation->marks.clear();

  Quota& quota = *operation->quota;
  if (operation->result == 0 && operation->cancel.load(std::memory_order_acquire)) operation->result = kResultCancelled;
  std::atomic<uint64_t>& outcome = operation->result == 0                  ? quota.completed
                                   : operation->result == kResultCancelled ? quota.cancelled
                                                                           : quota.failed;
  if (counts(*operation)) {
    outcome.fetch_add(1, std::memory_order_relaxed);
    quota.parked_completions.fetch_add(1, std::memory_order_relaxed);
  }
  std::vector<Operation*> dependents;
  dependents.swap(operation->dependents);
  operation->finished = true;
  // From here on the operation is the loop's, which may delete it at once unless the device still reads for it.
  operation->queue->push(operation->readers == 0 ? &operation->node : &operation->early);
  for (Operation* dependent : dependents) {
    if (--dependent->dependencies == 0 && dependent->reached) finish(dependent);
  }
}

}  // namespace aiocuda
