// Work that is shared among threads: all of it is done, once, before the call returns. Exits with 1 and says where something
// is wrong.
#include "helpers.h"

#include <atomic>
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
  everything_once(Helpers::instance());
  alone();
  std::_Exit(0);
}
