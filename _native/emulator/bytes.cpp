#include "bytes.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "memory.h"

namespace emu {

namespace {

constexpr std::size_t page = 4096;
// Below this a look at the page tables costs more than the pages. The library's pieces are as large as this.
constexpr std::size_t sparse_from = std::size_t{4} << 20;
constexpr std::size_t chunk = std::size_t{1} << 20;
constexpr std::size_t poisoned_at_each_end = std::size_t{64} << 10;

int device_file = -1;
std::uintptr_t device_alias = 0;
std::size_t device_size = 0;

// Knows of a range which of its pages have never been written.
class Untouched {
 public:
  Untouched(std::uintptr_t address, std::size_t nbytes) : device_(address - device_alias < device_size) {
    if (device_) return;
    find_private_mappings(address, address + nbytes);
    pagemap_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  }
  ~Untouched() {
    if (pagemap_ >= 0) close(pagemap_);
  }
  Untouched(const Untouched&) = delete;
  Untouched& operator=(const Untouched&) = delete;

  bool covers(std::uintptr_t address, std::size_t nbytes) const {
    return device_ ? hole_in_device_file(address, nbytes) : never_written(address, nbytes);
  }

 private:
  static bool hole_in_device_file(std::uintptr_t address, std::size_t nbytes) {
    const auto offset = static_cast<off_t>(address - device_alias);
    const off_t data = lseek(device_file, offset, SEEK_DATA);
    return data < 0 || data >= offset + static_cast<off_t>(nbytes);
  }

  // Only of private anonymous memory does an absent page mean zeros.
  void find_private_mappings(std::uintptr_t begin, std::uintptr_t end) {
    FILE* maps = std::fopen("/proc/self/maps", "re");
    if (!maps) return;
    char line[512];
    while (std::fgets(line, sizeof line, maps)) {
      unsigned long first, last, inode;
      char access[5];
      if (std::sscanf(line, "%lx-%lx %4s %*x %*s %lu", &first, &last, access, &inode) != 4) continue;
      if (last > begin && first < end && access[3] == 'p' && inode == 0) private_.push_back({first, last});
    }
    std::fclose(maps);
  }

  bool never_written(std::uintptr_t address, std::size_t nbytes) const {
    const std::uintptr_t end = address + nbytes;
    const bool known = std::any_of(private_.begin(), private_.end(), [&](const auto& mapping) {
      return mapping.first <= address && end <= mapping.last;
    });
    if (!known || pagemap_ < 0) return false;
    std::uint64_t entries[chunk / page + 2];
    const std::size_t count = (end - 1) / page - address / page + 1;
    const auto bytes = static_cast<ssize_t>(count * sizeof entries[0]);
    if (pread(pagemap_, entries, static_cast<std::size_t>(bytes),
              static_cast<off_t>(address / page * sizeof entries[0])) != bytes)
      return false;
    // A page that is present and yet not anonymous is the huge zero page.
    constexpr std::uint64_t present = std::uint64_t{1} << 63, swapped = std::uint64_t{1} << 62,
                            not_anonymous = std::uint64_t{1} << 61;
    return std::all_of(entries, entries + count, [](std::uint64_t entry) {
      return !(entry & (present | swapped)) || (entry & (present | not_anonymous)) == (present | not_anonymous);
    });
  }

  struct Mapping {
    std::uintptr_t first, last;
  };
  bool device_;
  int pagemap_ = -1;
  std::vector<Mapping> private_;
};

// A number that is aligned arrives at once, as on the bus, whoever looks meanwhile.
bool is_number(const std::byte* destination, std::size_t nbytes) {
  return nbytes <= sizeof(std::uint64_t) && nbytes != 0 && (nbytes & (nbytes - 1)) == 0 &&
         reinterpret_cast<std::uintptr_t>(destination) % nbytes == 0;
}

template <class Number>
void move_as(std::byte* destination, const std::byte* source) {
  Number number;
  std::memcpy(&number, source, sizeof number);
  __atomic_store_n(reinterpret_cast<Number*>(destination), number, __ATOMIC_RELEASE);
}

void move_number(std::byte* destination, const std::byte* source, std::size_t nbytes) {
  switch (nbytes) {
    case 1: return move_as<std::uint8_t>(destination, source);
    case 2: return move_as<std::uint16_t>(destination, source);
    case 4: return move_as<std::uint32_t>(destination, source);
    default: return move_as<std::uint64_t>(destination, source);
  }
}

bool all_zeros(const std::byte* memory, std::size_t nbytes) {
  return memory[0] == std::byte{0} && std::memcmp(memory, memory + 1, nbytes - 1) == 0;
}

void clear(std::byte* memory, std::size_t nbytes, bool device) {
  if (device) {
    forget_bytes(memory, nbytes);
  } else {
    std::memset(memory, 0, nbytes);
  }
}

}  // namespace

void watch_device_file(int file, std::uintptr_t alias, std::size_t size) {
  device_file = file;
  device_alias = alias;
  device_size = size;
}

void forget_bytes(std::byte* memory, std::size_t nbytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t first = (begin + page - 1) / page * page, last = (begin + nbytes) / page * page;
  if (first >= last) {
    std::memset(memory, 0, nbytes);
    return;
  }
  std::memset(memory, 0, first - begin);
  std::memset(reinterpret_cast<void*>(last), 0, begin + nbytes - last);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_REMOVE);
}

void move_bytes(std::byte* destination, const std::byte* source, std::size_t nbytes) {
  if (is_number(destination, nbytes)) return move_number(destination, source, nbytes);
  if (nbytes < sparse_from) {
    std::memmove(destination, source, nbytes);
    return;
  }
  const auto to = reinterpret_cast<std::uintptr_t>(destination), from = reinterpret_cast<std::uintptr_t>(source);
  const Untouched source_pages(from, nbytes), destination_pages(to, nbytes);
  const bool to_device = to - device_alias < device_size;
  // Chunks begin on the device's pages: one that two chunks shared would be written by the first and copied by the next.
  const std::uintptr_t aligned = to_device ? to : from;
  for (std::size_t done = 0; done < nbytes;) {
    const std::size_t n = std::min(chunk - (aligned + done) % page, nbytes - done);
    const bool fresh = destination_pages.covers(to + done, n);
    if (source_pages.covers(from + done, n)) {
      // Writing would also give memory to the rest of a huge page, and so on to the end.
      if (!fresh && !all_zeros(destination + done, n)) clear(destination + done, n, to_device);
    } else if (!fresh || !all_zeros(source + done, n)) {
      std::memmove(destination + done, source + done, n);
    }
    done += n;
  }
}

void poison(std::byte* destination, std::size_t nbytes) {
  if (is_number(destination, nbytes)) return;
  if (nbytes <= 2 * poisoned_at_each_end) {
    std::memset(destination, poison_byte, nbytes);
    return;
  }
  std::memset(destination, poison_byte, poisoned_at_each_end);
  std::memset(destination + nbytes - poisoned_at_each_end, poison_byte, poisoned_at_each_end);
}

}  // namespace emu
