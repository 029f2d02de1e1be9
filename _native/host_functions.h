// The two host functions that users give to the driver, or to any library that takes a CUhostFn: a copy and a signal.
// They run on the driver's one host-function thread of a context: no Python, no lock, no allocation, no exception, no
// wait. Their records are public; docs/reference/host_functions.md describes them.
#pragma once
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

namespace aiocuda {

struct CopyRecord {
  uintptr_t dst;
  uintptr_t src;
  size_t nbytes;
};
static_assert(sizeof(CopyRecord) == 3 * sizeof(void*), "the layout of struct.pack('@PPN', dst, src, nbytes)");

struct SignalRecord {
  int64_t fd;
  uint64_t value;
};
static_assert(sizeof(SignalRecord) == 16, "the layout of struct.pack('@qQ', fd, value)");

namespace detail {

inline bool writable(int fd) noexcept {
  pollfd entry{fd, POLLOUT, 0};
  int ready;
  do {
    ready = poll(&entry, 1, 0);
  } while (ready < 0 && errno == EINTR);
  return ready == 1 && (entry.revents & POLLOUT) && !(entry.revents & POLLNVAL);
}

// Whether an eventfd's counter takes the value now. poll() answers that for 1 only, and a write of more to a blocking
// eventfd waits for a reader. Anything that is no eventfd takes 8 bytes when poll() says that it is writable.
inline bool counter_takes(int fd, uint64_t value) noexcept {
  char path[40];
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
  const int info = open(path, O_RDONLY | O_CLOEXEC);
  if (info < 0) return true;
  char text[512];
  ssize_t size;
  do {
    size = read(info, text, sizeof text - 1);
  } while (size < 0 && errno == EINTR);
  close(info);
  if (size <= 0) return true;
  text[size] = '\0';
  const char* field = strstr(text, "eventfd-count:");
  unsigned long long count = 0;
  if (field == nullptr || sscanf(field, "eventfd-count: %llx", &count) != 1) return true;
  const uint64_t largest = UINT64_MAX - 1;
  return value <= largest - count;
}

// Sets *no_socket where the descriptor is none; otherwise the signal is delivered, or counts as delivered.
inline void send_signal(int fd, uint64_t value, bool* no_socket) noexcept {
  const char* bytes = reinterpret_cast<const char*>(&value);
  size_t sent = 0;
  while (sent < sizeof value) {
    const ssize_t n = send(fd, bytes + sent, sizeof value - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
    } else if (n == 0 || errno != EINTR) {
      *no_socket = n < 0 && errno == ENOTSOCK;
      return;
    }
  }
}

inline ssize_t write_once(int fd, const uint64_t& value) noexcept {
#ifdef RWF_NOWAIT
  // Between the question and the write another writer may fill a pipe; this flag makes the write itself refuse to wait.
  // eventfds and older kernels do not know it.
  iovec piece{const_cast<uint64_t*>(&value), sizeof value};
  const ssize_t n = pwritev2(fd, &piece, 1, -1, RWF_NOWAIT);
  if (n >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL && errno != ESPIPE)) return n;
#endif
  if (value > 1 && !counter_takes(fd, value)) {
    errno = EAGAIN;
    return -1;
  }
  return write(fd, &value, sizeof value);
}

// A write to a pipe without readers raises SIGPIPE in the writing thread, and there is no flag against that. The signal is
// blocked for the length of the write, and taken back unless it had been pending before.
inline void write_signal(int fd, uint64_t value) noexcept {
  sigset_t only_pipe, before, pending;
  sigemptyset(&only_pipe);
  sigaddset(&only_pipe, SIGPIPE);
  sigemptyset(&pending);
  sigpending(&pending);
  const bool was_pending = sigismember(&pending, SIGPIPE) == 1;
  if (pthread_sigmask(SIG_BLOCK, &only_pipe, &before) != 0) return;
  ssize_t n;
  do {
    n = write_once(fd, value);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EPIPE && !was_pending) {
    const timespec at_once{0, 0};
    while (sigtimedwait(&only_pipe, nullptr, &at_once) < 0 && errno == EINTR) {
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace detail

extern "C" {

inline void aiocuda_host_copy(void* data) noexcept {
  if (data == nullptr) return;
  CopyRecord record;
  memcpy(&record, data, sizeof record);  // the address of a caller's own record need not be aligned
  if (record.nbytes == 0) return;
  memcpy(reinterpret_cast<void*>(record.dst), reinterpret_cast<const void*>(record.src), record.nbytes);
}

inline void aiocuda_host_signal(void* data) noexcept {
  if (data == nullptr) return;
  SignalRecord record;
  memcpy(&record, data, sizeof record);
  if (record.fd < 0 || record.fd > INT32_MAX) return;
  const int fd = static_cast<int>(record.fd);
  const int saved_errno = errno;
  if (detail::writable(fd)) {
    bool no_socket = false;
    detail::send_signal(fd, record.value, &no_socket);
    if (no_socket) detail::write_signal(fd, record.value);
  }
  errno = saved_errno;
}

}  // extern "C"

}  // namespace aiocuda
