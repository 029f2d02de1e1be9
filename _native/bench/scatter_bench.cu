// Sweeps the kernel of scatter.cu over directions, sizes, blocks, unrolling and alignment, and checks every byte.
//
//   make scatter-bench && build/scatter_bench [MiB moved at a time, 128] [quick]
//
// Each line has the best of five launches in GB/s (1e9 bytes): the whole batch in one launch, its table in page-locked
// memory as the library has it. `pieces` cuts the batch into launches of 4 MiB on two streams in turns, as the library
// does, and `engine` is one copy of as many bytes by the copy engine.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "../scatter.cu"

#define CHECK(call)                                                                                 \
  do {                                                                                              \
    const cudaError_t error_ = (call);                                                              \
    if (error_ != cudaSuccess) {                                                                    \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_));        \
      std::exit(1);                                                                                 \
    }                                                                                               \
  } while (0)

template <int Unroll>
__global__ void __launch_bounds__(1024) variant(const unsigned char* table, unsigned capacity, unsigned rows,
                                                unsigned group, unsigned align_source, unsigned nbytes,
                                                unsigned parts, unsigned row_nbytes, Address dst_pitch,
                                                Address src_pitch) {
  scatter<Unroll>(table, capacity, rows, group, align_source != 0, {nbytes, parts, row_nbytes, dst_pitch, src_pitch});
}

namespace {

using Kernel = void (*)(const unsigned char*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        Address, Address);

enum Direction { kToHost, kToDevice, kOnDevice };
const char* const names[] = {"to host", "to device", "on device"};

struct Copy {
  unsigned char* dst;
  const unsigned char* src;
  size_t nbytes;
};

struct Table {
  unsigned char* memory = nullptr;
  unsigned capacity = 0, rows = 0;
};

struct Buffers {
  size_t nbytes;
  unsigned char *host, *device, *other;
  unsigned char* tables;
  size_t table_nbytes;
};

// As scatter.cpp writes it.
Table build(const Buffers& b, size_t offset, const Copy* copies, size_t n, size_t row_nbytes, bool align_source) {
  size_t rows = 0;
  for (size_t i = 0; i < n; ++i) rows += copies[i].nbytes / row_nbytes + 2;
  Table t{b.tables + offset, static_cast<unsigned>(rows), 0};
  if (offset + rows * 20 > b.table_nbytes) {
    std::printf("the tables are too small\n");
    std::exit(1);
  }
  auto* dsts = reinterpret_cast<uint64_t*>(t.memory);
  auto* srcs = dsts + rows;
  auto* sizes = reinterpret_cast<uint32_t*>(srcs + rows);
  for (size_t i = 0; i < n; ++i) {
    uint64_t dst = reinterpret_cast<uint64_t>(copies[i].dst), src = reinterpret_cast<uint64_t>(copies[i].src);
    size_t left = copies[i].nbytes, most = row_nbytes - (align_source ? src : dst) % 128;
    while (left > 0) {
      const size_t take = std::min(left, most);
      dsts[t.rows] = dst;
      srcs[t.rows] = src;
      sizes[t.rows++] = static_cast<uint32_t>(take);
      dst += take;
      src += take;
      left -= take;
      most = row_nbytes;
    }
  }
  return t;
}

void launch(Kernel kernel, const Table& t, unsigned blocks, unsigned threads, bool align_source, cudaStream_t stream) {
  const unsigned in_block = threads / 32;
  const unsigned grid = std::max(1u, std::min(blocks, (t.rows + in_block - 1) / in_block));
  const unsigned warps = grid * in_block;
  const unsigned group = std::max(1u, std::min((t.rows + warps - 1) / warps, 32u));
  // The tables have sizes.
  kernel<<<grid, threads, 0, stream>>>(t.memory, t.capacity, t.rows, group, align_source ? 1 : 0, 0, 1, 0, 0, 0);
  CHECK(cudaGetLastError());
}

template <class Enqueue>
double best_rate(size_t nbytes, cudaStream_t stream, Enqueue enqueue) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    enqueue();
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    best = std::max(best, static_cast<double>(nbytes) / (ms * 1e6));
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  return best;
}

struct Case {
  Direction direction;
  size_t size;
  unsigned src_skew, dst_skew;
};

std::vector<Copy> copies_of(const Buffers& b, const Case& c) {
  const size_t step = (c.size + 16 + 127) / 128 * 128;
  const size_t n = b.nbytes / step;
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  unsigned char* const from = c.direction == kToDevice ? b.host : b.device;
  unsigned char* const to = c.direction == kToHost ? b.host : c.direction == kToDevice ? b.device : b.other;
  std::vector<Copy> copies(n);
  for (size_t i = 0; i < n; ++i) copies[i] = {to + i * step + c.dst_skew, from + order[i] * step + c.src_skew, c.size};
  return copies;
}

unsigned char content(size_t i) { return static_cast<unsigned char>((i * 2654435761u) >> 13); }

// Fills the source, runs, and compares everything, also what lies between the copies.
template <class Run>
void verify(const Buffers& b, const Case& c, const std::vector<Copy>& copies, Run run) {
  static std::vector<unsigned char> source;
  std::vector<unsigned char> expected(b.nbytes, 0x5A), got(b.nbytes);
  for (size_t i = source.size(); i < b.nbytes; ++i) source.push_back(content(i));
  unsigned char* const from = c.direction == kToDevice ? b.host : b.device;
  unsigned char* const to = c.direction == kToHost ? b.host : c.direction == kToDevice ? b.device : b.other;
  CHECK(cudaMemcpy(from, source.data(), b.nbytes, cudaMemcpyDefault));
  CHECK(cudaMemset(to, 0x5A, b.nbytes));
  CHECK(cudaDeviceSynchronize());
  run();
  CHECK(cudaDeviceSynchronize());
  for (const Copy& copy : copies) std::memcpy(&expected[copy.dst - to], &source[copy.src - from], copy.nbytes);
  CHECK(cudaMemcpy(got.data(), to, b.nbytes, cudaMemcpyDefault));
  if (got != expected) {
    size_t i = 0;
    while (got[i] == expected[i]) ++i;
    std::printf("WRONG at byte %zu: %s, size %zu, skews %u and %u\n", i, names[c.direction], c.size, c.src_skew,
                c.dst_skew);
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Buffers b{};
  b.nbytes = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 128) << 20;
  const bool quick = argc > 2 && std::strcmp(argv[2], "quick") == 0;
  b.table_nbytes = b.nbytes / 2;
  CHECK(cudaHostAlloc(&b.host, b.nbytes, cudaHostAllocDefault));
  CHECK(cudaHostAlloc(&b.tables, b.table_nbytes, cudaHostAllocDefault));
  CHECK(cudaMalloc(&b.device, b.nbytes));
  CHECK(cudaMalloc(&b.other, b.nbytes));
  cudaStream_t streams[2];
  cudaEvent_t events[2];
  for (int i = 0; i < 2; ++i) {
    CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&events[i], cudaEventDisableTiming));
  }
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  const unsigned chip = static_cast<unsigned>(properties.multiProcessorCount);
  std::printf("%s, %u multiprocessors, %zu MiB at a time\n", properties.name, chip, b.nbytes >> 20);
  for (const Direction d : {kToHost, kToDevice, kOnDevice}) {
    unsigned char* const from = d == kToDevice ? b.host : b.device;
    unsigned char* const to = d == kToHost ? b.host : d == kToDevice ? b.device : b.other;
    std::printf("engine %s: %.1f\n", names[d], best_rate(b.nbytes, streams[0], [&] {
                  CHECK(cudaMemcpyAsync(to, from, b.nbytes, cudaMemcpyDefault, streams[0]));
                }));
  }

  const std::pair<const char*, Kernel> kernels[] = {
      {"u1", variant<1>}, {"u2", variant<2>}, {"u4", variant<4>}, {"u8", variant<8>}, {"shipped", aiocuda_copy_scatter}};
  const std::vector<std::pair<unsigned, unsigned>> skews = {{0, 0}, {16, 0}, {0, 16}, {8, 0},
                                                            {1, 1}, {1, 0},  {0, 5},  {3, 14}};
  const std::vector<size_t> sizes = {16, 100, 512, 4096, 16384, 65536, 1 << 20};
  for (const Direction d : {kToHost, kToDevice, kOnDevice}) {
    for (const size_t size : sizes) {
      for (const auto& [src_skew, dst_skew] : skews) {
        const Case c{d, size, src_skew, dst_skew};
        const bool plain = src_skew == 0 && dst_skew == 0;
        const bool align_source = d == kToDevice;
        const size_t row_nbytes = d == kOnDevice ? 16384 : 8192;
        const auto copies = copies_of(b, c);
        const size_t nbytes = copies.size() * size;
        const Table table = build(b, 0, copies.data(), copies.size(), row_nbytes, align_source);
        const unsigned usual = d == kToHost ? 16 : d == kToDevice ? 32 : 3 * chip;
        verify(b, c, copies, [&] { launch(aiocuda_copy_scatter, table, usual, 256, align_source, streams[0]); });
        std::printf("%-9s %8zu +%u->+%u |", names[d], size, src_skew, dst_skew);
        const std::vector<unsigned> grids = d == kOnDevice ? std::vector<unsigned>{chip, 2 * chip, 3 * chip, 8 * chip}
                                                           : std::vector<unsigned>{4, 8, 16, 32, 64};
        for (const auto& [name, kernel] : kernels) {
          const bool shipped = std::strcmp(name, "shipped") == 0;
          if (!shipped && (!plain || quick)) continue;
          std::printf(" %s", name);
          for (const unsigned blocks : grids) {
            std::printf(" %u:%.1f", blocks, best_rate(nbytes, streams[0], [&, k = kernel] {
                          launch(k, table, blocks, 256, align_source, streams[0]);
                        }));
          }
          std::printf(" |");
        }
        if (plain && d != kOnDevice) {
          std::printf(" other side aligned %u:%.1f |", usual, best_rate(nbytes, streams[0], [&] {
                        launch(aiocuda_copy_scatter, table, usual, 256, !align_source, streams[0]);
                      }));
        }
        if (d != kOnDevice) {
          const size_t each = std::max<size_t>(1, (size_t{4} << 20) / size);
          std::vector<Table> tables;
          size_t offset = 0;
          for (size_t i = 0; i < copies.size(); i += each) {
            tables.push_back(build(b, offset, &copies[i], std::min(each, copies.size() - i), row_nbytes, align_source));
            offset += (tables.back().capacity * size_t{20} + 255) / 256 * 256;
          }
          std::printf(" pieces %.1f", best_rate(nbytes, streams[0], [&] {
                        for (size_t i = 0; i < tables.size(); ++i) {
                          if (i > 0) CHECK(cudaStreamWaitEvent(streams[i % 2], events[(i - 1) % 2], 0));
                          launch(aiocuda_copy_scatter, tables[i], usual, 256, align_source, streams[i % 2]);
                          CHECK(cudaEventRecord(events[i % 2], streams[i % 2]));
                        }
                        CHECK(cudaStreamWaitEvent(streams[0], events[(tables.size() - 1) % 2], 0));
                      }));
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  std::printf("all bytes right\n");
  return 0;
}
