#include "staging.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "clock.h"
#include "threads.h"

namespace aiocuda {
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
