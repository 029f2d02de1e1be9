#include "plain_copy.h"

#include <algorithm>
#include <optional>
#include <vector>

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

}  // namespace

abi::Result route_by_address(Part* part) {
  const bool down = to_host(part->route);
  const Entry whole = part->entries.front();
  const uintptr_t host = down ? whole.dst : whole.src;
  std::vector<Entry> direct;
  for (size_t done = 0; done < whole.shape.width;) {
    const MemoryInfo info = describe(host + done);
    if (info.result != abi::kSuccess) return info.result;
    if (info.managed && !down) {
      part->route = Route::kDeviceToDevice;
      return abi::kSuccess;
    }
    if (info.memory_type != abi::kMemoryHost || info.managed) {
      return info.memory_type == abi::kMemoryDevice && !info.managed ? abi::kErrorInvalidValue : abi::kSuccess;
    }
    Entry entry = whole;
    entry.dst += done;
    entry.src += done;
    entry.shape.width = std::min<size_t>(whole.shape.width - done, info.range_start + info.range_nbytes - (host + done));
    direct.push_back(entry);
    done += entry.shape.width;
  }
  part->entries.swap(direct);
  part->route = down ? Route::kToHostDirect : Route::kToDeviceDirect;
  return abi::kSuccess;
}

int begin_plain(PlainCopy* copy, Operation* operation) {
  // Over all that follows, where the same is asked for again at no cost.
  std::optional<RelaxedCapture> relaxed;
  if (copy->inlined || !copy->marked) relaxed.emplace();
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
  part.by_address = copy->nbytes > kSmallBytes;
  int code = memory.context != nullptr ? 0 : primary_context(memory.ordinal, &memory.context);
  if (code == 0) code = mark_stream(copy->stream, memory.context, copy->marked && !copy->inlined, &operation->marks);
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
