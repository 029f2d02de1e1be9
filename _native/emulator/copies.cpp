#include "copies.h"

#include <cstring>

#include "bytes.h"
#include "capture.h"
#include "memory.h"
#include "scheduler.h"

namespace emu {

namespace {

// Rows of one operand; a plain copy is one row.
struct Layout {
  std::uintptr_t address;
  std::size_t pitch = 0, slice = 0;
};

struct Extent {
  std::size_t width, height = 1, depth = 1;
  bool empty() const { return width == 0 || height == 0 || depth == 0; }
  std::size_t nbytes() const { return width * height * depth; }
  std::size_t span(const Layout& layout) const {
    return (depth - 1) * layout.slice + (height - 1) * layout.pitch + width;
  }
};

struct Piece {
  Layout destination, source;
  Extent extent;
};

bool overlap(const Piece& piece) {
  const auto& [destination, source, extent] = piece;
  return destination.address < source.address + extent.span(source) &&
         source.address < destination.address + extent.span(destination);
}

template <class Row>
void for_each_row(const Piece& piece, Row&& row) {
  for (std::size_t z = 0; z < piece.extent.depth; ++z)
    for (std::size_t y = 0; y < piece.extent.height; ++y)
      row(touchable(piece.destination.address + z * piece.destination.slice + y * piece.destination.pitch),
          touchable(piece.source.address + z * piece.source.slice + y * piece.source.pitch));
}

struct Prepared {
  Work work{Kind::copy};
  std::vector<Piece> pieces;
  std::vector<std::shared_ptr<std::vector<std::byte>>> read_early;
  bool pageable = false;
  bool waits = false;  // what is pageable in it makes the caller wait, however small
};

CUresult add_piece(Prepared& prepared, const Piece& piece) {
  Range source, destination;
  if (const auto r = find_range(piece.source.address, piece.extent.span(piece.source), source); r != CUDA_SUCCESS)
    return r;
  const auto destination_span = piece.extent.span(piece.destination);
  if (const auto r = find_range(piece.destination.address, destination_span, destination); r != CUDA_SUCCESS) return r;
  Work& work = prepared.work;
  if (prepared.pieces.empty()) {
    if (source.on_device() && !destination.on_device()) {
      work.engine = Engine::device_to_host;
      work.device = source.allocation->device;
    } else if (destination.on_device() && !source.on_device()) {
      work.engine = Engine::host_to_device;
      work.device = destination.allocation->device;
    }
  }
  for (const auto& range : {source, destination}) {
    if (range.allocation) {
      work.touches.push_back(range.allocation);
    } else {
      prepared.pageable = true;
    }
  }
  work.nbytes += piece.extent.nbytes();
  prepared.pieces.push_back(piece);
  return CUDA_SUCCESS;
}

void finish_preparing(Prepared& prepared) {
  const auto pieces = std::make_shared<const std::vector<Piece>>(std::move(prepared.pieces));
  prepared.work.begin = [pieces] {
    for (const auto& piece : *pieces)
      if (!overlap(piece))
        for_each_row(piece, [&](std::byte* to, const std::byte*) { poison(to, piece.extent.width); });
  };
  prepared.work.move = [pieces, sources = std::move(prepared.read_early)] {
    for (const auto& piece : *pieces)
      for_each_row(piece, [&](std::byte* to, const std::byte* from) { move_bytes(to, from, piece.extent.width); });
  };
}

void read_early(Prepared& prepared, Piece& piece) {
  const auto* from = touchable(piece.source.address);
  auto& copies = prepared.read_early;
  copies.push_back(std::make_shared<std::vector<std::byte>>(from, from + piece.extent.width));
  piece.source.address = reinterpret_cast<std::uintptr_t>(copies.back()->data());
}

// Measured up to here: the call returns at once. 64 MiB in a batch waited; the border in between was not looked for.
bool is_staged(const Prepared& prepared) {
  constexpr std::size_t most = std::size_t{1} << 20;
  return prepared.pageable && prepared.work.nbytes <= most;
}

// Measured: the source of a larger entry of a batch to the device is read when the copy runs, whatever its order says.
constexpr std::size_t most_read_early = std::size_t{64} << 10;

bool must_wait(const Prepared& prepared) { return prepared.pageable && (prepared.waits || !is_staged(prepared)); }

// On record even where it was short: what matters is that the caller's time was the device's.
CUresult wait_until_done(Call& call, const StreamPtr& stream, const char* reason) {
  const auto target = stream->enqueued;
  const auto& context = *stream->context;
  call.wait(reason, [&] { return context.fault != CUDA_SUCCESS || stream->completed >= target; });
  return context.fault;
}

CUresult issue(Call& call, CUstream handle, const Piece& piece, bool synchronous) {
  StreamPtr stream;
  if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
  if (synchronous) {
    if (const auto result = refuse_captured(*stream); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_unsafe(); result != CUDA_SUCCESS) return result;
  }
  if (piece.extent.empty()) return CUDA_SUCCESS;
  Prepared prepared;
  if (const auto result = add_piece(prepared, piece); result != CUDA_SUCCESS) return result;
  const bool captured = stream->capture != nullptr;
  const bool rows = piece.extent.height * piece.extent.depth > 1;
  prepared.waits = captured || synchronous || rows || prepared.work.engine != Engine::host_to_device;
  if (!prepared.waits && is_staged(prepared)) read_early(prepared, prepared.pieces.front());
  const bool waits = must_wait(prepared);
  finish_preparing(prepared);
  if (const auto result = submit(call, stream, std::move(prepared.work), node_memcpy); result != CUDA_SUCCESS)
    return result;
  if (captured || (!synchronous && !waits)) return CUDA_SUCCESS;
  return wait_until_done(call, stream, synchronous ? "synchronous copy" : "pageable copy");
}

Piece plain(std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes) {
  return {{destination}, {source}, {nbytes}};
}

CUresult copy(const char* name, std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes) {
  return driver_call(name, Needs::context,
                     [&](Call& call) { return issue(call, nullptr, plain(destination, source, nbytes), true); });
}

CUresult copy_async(const char* name, std::uintptr_t destination, std::uintptr_t source, std::size_t nbytes,
                    CUstream stream) {
  return driver_call(name, Needs::healthy,
                     [&](Call& call) { return issue(call, stream, plain(destination, source, nbytes), false); });
}

std::uintptr_t address_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

template <class Operand>
std::uintptr_t base_of(const Operand& operand) {
  return operand.type == memory_host ? address_of(operand.host) : operand.device;
}

CUresult piece_of(const CUDA_MEMCPY2D& copy, Piece& piece) {
  for (const auto* operand : {&copy.source, &copy.destination}) {
    if (operand->type == memory_array) return CUDA_ERROR_NOT_SUPPORTED;
    if (operand->pitch != 0 && operand->pitch < operand->x + copy.width) return CUDA_ERROR_INVALID_VALUE;
  }
  const auto layout = [&](const CopyOperand2D& operand) {
    const std::size_t pitch = operand.pitch ? operand.pitch : copy.width;
    return Layout{base_of(operand) + operand.y * pitch + operand.x, pitch};
  };
  piece = {layout(copy.destination), layout(copy.source), {copy.width, copy.height}};
  return CUDA_SUCCESS;
}

CUresult piece_of(const CUDA_MEMCPY3D& copy, Piece& piece) {
  for (const auto* operand : {&copy.source, &copy.destination}) {
    if (operand->type == memory_array) return CUDA_ERROR_NOT_SUPPORTED;
    if (operand->pitch != 0 && operand->pitch < operand->x + copy.width) return CUDA_ERROR_INVALID_VALUE;
    if (operand->height != 0 && operand->height < operand->y + copy.height) return CUDA_ERROR_INVALID_VALUE;
  }
  const auto layout = [&](const CopyOperand3D& operand) {
    const std::size_t pitch = operand.pitch ? operand.pitch : copy.width;
    const std::size_t slice = pitch * (operand.height ? operand.height : copy.height);
    return Layout{base_of(operand) + operand.z * slice + operand.y * pitch + operand.x, pitch, slice};
  };
  piece = {layout(copy.destination), layout(copy.source), {copy.width, copy.height, copy.depth}};
  return CUDA_SUCCESS;
}

template <class Copy>
CUresult copy_rows(const char* name, const Copy* copy, CUstream stream, bool synchronous) {
  return driver_call(name, synchronous ? Needs::context : Needs::healthy, [&](Call& call) {
    if (!copy) return CUDA_ERROR_INVALID_VALUE;
    Piece piece{};
    if (const auto result = piece_of(*copy, piece); result != CUDA_SUCCESS) return result;
    return issue(call, stream, piece, synchronous);
  });
}

CUresult copy_batch(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes, std::size_t count,
                    CUmemcpyAttributes* attributes, std::size_t* first_entries, std::size_t attribute_count,
                    std::size_t* failed_index, CUstream handle) {
  return driver_call("cuMemcpyBatchAsync", Needs::healthy, [&](Call& call) {
    if (failed_index) *failed_index = SIZE_MAX;
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (!destinations || !sources || !sizes || count == 0 || stream->legacy) return CUDA_ERROR_INVALID_VALUE;
    if (!attributes || !first_entries || attribute_count == 0 || attribute_count > count || first_entries[0] != 0)
      return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t index = 0; index < attribute_count; ++index) {
      const auto order = attributes[index].source_access_order;
      if (order < 1 || order > 3) return CUDA_ERROR_INVALID_VALUE;
      if (index && (first_entries[index] <= first_entries[index - 1] || first_entries[index] >= count))
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (const auto result = refuse_captured(*stream); result != CUDA_SUCCESS) return result;

    Prepared prepared;
    std::size_t run = 0;
    for (std::size_t index = 0; index < count; ++index) {
      while (run + 1 < attribute_count && first_entries[run + 1] <= index) ++run;
      const auto result = sizes[index] == 0
                              ? CUDA_ERROR_INVALID_VALUE
                              : add_piece(prepared, plain(destinations[index], sources[index], sizes[index]));
      if (result != CUDA_SUCCESS) {
        if (failed_index) *failed_index = index;
        return result;
      }
      constexpr int in_stream_order = 1, during_call = 2;
      const int order = attributes[run].source_access_order;
      const bool down = prepared.work.engine == Engine::device_to_host;
      prepared.waits |= order == (down ? during_call : in_stream_order);
      // Whoever says that a source may be read out of order without meaning it gets what was there too early.
      const bool early = !prepared.pageable || down || sizes[index] <= most_read_early;
      if (order != in_stream_order && early) read_early(prepared, prepared.pieces.back());
    }
    const bool waits = must_wait(prepared);
    finish_preparing(prepared);
    if (const auto result = submit(call, stream, std::move(prepared.work), node_memcpy); result != CUDA_SUCCESS)
      return result;
    return waits ? wait_until_done(call, stream, "pageable copy") : CUDA_SUCCESS;
  });
}

template <class Value>
CUresult fill(const char* name, CUdeviceptr destination, Value value, std::size_t count, CUstream handle,
              bool synchronous) {
  return driver_call(name, synchronous ? Needs::context : Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (count == 0) return CUDA_SUCCESS;
    Work work{Kind::memset};
    const auto result = memset_work({destination, 0, value, sizeof(Value), count, 1}, work);
    if (result != CUDA_SUCCESS) return result;
    return submit(call, stream, std::move(work), node_memset);
  });
}

}  // namespace

CUresult copy_work(const CUDA_MEMCPY3D& copy, Work& work) {
  Piece piece{};
  if (const auto result = piece_of(copy, piece); result != CUDA_SUCCESS) return result;
  if (piece.extent.empty()) return CUDA_ERROR_INVALID_VALUE;
  Prepared prepared;
  if (const auto result = add_piece(prepared, piece); result != CUDA_SUCCESS) return result;
  finish_preparing(prepared);
  work = std::move(prepared.work);
  return CUDA_SUCCESS;
}

CUresult memset_work(const CUDA_MEMSET_NODE_PARAMS& fill, Work& work) {
  const std::size_t row = fill.width * fill.element_size;
  const std::size_t pitch = fill.height > 1 ? fill.pitch : row;
  if (row == 0 || fill.height == 0 || pitch < row || fill.destination % fill.element_size != 0)
    return CUDA_ERROR_INVALID_VALUE;
  Range range;
  if (const auto result = find_range(fill.destination, (fill.height - 1) * pitch + row, range); result != CUDA_SUCCESS)
    return result;
  if (!range.allocation) return CUDA_ERROR_INVALID_VALUE;
  work.touches = {range.allocation};
  work.move = [fill, pitch, row] {
    for (std::size_t y = 0; y < fill.height; ++y) {
      std::byte* start = touchable(fill.destination + y * pitch);
      if (fill.value == 0) {
        forget_bytes(start, in_device_window(fill.destination) ? row : 0);
        if (!in_device_window(fill.destination)) std::memset(start, 0, row);
        continue;
      }
      if (fill.element_size == 1) {
        std::memset(start, static_cast<int>(fill.value), row);
        continue;
      }
      for (std::size_t x = 0; x < row; x += fill.element_size) std::memcpy(start + x, &fill.value, fill.element_size);
    }
  };
  return CUDA_SUCCESS;
}

CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes) {
  return copy("cuMemcpy", destination, source, nbytes);
}
CUresult cuMemcpyHtoD(CUdeviceptr destination, const void* source, std::size_t nbytes) {
  return copy("cuMemcpyHtoD", destination, address_of(source), nbytes);
}
CUresult cuMemcpyDtoH(void* destination, CUdeviceptr source, std::size_t nbytes) {
  return copy("cuMemcpyDtoH", address_of(destination), source, nbytes);
}
CUresult cuMemcpyDtoD(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes) {
  return copy("cuMemcpyDtoD", destination, source, nbytes);
}
CUresult cuMemcpyPeer(CUdeviceptr destination, CUcontext, CUdeviceptr source, CUcontext, std::size_t nbytes) {
  return copy("cuMemcpyPeer", destination, source, nbytes);
}
CUresult cuMemcpy2D(const CUDA_MEMCPY2D* copy) { return copy_rows("cuMemcpy2D", copy, nullptr, true); }
CUresult cuMemcpy2DUnaligned(const CUDA_MEMCPY2D* copy) {
  return copy_rows("cuMemcpy2DUnaligned", copy, nullptr, true);
}
CUresult cuMemcpy3D(const CUDA_MEMCPY3D* copy) { return copy_rows("cuMemcpy3D", copy, nullptr, true); }

CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes, CUstream stream) {
  return copy_async("cuMemcpyAsync", destination, source, nbytes, stream);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr destination, const void* source, std::size_t nbytes, CUstream stream) {
  return copy_async("cuMemcpyHtoDAsync", destination, address_of(source), nbytes, stream);
}
CUresult cuMemcpyDtoHAsync(void* destination, CUdeviceptr source, std::size_t nbytes, CUstream stream) {
  return copy_async("cuMemcpyDtoHAsync", address_of(destination), source, nbytes, stream);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr destination, CUdeviceptr source, std::size_t nbytes, CUstream stream) {
  return copy_async("cuMemcpyDtoDAsync", destination, source, nbytes, stream);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr destination, CUcontext, CUdeviceptr source, CUcontext, std::size_t nbytes,
                           CUstream stream) {
  return copy_async("cuMemcpyPeerAsync", destination, source, nbytes, stream);
}
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* copy, CUstream stream) {
  return copy_rows("cuMemcpy2DAsync", copy, stream, false);
}
CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D* copy, CUstream stream) {
  return copy_rows("cuMemcpy3DAsync", copy, stream, false);
}

CUresult cuMemcpyBatchAsync_v1(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes, std::size_t count,
                               CUmemcpyAttributes* attributes, std::size_t* first_entries, std::size_t attribute_count,
                               std::size_t* failed_index, CUstream stream) {
  return copy_batch(destinations, sources, sizes, count, attributes, first_entries, attribute_count, failed_index,
                    stream);
}
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* destinations, CUdeviceptr* sources, std::size_t* sizes, std::size_t count,
                               CUmemcpyAttributes* attributes, std::size_t* first_entries, std::size_t attribute_count,
                               CUstream stream) {
  return copy_batch(destinations, sources, sizes, count, attributes, first_entries, attribute_count, nullptr, stream);
}

CUresult cuMemsetD8(CUdeviceptr destination, unsigned char value, std::size_t count) {
  return fill("cuMemsetD8", destination, value, count, nullptr, true);
}
CUresult cuMemsetD16(CUdeviceptr destination, unsigned short value, std::size_t count) {
  return fill("cuMemsetD16", destination, value, count, nullptr, true);
}
CUresult cuMemsetD32(CUdeviceptr destination, unsigned value, std::size_t count) {
  return fill("cuMemsetD32", destination, value, count, nullptr, true);
}
CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, std::size_t count, CUstream stream) {
  return fill("cuMemsetD8Async", destination, value, count, stream, false);
}
CUresult cuMemsetD16Async(CUdeviceptr destination, unsigned short value, std::size_t count, CUstream stream) {
  return fill("cuMemsetD16Async", destination, value, count, stream, false);
}
CUresult cuMemsetD32Async(CUdeviceptr destination, unsigned value, std::size_t count, CUstream stream) {
  return fill("cuMemsetD32Async", destination, value, count, stream, false);
}

}  // namespace emu
