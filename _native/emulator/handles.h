// Handles are numbers, not pointers, so that a stale one is an error and not a crash. The value freed last is given out
// first: whoever keeps a handle too long meets a stranger's object, as with the real driver.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace emu {

template <class Handle, class Object>
class HandleTable {
 public:
  explicit HandleTable(std::uintptr_t base) : base_(base) {}

  void add(const std::shared_ptr<Object>& object) {
    std::size_t index;
    if (free_.empty()) {
      index = slots_.size();
      slots_.push_back(object);
    } else {
      index = free_.back();
      free_.pop_back();
      slots_[index] = object;
    }
    object->handle = reinterpret_cast<Handle>(base_ + index * stride);
  }

  std::shared_ptr<Object> find(Handle handle) const {
    const auto offset = reinterpret_cast<std::uintptr_t>(handle) - base_;
    if (offset % stride != 0 || offset / stride >= slots_.size()) return nullptr;
    return slots_[offset / stride];
  }

  void remove(Handle handle) {
    const auto index = (reinterpret_cast<std::uintptr_t>(handle) - base_) / stride;
    slots_[index] = nullptr;
    free_.push_back(index);
  }

  std::size_t size() const { return slots_.size() - free_.size(); }

  std::vector<std::shared_ptr<Object>> all() const {
    std::vector<std::shared_ptr<Object>> objects;
    for (const auto& slot : slots_)
      if (slot) objects.push_back(slot);
    return objects;
  }

 private:
  static constexpr std::size_t stride = 64;
  std::uintptr_t base_;
  std::vector<std::shared_ptr<Object>> slots_;
  std::vector<std::size_t> free_;
};

}  // namespace emu
