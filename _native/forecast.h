// How long streams keep copies waiting. A program that awaits a result behind each of its kernels mostly waits as long as the
// time before; then the end of a wait can be told ahead, and nobody has to be woken up after it.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace aiocuda {

class Forecast {
 public:
  // Waits that differ by no more than that are alike: a loop that has been told waits about as long.
  static constexpr uint64_t kToleranceNs = 30'000;
  // A loop that slept for less wakes up quickly.
  static constexpr uint64_t kShortestNs = 300'000;

  // A wait in a stream has ended.
  void learn(uint64_t stream_key, uint64_t waited_ns) {
    Stream& stream = of(stream_key);
    if (stream.key != stream_key) stream = {stream_key, 0, 0};
    const uint64_t difference = std::max(stream.waited_ns, waited_ns) - std::min(stream.waited_ns, waited_ns);
    stream.alike = difference <= kToleranceNs ? std::min<unsigned>(stream.alike + 1, kEnough) : 0;
    stream.waited_ns = waited_ns;
  }

  // When a wait that began then will end; 0 where that cannot be told.
  uint64_t end_of(uint64_t stream_key, uint64_t since_ns) const {
    const Stream& stream = of(stream_key);
    const bool known = stream.key == stream_key && stream.alike == kEnough && stream.waited_ns >= kShortestNs;
    return known ? since_ns + stream.waited_ns : 0;
  }

 private:
  static constexpr size_t kStreams = 16;  // others take the place of what was known of one
  static constexpr unsigned kEnough = 2;  // so three waits were alike

  struct Stream {
    uint64_t key = 0;
    uint64_t waited_ns = 0;
    unsigned alike = 0;
  };

  // Handles are mostly addresses, the lowest bits of which say nothing.
  static size_t place(uint64_t key) { return (key ^ (key >> 6) ^ (key >> 12)) % kStreams; }
  const Stream& of(uint64_t key) const { return streams_[place(key)]; }
  Stream& of(uint64_t key) { return streams_[place(key)]; }

  std::array<Stream, kStreams> streams_;
};

}  // namespace aiocuda
