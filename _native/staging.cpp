#include "staging.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "clock.h"
#include "futex.h"
#include "threads.h"

namespace aiocuda {
namespace {

// Some tens of microseconds: longer than whoever has the lock needs it.
constexpr int kTries = 1000;

}  // namespace

void Workers::submit(const std::vector<Piece*>& pieces) {
  bool wake;
  size_t lacking;
  {
    const auto held = lock();
    for (Piece* piece : pieces) {
      size_t count = 0;
      for (size_t i = 0; i < piece->host_copies.size(); ++count) {
        const size_t end = job_end(*piece, i);
        jobs_.push_back({piece, i, end});
        i = end;
      }
      piece->jobs.store(count, std::memory_order_relaxed);
    }
    lacking = jobs_.size() - std::min(asleep_, jobs_.size());
    wake = asleep_ != 0;
    if (wake) signal_.fetch_add(1, std::memory_order_relaxed);
  }
  if (wake) futex_wake(&signal_);
  for (; lacking != 0 && started_ < most_; --lacking) {
    if (!try_start_thread("aiocuda-worker", [this] { run(); })) break;
    ++started_;
  }
  if (started_ == 0) work_off();
}

// A thread that slept for it would take fifty times as long to come back as the lock is held.
std::unique_lock<std::mutex> Workers::lock() {
  std::unique_lock<std::mutex> held(mutex_, std::defer_lock);
  for (int i = 0; i < kTries; ++i) {
    if (held.try_lock()) return held;
    pause();
  }
  held.lock();
  return held;
}

bool Workers::next(Job* job) {
  for (auto it = jobs_.begin(); it != jobs_.end(); ++it) {
    Quota* quota = it->piece->part->operation->quota;
    const bool up = to_device(it->piece->part->route);
    if (quota->workers_in_use.load(std::memory_order_relaxed) >= quota->workers ||
        (up && to_device_ >= kMostToDevice)) {
      continue;
    }
    if (up) ++to_device_;
    quota->workers_in_use.fetch_add(1, std::memory_order_relaxed);
    *job = *it;
    jobs_.erase(it);
    return true;
  }
  return false;
}

Workers::Job Workers::wait() {
  Job job;
  auto held = lock();
  while (!next(&job)) {
    ++asleep_;
    const uint32_t seen = signal_.load(std::memory_order_relaxed);
    held.unlock();
    futex_wait(&signal_, seen);
    held = lock();
    --asleep_;
  }
  return job;
}

void Workers::run() {
  Job job = wait();
  while (true) {
    if (!perform(&job)) job = wait();
  }
}

void Workers::work_off() {
  Job job;
  bool found;
  {
    const auto held = lock();
    found = next(&job);
  }
  while (found) found = perform(&job);
}

bool Workers::perform(Job* job) {
  Piece* const piece = job->piece;
  const Operation* operation = piece->part->operation;
  Quota* const quota = operation->quota;
  const bool up = to_device(piece->part->route);
  const uint64_t begin = now_ns();
  if (!operation->cancel.load(std::memory_order_acquire)) run_host_copies(*piece, job->begin, job->end);
  quota->worker_busy_ns.fetch_add(now_ns() - begin, std::memory_order_relaxed);
  bool found, others;
  {
    const auto held = lock();
    quota->workers_in_use.fetch_sub(1, std::memory_order_relaxed);
    if (up) --to_device_;
    found = next(job);
    // A job that was passed over may run now, unless the next one takes the place of the last.
    others = found && !jobs_.empty() && asleep_ != 0 &&
             (job->piece->part->operation->quota != quota || to_device(job->piece->part->route) != up);
    if (others) signal_.fetch_add(1, std::memory_order_relaxed);
  }
  if (others) futex_wake(&signal_, 1);
  if (piece->jobs.fetch_sub(1, std::memory_order_acq_rel) == 1) done_(context_, piece);
  return found;
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
