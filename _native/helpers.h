// Threads that share work which somebody waits for: the numbers of a large batch.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>

namespace aiocuda {

class Helpers {
 public:
  using Function = std::function<void(size_t)>;

  // So many threads at most, which are started when they are first needed.
  explicit Helpers(size_t most) : most_(most) {}
  // For everybody. Never destroyed: its threads sleep while the process exits.
  static Helpers& instance();

  // Calls the function with every number below n, in this thread and in those that wake up in time, and returns when all
  // calls have. Any thread; only one at a time is helped.
  void share(size_t n, const Function& function);

 private:
  struct Work {
    const Function& function;
    const size_t n;
    std::atomic<size_t> next{0};
    size_t helpers = 0;  // guarded by the mutex

    void run() {
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) function(i);
    }
  };

  void help();

  const size_t most_;
  std::mutex mutex_;
  std::condition_variable wanted_, left_;
  bool started_ = false;
  Work* work_ = nullptr;
  size_t generation_ = 0;  // of the work
};

}  // namespace aiocuda
