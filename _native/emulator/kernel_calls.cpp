// The one kernel that the emulated device can run: the library's own, known by its name, as a host function.
#include "kernel_calls.h"

#include <cstring>

#include "bytes.h"
#include "call.h"
#include "memory.h"
#include "memory_calls.h"
#include "scheduler.h"

namespace emu {

namespace {

constexpr const char* kernel_name = "aiocuda_copy_scatter";

// The parameters of scatter.cu's kernel. How many rows a warp takes, how it aligns its accesses, and how it cuts entries
// of one size changes no byte.
struct Table {
  std::uintptr_t address;
  std::uint32_t capacity, rows, each, parts;
  std::uint64_t destination_pitch, source_pitch;

  struct Row {
    std::uintptr_t destination, source;
    std::size_t nbytes;
  };
  bool rectangles() const { return source_pitch != 0; }
  // Rows of rectangles; entries of one size are moved whole.
  std::uint32_t count() const { return rectangles() ? rows : rows / parts; }
  Row row(std::uint32_t index) const {
    const auto* destinations = reinterpret_cast<const std::uint64_t*>(touchable(address));
    const auto* sources = destinations + capacity;
    const auto* sizes = reinterpret_cast<const std::uint32_t*>(sources + capacity);
    if (rectangles()) {
      const std::uint32_t entry = index / parts, part = index % parts;
      return {destinations[entry] + part * destination_pitch, sources[entry] + part * source_pitch, each};
    }
    return {destinations[index], sources[index], each != 0 ? each : sizes[index]};
  }
  // What is read of the last column ends with its last entry; the table may lie anywhere in columns of other ones.
  std::size_t nbytes() const {
    return each != 0 ? (std::size_t{capacity} + rows / parts) * 8 : std::size_t{capacity} * 16 + rows * std::size_t{4};
  }
};

bool is_text(const char* image) { return *image != '\0' && static_cast<unsigned char>(*image) < 0x7f; }

// What a kernel of this context may touch; anything else is a fault when it runs, not an error of the launch.
bool reachable(const Context& context, std::uintptr_t address, std::size_t nbytes, std::set<AllocationPtr>& touches) {
  Range range;
  if (find_range(address, nbytes, range) != CUDA_SUCCESS || !range.allocation) return false;
  const Allocation& allocation = *range.allocation;
  if (allocation.type == Allocation::Type::device && !allocation.pool && allocation.context.get() != &context)
    return false;
  if (range.on_device() && allocation.device != context.device) return false;
  touches.insert(range.allocation);
  return true;
}

Work kernel_work(const ContextPtr& context, const Table& table) {
  Work work{Kind::kernel};
  std::set<AllocationPtr> touches;
  bool faults = !reachable(*context, table.address, table.nbytes(), touches);
  for (std::uint32_t index = 0; !faults && index < table.count(); ++index) {
    const auto row = table.row(index);
    faults = !reachable(*context, row.destination, row.nbytes, touches) ||
             !reachable(*context, row.source, row.nbytes, touches);
    work.nbytes += row.nbytes;
  }
  work.touches.assign(touches.begin(), touches.end());
  if (faults) {
    work.finish = [context] { fault_context(*context, CUDA_ERROR_ILLEGAL_ADDRESS); };
    return work;
  }
  // The table is read again: a device reads it when the kernel runs, and whoever changes it before that gets what is
  // there then.
  work.move = [table] {
    for (std::uint32_t index = 0; index < table.count(); ++index) {
      const auto row = table.row(index);
      move_bytes(touchable(row.destination), touchable(row.source), row.nbytes);
    }
  };
  return work;
}

}  // namespace

CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  return driver_call("cuModuleLoadData", Needs::context, [&](Call& call) {
    if (!handle || !image) return CUDA_ERROR_INVALID_VALUE;
    const auto* text = static_cast<const char*>(image);
    if (!is_text(text)) return CUDA_ERROR_INVALID_IMAGE;
    if (!std::strstr(text, kernel_name)) return CUDA_ERROR_INVALID_PTX;
    // Measured: loading waits for running kernels, and makes nobody else wait.
    call.wait_unless("running kernel", [&] { return !kernel_is_running(call.context->device); });
    const auto module = std::make_shared<Module>();
    module->context = call.context;
    driver().modules.add(module);
    *handle = module->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  return driver_call("cuModuleGetFunction", Needs::context, [&](Call&) {
    if (!function || !name) return CUDA_ERROR_INVALID_VALUE;
    if (!driver().modules.find(handle)) return CUDA_ERROR_INVALID_HANDLE;
    if (std::strcmp(name, kernel_name) != 0) return CUDA_ERROR_NOT_FOUND;
    // A module has one function, so the module's handle says which.
    *function = reinterpret_cast<CUfunction>(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuModuleUnload(CUmodule handle) {
  return driver_call("cuModuleUnload", Needs::context, [&](Call&) {
    if (!driver().modules.find(handle)) return CUDA_ERROR_INVALID_HANDLE;
    driver().modules.remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned, CUstream handle, void** parameters, void**) {
  return driver_call("cuLaunchKernel", Needs::context, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    const auto module = driver().modules.find(reinterpret_cast<CUmodule>(function));
    if (!module || module->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
    const auto threads = std::size_t{block_x} * block_y * block_z;
    if (std::size_t{grid_x} * grid_y * grid_z == 0 || threads == 0 || threads > 256 || !parameters)
      return CUDA_ERROR_INVALID_VALUE;
    Table table{};
    std::memcpy(&table.address, parameters[0], sizeof table.address);
    std::memcpy(&table.capacity, parameters[1], sizeof table.capacity);
    std::memcpy(&table.rows, parameters[2], sizeof table.rows);
    std::memcpy(&table.each, parameters[5], sizeof table.each);
    std::memcpy(&table.parts, parameters[6], sizeof table.parts);
    std::memcpy(&table.destination_pitch, parameters[8], sizeof table.destination_pitch);
    std::memcpy(&table.source_pitch, parameters[9], sizeof table.source_pitch);
    if (table.parts == 0) return CUDA_ERROR_INVALID_VALUE;
    return submit(call, stream, kernel_work(stream->context, table), node_kernel);
  });
}

}  // namespace emu
