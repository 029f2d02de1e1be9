// One direction of travel: cuts pieces off the parts that are admitted, in turns, and keeps a few of them on the device.
//
// A copy engine stays with a stream that has more: with a second piece queued behind the first in one stream, a stranger's
// small copy waits for milliseconds or for ever. Two streams in turns, each piece waiting for the other's event, leave a
// gap between pieces in which the copy engine looks around; two pieces in flight keep the link at 0.96 of its rate with
// a stranger's copy at 118 us (docs/explanation/measurements.md).
#pragma once
#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "operation.h"

namespace aiocuda {

class Engine;

class Channel {
 public:
  // How small pieces travel. The kernel takes a flight in one launch, where the copy engine needs a call for each.
  enum class Road : uint8_t { kCopyEngine, kKernel, kKernelForCrowds };

  struct Config {
    bool small;           // pieces in slots of their own, completed without workers
    size_t streams;       // 2: in turns
    size_t depth;         // flights on the device at a time
    size_t group;         // pieces to a flight
    size_t piece_nbytes;  // of direct pieces; staged ones are as large as their slot
    bool first = false;   // its kernels, of a few blocks, go before those of others; copy engines look at no priority
    Road road = Road::kCopyEngine;
    bool scatters = false;  // has a stream apart for kernels that empty bundles, beside which the next one crosses the link
  };

  // From so many small pieces on a launch is quicker than their calls.
  static constexpr size_t kCrowd = 4;

  Channel(Engine& engine, const Config& config) : engine_(engine), config_(config) {}

  abi::Result open();
  // Whether its first stream is done, or the context lost.
  abi::Result query() const { return abi::driver.stream_query(streams_.front()); }
  void add(Part* part) {
    part->listed = true;
    active_.push_back(part);
  }

  // Each returns whether it got anything done.
  bool fill();    // hands the workers pieces to fill, for the staged parts that go to the device
  bool issue();   // puts pieces on the device
  bool retire();  // looks for pieces that have landed

  // A piece that the workers have filled, or the twin of another channel's.
  void ready(Piece* piece) { ready_.push_back(piece); }

  // When an operation whose last flight is under way will land; 0 where that cannot be told.
  uint64_t end_ns() const;

  // Whether the oldest flight has been on the device for so long that it must be behind somebody else's work.
  bool overdue(uint64_t now) const;
  // The pieces on the device that have no twin yet and whose outcome somebody waits for.
  std::vector<Piece*> without_twin() const;
  // Takes over what the other channel has not put on the device yet; all of it, or what may be on both roads.
  void take_over(Channel& other, bool all);
  size_t parts_waiting() const { return active_.size(); }

  // Lets go of what is stopped and not on the device, however long that keeps the flights there.
  void drop_stopped();

  // After a fault: everything on the device is given up, everything else handed back.
  void abandon();

  bool idle() const { return active_.empty() && flights_.empty() && ready_.empty(); }
  bool in_flight() const { return !flights_.empty(); }
  const Config& config() const { return config_; }

 private:
  struct Flight {
    abi::Event event;
    std::vector<Piece*> pieces;
    uint64_t since_ns;
    abi::Event crossed = nullptr;  // of a bundle to the device
    bool foreseen = false;

    size_t nbytes() const;
  };

  // Announces the end of an operation whose last flight this is, when it is about to land.
  void foresee(Flight& flight);
  // Since when the flight has had the device to itself.
  uint64_t begun_ns(const Flight& flight) const { return std::max(flight.since_ns, last_landed_ns_); }

  // Takes parts that are exhausted or stopped off the list.
  void sweep();
  Piece* next_piece();
  Piece* cut(Part* part);
  // Enqueues a piece's copies. An error stops the operation; what was enqueued before it still lands.
  void enqueue(Piece* piece, abi::Stream stream);
  // Enqueues small pieces as one table, which the first of them holds, where that is the road and the kernel can take it.
  bool enqueue_table(const std::vector<Piece*>& pieces, abi::Stream stream);
  bool launch(std::vector<Piece*> pieces);
  // Fills a bundle, whose copy is enqueued when it is the flight's turn.
  void gather(Piece* piece, abi::Stream stream);
  // Sends a bundle to the device, and has it emptied there in the stream that is apart.
  abi::Result scatter(Piece* piece, abi::Stream stream, Flight* flight);
  abi::Result take_event(abi::Event* event);
  abi::Result open_stream(abi::Stream* stream) const;

  Engine& engine_;
  const Config config_;
  std::deque<Part*> active_;
  std::deque<Piece*> ready_;
  std::deque<Flight> flights_;
  std::vector<abi::Stream> streams_;
  abi::Stream scattering_ = nullptr;
  std::vector<abi::Event> events_;
  abi::Event last_event_ = nullptr;
  size_t turn_ = 0;
  uint64_t last_landed_ns_ = 0;
  double bytes_per_ns_ = 0;  // of the last large flights
};

}  // namespace aiocuda
