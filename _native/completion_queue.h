// Finished operations on their way from native threads to one event loop.
//
// An intrusive lock-free list: any thread pushes, the loop's thread takes everything. A push to an empty list writes the
// descriptor, which wakes the loop; a push to a non-empty one need not, because the loop has yet to take the list. The
// consumer must read the descriptor before it takes the list: the other way round a push between the two would have its
// wake eaten.
//
// Waking a thread that has slept for milliseconds takes longer than a small copy (35 us against 9 on an H200's host; 90 us
// after 20 ms). So a push can be announced: the loop wakes up while the copy, or the end of a large one, runs, and waits the
// rest of it out without sleeping again.
#pragma once
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>

#include "clock.h"

namespace aiocuda {

struct QueueNode {
  QueueNode* next = nullptr;
  bool early = false;  // the outcome is there, but the device still reads what the caller handed in
};

// Returns what the list held before.
inline QueueNode* push_node(std::atomic<QueueNode*>* list, QueueNode* node) noexcept {
  QueueNode* head = list->load(std::memory_order_relaxed);
  do {
    node->next = head;
  } while (!list->compare_exchange_weak(head, node, std::memory_order_seq_cst, std::memory_order_relaxed));
  return head;
}

// Turns a list around that was pushed to.
inline QueueNode* oldest_first(QueueNode* newest) noexcept {
  QueueNode* oldest = nullptr;
  while (newest != nullptr) {
    QueueNode* const next = newest->next;
    newest->next = oldest;
    oldest = newest;
    newest = next;
  }
  return oldest;
}

class CompletionQueue {
 public:
  enum class Form { kEventfd, kPipe };
  static constexpr uint64_t kLongestWakeNs = 150'000;

  // A pipe serves where eventfd is missing or forbidden (some sandboxes filter it).
  explicit CompletionQueue(Form form) {
    if (form == Form::kEventfd) {
      read_fd_ = write_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    } else {
      int fds[2];
      if (pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0) {
        read_fd_ = fds[0];
        write_fd_ = fds[1];
      }
    }
  }

  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  bool ok() const { return read_fd_ >= 0; }
  int fd() const { return read_fd_; }

  void push(QueueNode* node) noexcept {
    const QueueNode* const before = push_node(&head_, node);
    if (before == nullptr && !awake_.load(std::memory_order_seq_cst)) wake();
  }

  bool empty() const noexcept { return head_.load(std::memory_order_acquire) == nullptr; }

  // Says that a push follows, best in as long as waking up takes.
  void announce() noexcept {
    if (awake_.load(std::memory_order_seq_cst)) return;  // it waits for the push already
    uint64_t none = 0;
    if (announced_ns_.compare_exchange_strong(none, now_ns(), std::memory_order_seq_cst)) wake();
  }

  // How long the consumer took lately to come after it was woken.
  uint64_t wake_takes_ns() const noexcept { return wake_takes_ns_.load(std::memory_order_relaxed); }

  // As take(), but waits so long for what has been announced.
  QueueNode* take_announced(uint64_t patience_ns) noexcept {
    QueueNode* found = take();
    if (announced_ns_.load(std::memory_order_relaxed) == 0) return found;
    const uint64_t now = now_ns(), took = now - announced_ns_.exchange(0, std::memory_order_seq_cst);
    // One that was busy says little, and must not spoil what is known for long.
    wake_takes_ns_.store((wake_takes_ns() + std::min(took, kLongestWakeNs)) / 2, std::memory_order_relaxed);
    if (found != nullptr) return found;
    awake_.store(true, std::memory_order_seq_cst);
    for (const uint64_t end = now + patience_ns; head_.load(std::memory_order_relaxed) == nullptr && now_ns() < end;) {
      pause();
    }
    // A push that saw this thread awake did not wake it, and is seen here.
    awake_.store(false, std::memory_order_seq_cst);
    return head_.load(std::memory_order_seq_cst) == nullptr ? nullptr : take();
  }

  // Clears the wake, takes everything and returns it oldest first.
  QueueNode* take() noexcept {
    uint64_t sink[8];
    while (true) {
      const ssize_t n = read(read_fd_, sink, sizeof sink);
      if (n == static_cast<ssize_t>(sizeof sink)) continue;
      if (n < 0 && errno == EINTR) continue;
      break;
    }
    return oldest_first(head_.exchange(nullptr, std::memory_order_acquire));
  }

 private:
  void wake() noexcept {
    const uint64_t one = 1;
    // A full pipe or a saturated eventfd is a wake already under way.
    while (write(write_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  std::atomic<QueueNode*> head_{nullptr};
  std::atomic<uint64_t> announced_ns_{0};  // since when a push is; 0 when none is
  std::atomic<uint64_t> wake_takes_ns_{50'000};
  std::atomic<bool> awake_{false};
  int read_fd_ = -1;
  int write_fd_ = -1;
};

}  // namespace aiocuda
