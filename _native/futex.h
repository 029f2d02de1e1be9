#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace aiocuda {

// Sleeps until the word is woken; at most so long, where there is a limit; and not at all unless it has that value.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t value, const timespec* limit = nullptr) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, limit, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>* word, int most = INT_MAX) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

}  // namespace aiocuda
