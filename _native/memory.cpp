#include "memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace aiocuda {

static constexpr abi::Result kNotInitialized = 3, kInvalidDevice = 101;

MemoryInfo describe(uint64_t address) noexcept {
  MemoryInfo info;
  if (address == 0) return info;
  if (abi::driver.pointer_get_attributes == nullptr) {
    info.result = kNotInitialized;
    return info;
  }
  // The widths of the answers differ (int, unsigned, pointer, size_t), and the documentation does not give all of them:
  // each gets eight zeroed bytes.
  uint64_t context = 0, memory_type = 0, managed = 0, ordinal = 0, start = 0, nbytes = 0;
  int attributes[] = {abi::kPointerContext,       abi::kPointerMemoryType, abi::kPointerIsManaged,
                      abi::kPointerDeviceOrdinal, abi::kPointerRangeStart, abi::kPointerRangeSize};
  void* answers[] = {&context, &memory_type, &managed, &ordinal, &start, &nbytes};
  abi::Result result = abi::driver.pointer_get_attributes(6, attributes, answers, address);
  if (result == abi::kErrorInvalidValue) return info;
  info.result = result;
  if (result != abi::kSuccess || static_cast<uint32_t>(memory_type) == 0) return info;
  info.context = reinterpret_cast<abi::Context>(context);
  info.memory_type = static_cast<int>(static_cast<uint32_t>(memory_type));
  info.managed = (managed & 0xff) != 0;
  info.ordinal = static_cast<int>(static_cast<uint32_t>(ordinal));
  info.range_start = start;
  info.range_nbytes = nbytes;
  return info;
}

namespace {

// PROCMAP_QUERY of linux/fs.h, which older headers lack.
struct MapQuery {
  uint64_t size, query_flags, address;
  uint64_t begin, end, flags, page_nbytes, offset, inode;
  uint32_t device_major, device_minor, name_nbytes, build_id_nbytes;
  uint64_t name, build_id;
};
constexpr unsigned long kMapQuery = _IOWR('f', 17, MapQuery);
constexpr uint64_t kReadableAndWritable = 3;

}  // namespace

MemoryMap::~MemoryMap() {
  if (file_ >= 0) close(file_);
}

bool MemoryMap::ordinary(uint64_t address, uint64_t* begin, uint64_t* nbytes) noexcept {
  if (silent_) return false;
  if (file_ < 0) file_ = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  MapQuery query = {};
  query.size = sizeof query;
  query.query_flags = kReadableAndWritable;
  query.address = address;
  if (file_ < 0 || ioctl(file_, kMapQuery, &query) != 0) {
    silent_ = file_ < 0 || errno != ENOENT;  // which says that there is nothing of the kind at this address
    return false;
  }
  if (query.inode != 0 || query.device_major != 0 || query.device_minor != 0) return false;
  *begin = query.begin;
  *nbytes = query.end - query.begin;
  return true;
}

abi::Result primary_context(int device, abi::Context* context) noexcept {
  static std::atomic<abi::Context> retained[64];
  if (device < 0 || device >= 64) return kInvalidDevice;
  *context = retained[device].load(std::memory_order_acquire);
  if (*context != nullptr) return abi::kSuccess;
  // Two threads may both retain it, which does no harm: it is never released.
  abi::Result result = abi::driver.primary_context_retain(context, device);
  if (result == abi::kSuccess) retained[device].store(*context, std::memory_order_release);
  return result;
}

void enable_peer_access(int device, int other) noexcept {
  if (abi::driver.context_enable_peer_access == nullptr) return;
  abi::Context contexts[2] = {};
  if (primary_context(device, &contexts[0]) != abi::kSuccess) return;
  if (primary_context(other, &contexts[1]) != abi::kSuccess) return;
  for (const int i : {0, 1}) {
    if (abi::driver.context_push(contexts[i]) != abi::kSuccess) continue;
    // Whoever did it before, and devices that cannot, get an error that is of no interest.
    abi::driver.context_enable_peer_access(contexts[1 - i], 0);
    abi::Context popped = nullptr;
    abi::driver.context_pop(&popped);
  }
}

bool several_devices() noexcept {
  static std::atomic<int> known{0};
  int count = known.load(std::memory_order_relaxed);
  if (count == 0 && abi::driver.device_get_count(&count) == abi::kSuccess) known.store(count, std::memory_order_relaxed);
  return count > 1;
}

int current_device() noexcept {
  abi::Context context = nullptr;
  abi::Device device = -1;
  if (abi::driver.context_get_current(&context) != abi::kSuccess || context == nullptr) return -1;
  return abi::driver.context_get_device(&device) == abi::kSuccess ? device : -1;
}

namespace {

// Runs a call of the driver in a device's primary context and in relaxed capture mode: a pinning thread would otherwise
// invalidate the global capture of any other thread.
template <typename Call>
abi::Result in_primary_context(int device, Call call) noexcept {
  if (abi::driver.host_register == nullptr) return kNotInitialized;
  int mode = abi::kCaptureRelaxed;
  abi::Result result = abi::driver.exchange_capture_mode(&mode);
  if (result != abi::kSuccess) return result;
  if (device < 0) device = std::max(current_device(), 0);
  abi::Context context = nullptr;
  result = primary_context(device, &context);
  if (result == abi::kSuccess) result = abi::driver.context_push(context);
  if (result == abi::kSuccess) {
    result = call();
    abi::driver.context_pop(&context);
  }
  abi::driver.exchange_capture_mode(&mode);
  return result;
}

constexpr size_t kPage = 4096;

unsigned available_cpus() noexcept {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? static_cast<unsigned>(CPU_COUNT(&set)) : 1u;
}

// Calls work(address, nbytes) for pieces of a range, on several threads where it is large: one thread faults pages in at a
// few GB/s.
template <typename Work>
void in_pieces(void* address, size_t nbytes, Work work) noexcept {
  constexpr size_t kWorthAThread = size_t{32} << 20;
  size_t threads = std::min<size_t>({8, available_cpus(), nbytes / kWorthAThread});
  auto* bytes = static_cast<unsigned char*>(address);
  if (threads < 2) return work(bytes, nbytes);
  size_t piece = (nbytes / threads + kHugePage - 1) / kHugePage * kHugePage;
  std::vector<std::thread> helpers;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  size_t done = 0;
  try {
    helpers.reserve(threads);
    for (; done + piece < nbytes; done += piece) helpers.emplace_back(work, bytes + done, piece);
  } catch (const std::exception&) {  // no memory or no thread to be had: the rest is done here
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  work(bytes + done, nbytes - done);
  for (auto& helper : helpers) helper.join();
}

}  // namespace

abi::Result register_host(void* address, size_t nbytes, unsigned flags, int device) noexcept {
  return in_primary_context(device, [=] { return abi::driver.host_register(address, nbytes, flags); });
}

abi::Result unregister_host(void* address, int device) noexcept {
  return in_primary_context(device, [=] { return abi::driver.host_unregister(address); });
}

void* map_host(size_t nbytes) noexcept {
  bool huge = nbytes >= kHugePage;
  // Huge pages need an aligned start, so some more is mapped and given back.
  size_t slack = huge ? kHugePage : 0;
  void* mapped = mmap(nullptr, nbytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto start = reinterpret_cast<uintptr_t>(mapped);
  if (huge) {
    uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > start) munmap(mapped, aligned - start);
    if (aligned < start + slack) munmap(reinterpret_cast<void*>(aligned + nbytes), start + slack - aligned);
    start = aligned;
    madvise(reinterpret_cast<void*>(start), nbytes, MADV_HUGEPAGE);
  }
  auto* address = reinterpret_cast<void*>(start);
  // A fork copies registered private memory at once, 0.8 s per GiB, and shared memory seldom has huge pages.
  madvise(address, nbytes, MADV_DONTFORK);
  in_pieces(address, nbytes, [](unsigned char* bytes, size_t count) {
    for (size_t offset = 0; offset < count; offset += kPage) static_cast<volatile unsigned char*>(bytes)[offset] = 0;
  });
  return address;
}

void unmap_host(void* address, size_t nbytes) noexcept { munmap(address, nbytes); }

void zero_host(void* address, size_t nbytes) noexcept {
  in_pieces(address, nbytes, [](unsigned char* bytes, size_t count) { std::memset(bytes, 0, count); });
}

bool untouched(uintptr_t address) noexcept {
  unsigned char there = 1;
  return mincore(reinterpret_cast<void*>(address / kPage * kPage), kPage, &there) == 0 && (there & 1) == 0;
}

void populate(uintptr_t address, size_t nbytes) noexcept {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
  const uintptr_t begin = address / kPage * kPage, end = (address + nbytes + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(begin), end - begin, kPopulateWrite);
}

void inherit_host(void* address, size_t nbytes, bool inherited) noexcept {
  madvise(address, nbytes, inherited ? MADV_DOFORK : MADV_DONTFORK);
}

}  // namespace aiocuda
