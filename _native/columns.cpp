#include "columns.h"

namespace aiocuda {
namespace {

constexpr size_t kLeast = size_t{64} << 10;
// The numbers of 262,144 copies. Larger batches come from a thread, and take long enough to be copied meanwhile.
constexpr size_t kMost = size_t{4} << 20;
constexpr size_t kMostOfASize = size_t{8} << 20;

}  // namespace

Slot* ColumnPool::take(size_t nbytes) {
  if (nbytes > kMost) return nullptr;
  size_t size = kLeast;
  while (size < nbytes) size *= 2;
  Slot* const slot = slots_.take_free(size);
  if (slot == nullptr) wanted_.fetch_or(size, std::memory_order_relaxed);
  return slot;
}

bool ColumnPool::make_wanted() {
  if (wanted_.load(std::memory_order_relaxed) == 0) return false;
  const size_t wanted = wanted_.exchange(0, std::memory_order_relaxed);
  for (size_t size = kLeast; size <= kMost; size *= 2) {
    abi::Result error = abi::kSuccess;
    if ((wanted & size) == 0) continue;
    if (Slot* slot = slots_.take(size, std::min<size_t>(kMostOfASize / size, 16), &error)) slots_.give(slot);
  }
  return true;
}

}  // namespace aiocuda
