#include "staging.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "clock.h"
#include "memory.h"
#include "threads.h"

namespace aiocuda {
namespace {

// So many slots lie idle before the first of them is used again.
constexpr size_t kRotation = 8;

}  // namespace

Slot* SlotPool::take(size_t capacity, size_t most, abi::Result* error) {
  *error = abi::kSuccess;
  std::unique_lock<std::mutex> lock(mutex_);
  Class& c = classes_[capacity];
  const bool may_grow = c.made < std::min(most, c.most);
  if (c.free.size() > (may_grow ? kRotation : 0)) {
    Slot* slot = c.free.front();
    c.free.pop_front();
    return slot;
  }
  if (!may_grow) return nullptr;
  lock.unlock();

  const size_t nbytes = std::max(capacity, slab_nbytes_);
  char* memory = static_cast<char*>(map_host(nbytes));
  abi::Result result = memory == nullptr ? abi::kErrorOutOfMemory
                                         : register_host(memory, nbytes, kRegisterPortable, device_);
  lock.lock();
  if (result != abi::kSuccess) {
    if (memory != nullptr) unmap_host(memory, nbytes);
    c.most = c.made;
    // With some slots pinned the copies go on through those.
    if (c.made == 0) {
      c.most = SIZE_MAX;
      *error = result;
    }
  } else {
    nbytes_held_.fetch_add(nbytes, std::memory_order_relaxed);
    for (size_t offset = 0; offset + capacity <= nbytes; offset += capacity) {
      Slot* slot = new Slot;
      slot->memory = memory + offset;
      slot->capacity = capacity;
      slot->generation = generation_;
      c.free.push_back(slot);
      ++c.made;
    }
  }
  if (c.free.empty()) return nullptr;
  Slot* slot = c.free.front();
  c.free.pop_front();
  return slot;
}

Slot* SlotPool::take_free(size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  Class& c = classes_[capacity];
  if (c.free.empty()) return nullptr;
  Slot* slot = c.free.front();
  c.free.pop_front();
  return slot;
}

void SlotPool::give(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slot->generation == generation_) classes_[slot->capacity].free.push_back(slot);
}

void SlotPool::lose(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slot->generation != generation_) return;
  --classes_[slot->capacity].made;
  nbytes_held_.fetch_sub(slot->capacity, std::memory_order_relaxed);
}

void SlotPool::leak() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++generation_;
  classes_.clear();
  nbytes_held_.store(0, std::memory_order_relaxed);
}

void SlotPool::trim(size_t capacity) {
  std::deque<Slot*> free;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Class& c = classes_[capacity];
    free.swap(c.free);
    c.made -= free.size();
  }
  for (Slot* slot : free) {
    if (unregister_host(slot->memory, device_) == abi::kSuccess) unmap_host(slot->memory, slot->capacity);
    nbytes_held_.fetch_sub(slot->capacity, std::memory_order_relaxed);
    delete slot;
  }
}

void Workers::submit(const std::vector<Piece*>& pieces) {
  bool wake;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Piece* piece : pieces) {
      size_t count = 0;
      for (size_t i = 0; i < piece->host_copies.size(); ++count) {
        const size_t end = job_end(*piece, i);
        jobs_.push_back({piece, i, end});
        i = end;
      }
      piece->jobs.store(count, std::memory_order_relaxed);
    }
    for (size_t lacking = jobs_.size() - std::min(asleep_, jobs_.size()); lacking != 0 && started_ < most_; --lacking) {
      start_thread("aiocuda-worker", [this] { run(); });
      ++started_;
    }
    wake = asleep_ != 0;
  }
  if (wake) wake_.notify_all();
}

bool Workers::next(Job* job) {
  for (auto it = jobs_.begin(); it != jobs_.end(); ++it) {
    Quota* quota = it->piece->part->operation->quota;
    const bool to_device = aiocuda::to_device(it->piece->part->route);
    if (quota->workers_in_use.load(std::memory_order_relaxed) >= quota->workers ||
        (to_device && to_device_ >= kMostToDevice)) {
      passed_over_ = true;
      continue;
    }
    if (to_device) ++to_device_;
    quota->workers_in_use.fetch_add(1, std::memory_order_relaxed);
    *job = *it;
    jobs_.erase(it);
    return true;
  }
  return false;
}

void Workers::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Job job;
    while (!next(&job)) {
      ++asleep_;
      wake_.wait(lock);
      --asleep_;
    }
    lock.unlock();
    Operation* operation = job.piece->part->operation;
    Quota* quota = operation->quota;
    const uint64_t begin = now_ns();
    if (!operation->cancel.load(std::memory_order_acquire)) run_host_copies(*job.piece, job.begin, job.end);
    quota->worker_busy_ns.fetch_add(now_ns() - begin, std::memory_order_relaxed);
    lock.lock();
    quota->workers_in_use.fetch_sub(1, std::memory_order_relaxed);
    if (to_device(job.piece->part->route)) --to_device_;
    const bool others = passed_over_ && asleep_ != 0;
    passed_over_ = false;
    lock.unlock();
    // What had been passed over may run now.
    if (others) wake_.notify_one();
    if (job.piece->jobs.fetch_sub(1, std::memory_order_acq_rel) == 1) done_(context_, job.piece);
    lock.lock();
  }
}

size_t cpu_budget() {
  cpu_set_t set;
  CPU_ZERO(&set);
  size_t cpus = 1;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = static_cast<size_t>(std::max(1, CPU_COUNT(&set)));
  if (FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
    long long quota = 0;
    long long period = 0;
    if (std::fscanf(file, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0) {
      const double share = std::ceil(static_cast<double>(quota) / static_cast<double>(period));
      cpus = std::min(cpus, static_cast<size_t>(std::max(1.0, share)));
    }
    std::fclose(file);
  }
  return cpus;
}

}  // namespace aiocuda
