#include "plain_copy.h"

#include <optional>

#include "admission.h"
#include "clock.h"
#include "engine.h"

namespace aiocuda {
namespace {

// A small copy takes 6 us; one that has not landed by then is behind something.
constexpr uint64_t kSpinNs = 12'000;

constexpr int kNotPlain = 1;

bool ends_within(const PlainCopy& copy, uint64_t address, const MemoryInfo& memory) {
  return copy.nbytes <= memory.range_start + memory.range_nbytes - address;
}

// Page-locked memory takes the copy as it is. The driver refuses copies over the end of a registration; the long way
// cuts them there.
int route_large(const PlainCopy& copy, Part* part) {
  const MemoryInfo host = describe(copy.on_host);
  if (host.result != abi::kSuccess || host.memory_type == 0) return host.result;
  if (host.memory_type != abi::kMemoryHost || host.managed || !ends_within(copy, copy.on_host, host)) return kNotPlain;
  part->route = copy.to_host ? Route::kToHostDirect : Route::kToDeviceDirect;
  return 0;
}

// Of a small copy only this is asked: managed memory may be another device's, for whose streams the long way waits, too.
int route_small(const PlainCopy& copy) {
  return !copy.to_host && several_devices() && describe(copy.on_host).managed ? kNotPlain : 0;
}

}  // namespace

int begin_plain(PlainCopy* copy, Operation* operation) {
  // Over all that follows, where the same is asked for again at no cost.
  const bool only_marked = copy->marked && !copy->inlined;
  std::optional<RelaxedCapture> relaxed;
  if (!only_marked) relaxed.emplace();
  copy->memory = describe(copy->on_device);
  MemoryInfo& memory = copy->memory;
  if (memory.result != abi::kSuccess) return memory.result;
  if (memory.memory_type != abi::kMemoryDevice || memory.managed || !ends_within(*copy, copy->on_device, memory) ||
      (copy->device >= 0 && memory.ordinal != copy->device)) {
    return kNotPlain;
  }
  Part& part = operation->only_part(copy->to_host ? Route::kToHostStaged : Route::kToDeviceStaged);
  Entry entry;
  entry.dst = copy->to_host ? copy->on_host : copy->on_device;
  entry.src = copy->to_host ? copy->on_device : copy->on_host;
  entry.shape.width = copy->nbytes;
  part.entries.push_back(entry);
  int code = copy->nbytes <= kSmallBytes ? route_small(*copy) : route_large(*copy, &part);
  if (code == 0 && memory.context == nullptr) code = primary_context(memory.ordinal, &memory.context);
  if (code == 0) code = mark_stream(copy->stream, memory.context, only_marked, &operation->marks);
  if (code != 0 || !copy->inlined || !operation->marks.empty()) return code;
  const uint64_t now = now_ns();
  if (now < copy->parks_until_ns) return 0;
  Engine* const engine = Engine::of_device(memory.ordinal);
  if (engine == nullptr) return kNotPlain;
  const Scatter& scatter = engine->scatter();
  const Scatter::State before = scatter.state();
  copy->beside_loading = scatter.loading();
  copy->begin_ns = now;
  copy->run = engine->run_inline(operation, kSpinNs);
  copy->end_ns = now_ns();
  copy->beside_loading |= scatter.loading() || scatter.state() != before;
  return 0;
}

}  // namespace aiocuda
