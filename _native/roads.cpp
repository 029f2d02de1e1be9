// Which road copies take, and the two of small copies to the host. A copy engine that somebody keeps full lets them wait for ever, a kernel
// waits for a free multiprocessor (hardware.md). What is late on one road is put on the other as well, into a slot of its
// own. The first to arrive wins and the other is let land. Until then the device may read what the caller handed in, so the
// await waits for that as well, unless it takes long.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "clock.h"
#include "engine.h"

namespace aiocuda {

bool Engine::avoids_copy_engine() const { return copy_engine_.avoided(now_ns()); }

bool Engine::choose_roads() {
  scatter_.load_if_wanted();
  const uint64_t now = now_ns();
  const bool engine_late = small_to_host_.overdue(now);
  const bool kernel_late = small_by_kernel_.overdue(now);
  const size_t waiting = small_to_host_.parts_waiting();
  if (engine_late) copy_engine_.late(now);
  const bool crowd = waiting >= Channel::kCrowd;
  const bool avoided = waiting != 0 && copy_engine_.avoided(now);
  if (!(engine_late || kernel_late || crowd || avoided) || !scatter_.ready()) return false;
  if (!kernel_late) {
    // Those that have one road stay on the copy engine, unless it is late now: the kernel may be late for longer.
    small_by_kernel_.take_over(small_to_host_, crowd || engine_late);
  } else if (!engine_late) {
    small_to_host_.take_over(small_by_kernel_, true);
  }
  bool progress = false;
  if (engine_late) progress |= take_other_road(small_to_host_, small_by_kernel_);
  if (kernel_late) progress |= take_other_road(small_by_kernel_, small_to_host_);
  return progress;
}

Engine::Planned Engine::plan(const Part& part) {
  const bool by_kernel = scatter_.state() != Scatter::State::kAbsent && Scatter::suits(part);
  if (staged(part.route)) return {by_kernel, false, part.operation->quota->slot_nbytes};
  if (by_kernel) return {true, Scatter::suits_bundle(part), Scatter::piece_nbytes(part)};
  const Channel& channel = to_host(part.route) ? to_host_ : to_device(part.route) ? to_device_ : between_devices_;
  return {false, false, channel.config().piece_nbytes};
}

bool Engine::take_other_road(Channel& late, Channel& other) {
  const std::vector<Piece*> pieces = late.without_twin();
  for (Piece* piece : pieces) {
    Slot* slot = take_slot(piece->part, true);
    if (slot == nullptr) break;
    Piece* twin = new Piece;
    twin->part = piece->part;
    twin->slot = slot;
    twin->small = true;
    twin->nbytes = piece->nbytes;
    twin->device_copies = piece->device_copies;
    twin->host_copies = piece->host_copies;
    const ptrdiff_t distance = slot->memory - piece->slot->memory;
    for (Entry& entry : twin->device_copies) entry.dst += distance;
    for (HostCopy& copy : twin->host_copies) copy.src += distance;
    twin->twin = piece;
    piece->twin = twin;
    other.ready(twin);
  }
  return !pieces.empty();
}

void Engine::disown(Piece* piece) {
  if (piece == nullptr) return;
  if (piece->launched) {
    piece->reading = piece->part->operation;
    ++piece->reading->readers;
  }
  piece->twin->twin = nullptr;
  piece->twin = nullptr;
  piece->part = nullptr;
}

void Engine::end_reading(Operation* operation) {
  if (--operation->readers != 0) return;
  if (operation->finished) {
    operation->queue->push(&operation->node);
  } else if (operation->lingers_until_ns != 0) {
    finish(operation);
  }
}

void Engine::linger(Operation* operation) {
  operation->lingers_until_ns = now_ns() + road_times.linger_ns.load(std::memory_order_relaxed);
  lingering_.push_back(operation);
}

bool Engine::end_lingering() {
  bool progress = false;
  for (const uint64_t now = lingering_.empty() ? 0 : now_ns();
       !lingering_.empty() && lingering_.front()->lingers_until_ns <= now; progress = true) {
    Operation* const operation = lingering_.front();
    if (operation->only_read) {
      lingering_.pop_front();
      operation->queue->push(&operation->early);
    } else {
      finish(operation);
    }
  }
  return progress;
}

void Engine::discard(Piece* piece) {
  if (piece->slot != nullptr) small_slots_.give(piece->slot);
  delete piece;
}

}  // namespace aiocuda
