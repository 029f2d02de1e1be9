// What is asked of the engine: operations, their parts and the pieces that parts are cut into.
//
//   Operation   one await. Belongs to the engine from submit() until it is pushed to its completion queue, then to the loop.
//   Part        entries of an operation that travel one route.
//   Entry       one copy between two addresses, contiguous or strided in up to three dimensions.
//   Columns     many contiguous copies, in place of entries.
//   Piece       what is handed to the device, or to the workers, at a time.
//
// An operation waits until its marks have fired (kWaiting), and from then on (kAdmitted) the device and the workers may
// touch the caller's memory. Whoever cancels tries kWaiting -> kCancelled first: if that succeeds nothing of the
// caller's has been or will be touched. A small copy to the host lands in a slot, so the caller's memory is only read until
// somebody empties the slot: it can be dropped by kAdmitted -> kCancelled, unless a worker has it already (kDelivered).
// Otherwise the caller must wait for the completion.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "columns.h"
#include "completion_queue.h"
#include "driver_abi.h"

namespace aiocuda {

// What one worker copies at a time: small enough to share a piece among workers, large enough to amortise the hand-over.
constexpr size_t kJobBytes = size_t{1} << 20;
// Of the first and the last piece of a copy, during which the link stands still: as many workers as there are share them.
constexpr size_t kJobBytesAtEnds = size_t{256} << 10;

// Copies of at most this many bytes go through small slots, which the loop's thread empties itself.
constexpr size_t kSmallBytes = size_t{32} << 10;

enum class Route : uint8_t { kToHostDirect, kToHostStaged, kToDeviceDirect, kToDeviceStaged, kDeviceToDevice };
constexpr int kRoutes = 5;

inline bool staged(Route r) { return r == Route::kToHostStaged || r == Route::kToDeviceStaged; }
inline bool to_host(Route r) { return r == Route::kToHostDirect || r == Route::kToHostStaged; }
inline bool to_device(Route r) { return r == Route::kToDeviceDirect || r == Route::kToDeviceStaged; }

struct Shape {
  size_t width = 0;  // bytes of a contiguous row
  size_t height = 1;
  size_t depth = 1;
  size_t src_pitch = 0;  // bytes from row to row, and from slice to slice
  size_t src_slice = 0;
  size_t dst_pitch = 0;
  size_t dst_slice = 0;

  size_t nbytes() const { return width * height * depth; }
  bool contiguous() const { return height == 1 && depth == 1; }
  bool operator==(const Shape& other) const {
    return width == other.width && height == other.height && depth == other.depth && src_pitch == other.src_pitch &&
           src_slice == other.src_slice && dst_pitch == other.dst_pitch && dst_slice == other.dst_slice;
  }
};

struct Entry {
  uintptr_t dst = 0;
  uintptr_t src = 0;
  Shape shape;
  uint32_t attributes = 0;  // index into the operation's attributes
};

// What one copier may use at a time, and what it has done. Never freed while an operation refers to it.
struct Quota {
  size_t slots = 16;
  size_t slot_nbytes = size_t{4} << 20;
  size_t workers = 64;
  bool host_function_hints = true;
  unsigned kernel_blocks = 0;  // that the kernel takes over the link; 0: the fewest that fill it

  // What loops change mostly, apart from what the engine's thread and the workers do: a processor that changes a line takes it
  // from the others.
  alignas(64) std::atomic<uint64_t> references{1};
  std::atomic<uint64_t> submitted{0}, inline_completions{0};

  alignas(64) std::atomic<uint64_t> completed{0}, failed{0}, cancelled{0};
  std::atomic<uint64_t> parked_completions{0};
  std::atomic<uint64_t> nbytes_by_route[kRoutes] = {};
  std::atomic<uint64_t> nbytes_small{0};
  std::atomic<uint64_t> worker_busy_ns{0};
  std::atomic<size_t> slots_in_use{0};
  std::atomic<size_t> workers_in_use{0};
};

// A point in a stream that an operation waits for. An event of the library's own goes back to its pool; the caller's
// event is only looked at.
struct Mark {
  abi::Event event = nullptr;
  abi::Context context = nullptr;
  bool owned = true;
  uint64_t sequence = 0;  // marks of one stream fire in this order
  // What the driver never gives to another stream, as it does with handles; of the caller's streams only.
  unsigned long long stream_id = 0;
};

struct Operation;

struct Part {
  Operation* operation = nullptr;
  Route route = Route::kToHostDirect;
  std::vector<Entry> entries;
  Columns columns;  // where there are any, in place of the entries
  // Where the next piece begins: an entry, and within it a byte (contiguous) or a row (strided, counted over all slices).
  size_t next_entry = 0;
  size_t next_offset = 0;
  size_t outstanding = 0;  // pieces handed out and not yet back
  size_t left = 0;         // bytes that are in no piece yet, from its admission on

  bool listed = false;     // among a channel's active parts

  size_t count() const { return columns.count() != 0 ? columns.count() : entries.size(); }
  Entry entry(size_t i) const {
    if (columns.count() == 0) return entries[i];
    Entry made;
    made.dst = columns.dsts()[i];
    made.src = columns.srcs()[i];
    made.shape.width = columns.size(i);
    return made;
  }
  size_t nbytes() const {
    size_t sum = columns.nbytes();
    for (const Entry& one : entries) sum += one.shape.nbytes();
    return sum;
  }
  bool exhausted() const { return next_entry == count(); }
  // Whether its one piece that is not back yet is the last of the operation.
  bool ending() const;
};

// A copy between the caller's memory and a slot, by the processor.
struct HostCopy {
  uintptr_t dst;
  uintptr_t src;
  Shape shape;
};

// What the kernel is to move, in place of device copies: rows of a table, which has a slot of its own or lies in the
// columns of its part.
struct KernelTable {
  uintptr_t address = 0;
  uint32_t capacity = 0;  // of each of its columns
  uint32_t rows = 0;
  Slot* slot = nullptr;
};

struct Piece {
  QueueNode node;  // first: finished pieces travel from workers to the engine as nodes
  Part* part = nullptr;
  Slot* slot = nullptr;
  bool small = false;    // its slot is emptied by the loop's thread
  bool counted = false;  // among those that wait for their loops
  bool launched = false;
  bool fresh = false;  // goes to memory that had no pages when it was cut
  bool near_end = false;  // of a copy to the device behind which there is no other
  // The same copy on the other road. When one of the two has landed the other has no part any more, only its reading.
  Piece* twin = nullptr;
  Operation* reading = nullptr;
  size_t nbytes = 0;
  std::vector<Entry> device_copies;
  std::vector<HostCopy> host_copies;
  KernelTable table;
  uint64_t bundle = 0;  // device memory between which and the host one copy goes, in place of the table's rows
  Entry bundled;        // that copy
  Shape each{0};  // the shape of all that is in it; without a width it has their sizes
  size_t job_nbytes = kJobBytes;  // of the host copies that one worker does at a time
  std::atomic<size_t> jobs{0};
};

enum class Phase : uint8_t { kWaiting, kAdmitted, kDelivered, kCancelled };

// What cancelling came to: the completion must be awaited; nobody touches the caller's memory any more, save that the
// device may read it; or nobody has or will.
enum class Cancelled : int { kMustWait = 0, kDropped = 1, kUntouched = 2 };

// Which of the library's own operations a synchronisation waits for.
enum class Synchronizes : uint8_t { kNothing, kStream, kQuota };

// The result of an operation that was cancelled; no CUresult is negative.
constexpr int kResultCancelled = -1;

constexpr uint64_t kNoStreamKey = UINT64_MAX;

struct Operation {
  QueueNode node;   // first: operations travel as nodes
  QueueNode early;  // for the outcome of an operation that must be kept some time longer
  void* owner = nullptr;  // what the loop's side wants back with the completion
  CompletionQueue* queue = nullptr;
  Quota* quota = nullptr;

  std::atomic<Phase> phase{Phase::kWaiting};
  std::atomic<bool> cancel{false};
  std::atomic<uint64_t> nbytes_done{0};

  std::vector<Mark> marks;
  // The id of its stream, and of what the stream's handle means on another device, where that is meant as well.
  uint64_t stream_key = kNoStreamKey;
  uint64_t also_key = kNoStreamKey;
  bool stream_marked = false;  // the last mark is in the stream itself, the others in streams that are waited for as well
  Synchronizes synchronizes = Synchronizes::kNothing;
  bool in_stream = false;  // enqueued in the caller's stream already; the marks stand behind it
  std::vector<Part> parts;
  std::vector<abi::CopyAttributes> attributes;  // empty: the driver's defaults
  bool unowned = false;    // its source is a bare address: nobody could be kept from freeing it
  bool droppable = false;  // a small copy to the host, whose owners are kept while the device reads
  bool only_read = false;  // has its outcome, and waits for what is left on the device

  // The engine's own bookkeeping.
  size_t unfinished_parts = 0;
  size_t readers = 0;  // pieces that are still on the device although their twins have landed
  bool finished = false;
  std::vector<Operation*> dependents;  // synchronisations that wait for this one
  size_t dependencies = 0;
  uint64_t waiting_since_ns = 0;
  bool hinted = false;
  bool foreseen = false;  // the end of its wait was announced
  bool reached = false;  // all marks have fired
  uint64_t lingers_until_ns = 0;
  Operation* previous = nullptr;  // the list of all that is alive in the engine
  Operation* following = nullptr;

  // The part of an operation that has no other, and none of whose entries count any more.
  Part& only_part(Route route);
  // The part of entries, or the part of columns with room for so many in all, of a route; made where there is none.
  Part& part_of(Route route);
  Part& columns_of(Route route, size_t capacity, ColumnPool* pool);

  // The outcome, valid once the operation has been pushed.
  int result = 0;
  // The device may still write to, or read from, what the caller handed in: its owners must never be let go.
  bool leaked = false;
  // A small copy to the host has landed here; the loop's thread copies it out and hands the slot back.
  Piece* landed = nullptr;
};

inline bool Part::ending() const { return exhausted() && outstanding == 1 && operation->unfinished_parts == 1; }

inline Operation* operation_of(QueueNode* node) {
  if (node->early) node = reinterpret_cast<QueueNode*>(reinterpret_cast<char*>(node) - offsetof(Operation, early));
  return reinterpret_cast<Operation*>(node);
}

// Adds a copy to a piece, cut into what one worker does at a time: to fresh memory, the huge pages.
void append_host_copies(Piece* piece, const HostCopy& copy);

// Runs the processor's part of a piece, or some of its copies, on the calling thread.
void run_host_copies(const Piece& piece);
void run_host_copies(const Piece& piece, size_t begin, size_t end);

// What is left to do for a small operation that has landed: to the host, the copy out of its slot.
void copy_out(const Piece& landed);

// Where the worker's job that begins at a host copy of a piece ends: jobs are runs of about the same number of bytes.
size_t job_end(const Piece& piece, size_t begin);

// Cuts the next piece off a part: at most limit bytes, packed into a slot from its beginning when the route is staged.
// The piece's slot must be set before for those. Returns false when nothing is left.
bool cut_piece(Part& part, size_t limit, Piece* piece);

}  // namespace aiocuda
