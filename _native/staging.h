// The worker threads that copy between slots and pageable memory.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "operation.h"

namespace aiocuda {

// Threads that run the host copies of pieces. Started when first needed, asleep when idle, never joined: at exit the
// process ends under them, which is safe because they touch neither Python nor the driver.
class Workers {
 public:
  // So many for memory without pages, most of whose cost is the kernel's zeroing (8 / 11 / 14 threads 26 / 33 / 36 GB/s).
  // To the device 14 are in each other's way on some hosts (41 to 51 GB/s), and 8 too few on
  // others (41, where 11 and 14 reach 50).
  static constexpr size_t kMost = 14;
  static constexpr size_t kMostToDevice = 11;

  // done(context, piece) is called after the last job of a piece, on a worker's thread, or in submit() where there is none.
  Workers(size_t most, void (*done)(void*, Piece*), void* context) : most_(most), done_(done), context_(context) {}
  // On one thread, always.
  void submit(const std::vector<Piece*>& pieces);

 private:
  struct Job {
    Piece* piece;
    size_t begin, end;
  };

  void run();
  // Does what there is to do on the calling thread, where the system has no thread to give.
  void work_off();
  // Sleeps until there is a job.
  Job wait();
  // Does a job, and takes the next one if there is one that may run.
  bool perform(Job* job);
  // The first job whose copier, and whose direction, may use another worker. Called with the mutex held.
  bool next(Job* job);
  // Tries for a while before it sleeps.
  std::unique_lock<std::mutex> lock();

  const size_t most_;
  void (*const done_)(void*, Piece*);
  void* const context_;
  std::mutex mutex_;
  std::atomic<uint32_t> signal_{0};
  std::deque<Job> jobs_;
  size_t started_ = 0;
  size_t asleep_ = 0;
  size_t to_device_ = 0;      // workers in use for that
};

// Processors this process may use: affinity and cgroup quota, not the machine's core count.
size_t cpu_budget();

}  // namespace aiocuda
