// What is told ahead of waits, and that nobody is woken who is awake. Exits with 1 and says where something is wrong.
#include "forecast.h"

#include <poll.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

#include "completion_queue.h"
#include "roads.h"

using aiocuda::CompletionQueue;
using aiocuda::CopyEngine;
using aiocuda::Forecast;
using aiocuda::QueueNode;

#define CHECK(condition)                                            \
  if (!(condition)) {                                               \
    std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
    std::exit(1);                                                   \
  }

constexpr uint64_t kWait = 2'000'000;

static void waits_that_are_alike() {
  Forecast forecast;
  CHECK(forecast.end_of(1, 50) == 0);
  for (int i = 0; i < 3; ++i) {
    CHECK(forecast.end_of(1, 50) == 0);
    forecast.learn(1, kWait + static_cast<uint64_t>(i) * Forecast::kToleranceNs);
  }
  CHECK(forecast.end_of(1, 50) == 50 + kWait + 2 * Forecast::kToleranceNs);
  // Nothing is known of others.
  for (uint64_t key = 0; key < 1000; ++key) CHECK(key == 1 || forecast.end_of(key, 50) == 0);
}

static void one_that_differs() {
  Forecast forecast;
  for (int i = 0; i < 9; ++i) forecast.learn(7, kWait);
  CHECK(forecast.end_of(7, 0) == kWait);
  forecast.learn(7, kWait - Forecast::kToleranceNs - 1);
  CHECK(forecast.end_of(7, 0) == 0);
  forecast.learn(7, kWait);
  forecast.learn(7, kWait);
  CHECK(forecast.end_of(7, 0) == 0);
  forecast.learn(7, kWait);
  CHECK(forecast.end_of(7, 0) == kWait);
}

static void short_ones() {
  Forecast forecast;
  for (int i = 0; i < 9; ++i) forecast.learn(7, Forecast::kShortestNs - 1);
  CHECK(forecast.end_of(7, 0) == 0);
}

// Streams that share a place take it from each other, and are never taken for each other.
static void many_streams() {
  Forecast forecast;
  for (uint64_t key = 1; key < 2000; ++key) {
    for (int i = 0; i < 3; ++i) forecast.learn(key, kWait + key);
    CHECK(forecast.end_of(key, 0) == kWait + key);
    for (uint64_t other = 1; other < key; ++other) {
      const uint64_t end = forecast.end_of(other, 0);
      CHECK(end == 0 || end == kWait + other);
    }
  }
}

static bool readable(const CompletionQueue& queue) {
  pollfd one{queue.fd(), POLLIN, 0};
  return poll(&one, 1, 0) == 1;
}

static void announcements() {
  CompletionQueue queue(CompletionQueue::Form::kEventfd);
  queue.announce();
  CHECK(readable(queue));
  CHECK(queue.take_announced(0) == nullptr);
  CHECK(!readable(queue));
  // While the consumer waits for what was announced, a second announcement wakes it no more than the push does.
  queue.announce();
  QueueNode node;
  std::thread other([&] {
    while (readable(queue)) std::this_thread::yield();
    for (int i = 0; i < 1000; ++i) queue.announce();
    queue.push(&node);
  });
  CHECK(queue.take_announced(60'000'000'000) == &node);
  other.join();
}

// How long the copy engine is avoided: a 128th of the longest time at first, twice as long each time it is late again.
static void a_late_copy_engine() {
  const uint64_t most = aiocuda::road_times.avoided_ns.load();
  CopyEngine engine;
  uint64_t now = 1'000'000'000'000;
  CHECK(!engine.avoided(now));
  for (int doublings = 0; doublings < 12; ++doublings) {
    engine.late(now);
    const uint64_t expected = most >> (doublings < 7 ? 7 - doublings : 0);
    CHECK(engine.avoided(now + expected - 1));
    // Others that are late meanwhile only make it begin anew.
    engine.late(now + expected - 1);
    now += expected - 1;
    CHECK(engine.avoided(now + expected - 1));
    CHECK(!engine.avoided(now + expected));
    now += expected;
  }
  // Those that are prompt make it forget as slowly.
  for (int i = 0; i < 8; ++i) engine.prompt();
  engine.late(now);
  CHECK(!engine.avoided(now + (most >> 7)));
  for (int i = 0; i < 99; ++i) engine.prompt();
  engine.late(now);
  CHECK(engine.avoided(now));
}

int main() {
  a_late_copy_engine();
  waits_that_are_alike();
  one_that_differs();
  short_ones();
  many_streams();
  announcements();
}
