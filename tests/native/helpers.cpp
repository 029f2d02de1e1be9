// Work that is shared among threads: all of it is done, once, before the call returns. Exits with 1 and says where something
// is wrong.
#include "helpers.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "staging.h"

using aiocuda::Helpers;

#define CHECK(condition)                                            \
  if (!(condition)) {                                               \
    std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
    std::exit(1);                                                   \
  }

static void everything_once(Helpers& helpers) {
  for (size_t n = 0; n < 300; ++n) {
    // Not atomic: whoever runs a number has it to itself, and the caller sees what was written.
    std::vector<int> done(n, 0);
    helpers.share(n, [&](size_t i) { ++done[i]; });
    for (size_t i = 0; i < n; ++i) CHECK(done[i] == 1);
  }
}

// Every number waits until all threads that there are have one.
static void helped(Helpers& helpers, size_t threads) {
  for (int again = 0; again < 20; ++again) {
    std::atomic<size_t> begun{0};
    helpers.share(threads, [&](size_t) {
      ++begun;
      while (begun < threads) std::this_thread::yield();
    });
  }
}

// Who comes while another one is helped does its work alone.
static void several_at_once(Helpers& helpers) {
  std::vector<std::thread> callers;
  for (int k = 0; k < 4; ++k) callers.emplace_back([&helpers] { everything_once(helpers); });
  for (std::thread& caller : callers) caller.join();
}

// A helper's end reaches the caller that it helps, also where another one waits for its own.
static void two_that_wait(Helpers& helpers) {
  struct Caller {
    std::atomic<bool> begun{false}, may_end{false};
    std::thread thread;
  } callers[2];
  for (Caller& caller : callers) {
    caller.thread = std::thread([&] {
      const auto own = std::this_thread::get_id();
      helpers.share(2, [&](size_t) {
        if (std::this_thread::get_id() != own) caller.begun = true;
        // The caller leaves when it is helped, and the helper when it is told to.
        while (!(std::this_thread::get_id() == own ? caller.begun : caller.may_end)) std::this_thread::yield();
      });
    });
    while (!caller.begun) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that it waits
  }
  for (Caller* caller : {&callers[1], &callers[0]}) {
    caller->may_end = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  for (Caller& caller : callers) caller.thread.join();
}

static void alone() {
  Helpers helpers(0);
  const auto here = std::this_thread::get_id();
  helpers.share(100, [&](size_t) { CHECK(std::this_thread::get_id() == here); });
}

size_t aiocuda::cpu_budget() { return 8; }

int main() {
  // Its threads outlive it.
  Helpers& helpers = *new Helpers(3);
  everything_once(helpers);
  helped(helpers, 4);
  several_at_once(helpers);
  two_that_wait(helpers);
  everything_once(Helpers::instance());
  alone();
  std::_Exit(0);
}
