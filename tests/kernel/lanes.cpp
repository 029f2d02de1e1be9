// Runs scatter.cu on the processor, the 32 lanes of a warp as fibers that meet at every shuffle, and checks each access:
// that it is aligned and lies within the row, and that every byte is written once.
//
// Prints how many rows it ran; exits with 1 and says why where something is wrong.

// Distributions turn it on, and its longjmp() takes a jump to another stack for an error.
#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = (uint64_t{high} << 32) | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

[[noreturn]] static void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}

// ---- memory

struct Piece {
  uintptr_t begin, end;
};
static std::vector<Piece> readable, writable;
static std::vector<uint8_t> written;
static uintptr_t written_base;

static bool inside(const std::vector<Piece>& pieces, uintptr_t address, size_t nbytes) {
  for (const Piece& piece : pieces) {
    if (address >= piece.begin && address + nbytes <= piece.end) return true;
  }
  return false;
}

template <class T>
T __ldcs(const T* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (address % sizeof(T) != 0) fail("a load is not aligned");
  if (!inside(readable, address, sizeof(T))) fail("a load is outside of its row");
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
void __stcs(T* p, T value) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (address % sizeof(T) != 0) fail("a store is not aligned");
  if (!inside(writable, address, sizeof(T))) fail("a store is outside of its row");
  for (size_t i = 0; i < sizeof(T); ++i) {
    if (written[address - written_base + i]++) fail("a byte is written twice");
  }
  std::memcpy(p, &value, sizeof(T));
}

// ---- lanes

// A lane begins in a context of its own. From then on it is jumped to: swapcontext asks the kernel for the signals'
// mask each time, which takes more than half of the whole.
static ucontext_t beginnings[32];
static jmp_buf scheduler, lanes[32];
static bool begun[32];
static int running;
static bool finished[32];
static uint64_t exchanged[2][32];
static int phase[32];

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  static_assert(sizeof(T) <= 8);
  const int me = running;
  const int slot = phase[me] ^= 1;
  std::memcpy(&exchanged[slot][me], &value, sizeof(T));
  if (_setjmp(lanes[me]) == 0) _longjmp(scheduler, 1);
  T out;
  std::memcpy(&out, &exchanged[slot][lane & 31], sizeof(T));
  return out;
}

#include "../../_native/scatter.cu"

static struct {
  const unsigned char* table;
  unsigned capacity, rows, group, align_source, nbytes, parts, row_nbytes;
  unsigned long long dst_pitch, src_pitch;
} arguments;

static void lane_main() {
  aiocuda_copy_scatter(arguments.table, arguments.capacity, arguments.rows, arguments.group, arguments.align_source,
                       arguments.nbytes, arguments.parts, arguments.row_nbytes, arguments.dst_pitch,
                       arguments.src_pitch);
  finished[running] = true;
  _longjmp(scheduler, 1);
}

static void resume() {
  if (_setjmp(scheduler) != 0) return;
  if (begun[running]) _longjmp(lanes[running], 1);
  begun[running] = true;
  setcontext(&beginnings[running]);
}

static void run_warp(unsigned block, unsigned warp) {
  static std::vector<char> stacks(32 * 65536);
  for (int lane = 0; lane < 32; ++lane) {
    finished[lane] = begun[lane] = false;
    getcontext(&beginnings[lane]);
    beginnings[lane].uc_stack.ss_sp = &stacks[static_cast<size_t>(lane) * 65536];
    beginnings[lane].uc_stack.ss_size = 65536;
    makecontext(&beginnings[lane], lane_main, 0);
  }
  while (true) {
    int left = 0;
    for (running = 0; running < 32; ++running) {
      if (finished[running]) continue;
      blockIdx.x = block;
      threadIdx.x = warp * 32 + static_cast<unsigned>(running);
      resume();
      left += !finished[running];
    }
    if (left == 0) return;
    if (left != 32) fail("not all lanes meet at a shuffle");
  }
}

int main() {
  std::mt19937 chance(1);
  const auto below = [&](unsigned n) { return static_cast<unsigned>(chance() % n); };
  unsigned total = 0;
  for (int round = 0; round < 150; ++round) {
    const unsigned entries = 1 + below(40), capacity = entries + below(5);
    // Of any sizes; of one size, and cut into rows by the kernel; or rectangles, likewise.
    const bool rectangles = round % 3 == 2;
    const unsigned each = round % 3 == 0 ? 0 : 1 + below(below(4) == 0 ? 9000 : 700), row_nbytes = 128u << below(5);
    const unsigned parts = each == 0 ? 1 : rectangles ? 2 + below(6) : (each + row_nbytes - 1) / row_nbytes;
    const unsigned height = rectangles ? parts : 1;
    const unsigned dst_pitch = rectangles ? each + below(300) : 0, src_pitch = rectangles ? each + below(300) : 0;
    std::vector<uint64_t> columns(capacity * 2 + (capacity + 1) / 2 + 1);
    std::vector<unsigned char> src, dst;
    std::vector<uint64_t> from, to;
    std::vector<unsigned> sizes;
    size_t at = 64;
    for (unsigned i = 0; i < entries; ++i) {
      static const unsigned edges[] = {1,  15, 16, 17, 31, 32,  33,  63,   64,   65,
                                       79, 80, 95, 96, 127, 128, 2047, 2048, 2049, 8192};
      const unsigned nbytes = each != 0       ? each
                              : below(3) == 0 ? edges[below(20)] : 1 + below(below(4) == 0 ? 9000 : 300);
      from.push_back(at + below(128));
      to.push_back(at + below(128));
      sizes.push_back(nbytes);
      at += nbytes + 256 + (height - 1) * std::max(dst_pitch, src_pitch);
    }
    src.resize(at + 64);
    dst.assign(at + 64, 0xA5);
    for (auto& byte : src) byte = static_cast<unsigned char>(chance());
    const auto table = reinterpret_cast<uintptr_t>(columns.data());
    readable.assign(1, {table, table + columns.size() * sizeof(uint64_t)});
    writable.clear();
    written.assign(dst.size(), 0);
    written_base = reinterpret_cast<uintptr_t>(dst.data());
    auto* const narrow = reinterpret_cast<unsigned*>(columns.data() + 2 * capacity);
    for (unsigned i = 0; i < entries; ++i) {
      columns[i] = reinterpret_cast<uintptr_t>(dst.data() + to[i]);
      columns[capacity + i] = reinterpret_cast<uintptr_t>(src.data() + from[i]);
      narrow[i] = each != 0 ? 0xffffffffu : sizes[i];
      for (unsigned y = 0; y < height; ++y) {
        const uintptr_t dst_row = columns[i] + y * dst_pitch, src_row = columns[capacity + i] + y * src_pitch;
        readable.push_back({src_row, src_row + sizes[i]});
        writable.push_back({dst_row, dst_row + sizes[i]});
      }
    }
    gridDim.x = 1 + below(3);
    blockDim.x = 32 * (1 + below(4));
    arguments = {reinterpret_cast<const unsigned char*>(columns.data()), capacity, entries * parts,
                 1 + below(32), below(2), each, parts, row_nbytes, dst_pitch, src_pitch};
    for (unsigned block = 0; block < gridDim.x; ++block) {
      for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) run_warp(block, warp);
    }
    for (unsigned i = 0; i < entries * height; ++i) {
      const auto* dst_row = &dst[to[i / height] + i % height * dst_pitch];
      const auto* src_row = &src[from[i / height] + i % height * src_pitch];
      if (std::memcmp(dst_row, src_row, sizes[i / height]) != 0) fail("a row was not copied");
    }
    size_t bytes = 0, expected = 0;
    for (const auto count : written) bytes += count;
    for (const auto nbytes : sizes) expected += nbytes * height;
    if (bytes != expected) fail("something else was written");
    total += entries * height;
  }
  std::printf("%u rows\n", total);
}
