// Finished operations on their way from native threads to one event loop.
//
// An intrusive lock-free list: any thread pushes, the loop's thread takes everything. A push to an empty list writes the
// descriptor, which wakes the loop; a push to a non-empty one need not, because the loop has yet to take the list. The
// consumer must read the descriptor before it takes the list: the other way round a push between the two would have its
// wake eaten.
#pragma once
#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace aiocuda {

struct QueueNode {
  QueueNode* next = nullptr;
};

class CompletionQueue {
 public:
  enum class Form { kEventfd, kPipe };

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
    QueueNode* head = head_.load(std::memory_order_relaxed);
    do {
      node->next = head;
    } while (!head_.compare_exchange_weak(head, node, std::memory_order_release, std::memory_order_relaxed));
    if (head == nullptr) wake();
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
    QueueNode* node = head_.exchange(nullptr, std::memory_order_acquire);
    QueueNode* oldest = nullptr;
    while (node != nullptr) {
      QueueNode* next = node->next;
      node->next = oldest;
      oldest = node;
      node = next;
    }
    return oldest;
  }

 private:
  void wake() noexcept {
    const uint64_t one = 1;
    // A full pipe or a saturated eventfd is a wake already under way.
    while (write(write_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  std::atomic<QueueNode*> head_{nullptr};
  int read_fd_ = -1;
  int write_fd_ = -1;
};

}  // namespace aiocuda
