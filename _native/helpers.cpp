#include "helpers.h"

#include <algorithm>

#include "staging.h"
#include "threads.h"

namespace aiocuda {
namespace {

// With 200,000 numbers more gain little, since they take as long to wake up as the work does.
constexpr size_t kMost = 3;
// Others need them more where there are few, and who waits for a helper that has lost its processor waits long.
constexpr size_t kFewProcessors = 4;

}  // namespace

Helpers& Helpers::instance() {
  static Helpers* const instance = new Helpers(cpu_budget() <= kFewProcessors ? 0 : kMost);
  return *instance;
}

void Helpers::share(size_t n, const Function& function) {
  Work work{function, n};
  bool helped = false;
  if (most_ != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    helped = work_ == nullptr;
    if (helped) {
      work_ = &work;
      ++generation_;
      for (size_t i = started_ ? most_ : 0; i < most_; ++i) {
        started_ |= try_start_thread("aiocuda-helper", [this] { help(); });
      }
    }
  }
  if (helped) wanted_.notify_all();
  work.run();
  if (!helped) return;
  std::unique_lock<std::mutex> lock(mutex_);
  work_ = nullptr;
  left_.wait(lock, [&work] { return work.helpers == 0; });
}

void Helpers::help() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (size_t known = 0;;) {
    wanted_.wait(lock, [&] { return work_ != nullptr && generation_ != known; });
    known = generation_;
    Work& work = *work_;
    ++work.helpers;
    lock.unlock();
    work.run();
    lock.lock();
    // Whoever is helped meanwhile may wait there as well.
    if (--work.helpers == 0) left_.notify_all();
  }
}

}  // namespace aiocuda
