#include "slots.h"

#include <algorithm>

#include "memory.h"

namespace aiocuda {
namespace {

// So many slots lie idle before the first of them is used again.
constexpr size_t kRotation = 8;

}  // namespace

Slot* SlotPool::take(size_t capacity, size_t most, abi::Result* error) {
  *error = abi::kSuccess;
  std::unique_lock<std::mutex> lock(mutex_);
  Class& c = classes_[capacity];
  const bool may_grow = c.made < std::min(most, c.most);
  if (c.free.size() > (may_grow ? kRotation : 0)) {
    Slot* slot = c.free.front();
    c.free.pop_front();
    return slot;
  }
  if (!may_grow) return nullptr;
  lock.unlock();

  const size_t nbytes = std::max(capacity, slab_nbytes_);
  char* memory = static_cast<char*>(map_host(nbytes));
  abi::Result result = memory == nullptr ? abi::kErrorOutOfMemory
                                         : register_host(memory, nbytes, kRegisterPortable, device_);
  lock.lock();
  if (result != abi::kSuccess) {
    if (memory != nullptr) unmap_host(memory, nbytes);
    c.most = c.made;
    // With some slots pinned the copies go on through those.
    if (c.made == 0) {
      c.most = SIZE_MAX;
      *error = result;
    }
  } else {
    nbytes_held_.fetch_add(nbytes, std::memory_order_relaxed);
    for (size_t offset = 0; offset + capacity <= nbytes; offset += capacity) {
      Slot* slot = new Slot;
      slot->memory = memory + offset;
      slot->capacity = capacity;
      slot->generation = generation_;
      c.free.push_back(slot);
      ++c.made;
    }
  }
  if (c.free.empty()) return nullptr;
  Slot* slot = c.free.front();
  c.free.pop_front();
  return slot;
}

Slot* SlotPool::take_free(size_t capacity, bool last_used) {
  std::lock_guard<std::mutex> lock(mutex_);
  Class& c = classes_[capacity];
  if (c.free.empty()) return nullptr;
  Slot* slot = last_used ? c.free.back() : c.free.front();
  last_used ? c.free.pop_back() : c.free.pop_front();
  return slot;
}

void SlotPool::give(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slot->generation == generation_) classes_[slot->capacity].free.push_back(slot);
}

void SlotPool::lose(Slot* slot) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slot->generation != generation_) return;
  --classes_[slot->capacity].made;
  nbytes_held_.fetch_sub(slot->capacity, std::memory_order_relaxed);
}

void SlotPool::leak() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++generation_;
  classes_.clear();
  nbytes_held_.store(0, std::memory_order_relaxed);
}

void SlotPool::trim(size_t capacity) {
  std::deque<Slot*> free;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Class& c = classes_[capacity];
    free.swap(c.free);
    c.made -= free.size();
  }
  for (Slot* slot : free) {
    if (unregister_host(slot->memory, device_) == abi::kSuccess) unmap_host(slot->memory, slot->capacity);
    nbytes_held_.fetch_sub(slot->capacity, std::memory_order_relaxed);
    delete slot;
  }
}

}  // namespace aiocuda
