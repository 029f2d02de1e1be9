// Workers of several copiers, in both directions: every copy is made once, by no more workers at a time than its copier
// and its direction may use, and no job is left while a worker that may have it sleeps. Exits with 1 and says where something
// is wrong.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "staging.h"

using namespace aiocuda;

#define CHECK(condition)                                            \
  if (!(condition)) {                                               \
    std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
    std::exit(1);                                                   \
  }

namespace {

struct Copier {
  Quota quota;
  Operation to_host, to_device;
  std::atomic<size_t> at_work{0};

  explicit Copier(size_t workers) {
    quota.workers = workers;
    for (auto [operation, route] : {std::pair{&to_host, Route::kToHostStaged}, {&to_device, Route::kToDeviceStaged}}) {
      operation->quota = &quota;
      operation->parts.emplace_back();
      operation->parts.front().operation = operation;
      operation->parts.front().route = route;
    }
  }
};

// A piece has its copier for the stand-ins below, and what has been done of it: not atomic, each copy is one worker's.
struct Work : Piece {
  Copier* copier;
  std::vector<int> done;
  std::atomic<bool> begun{false}, may_end{true}, ended{false};

  void belongs_to(Copier& owner, Operation& operation, size_t copies) {
    copier = &owner;
    part = &operation.parts.front();
    host_copies.resize(copies);
    done.assign(copies, 0);
  }
};

std::atomic<size_t> to_device_at_work{0};

void ended(void*, Piece* piece) {
  Work* const work = static_cast<Work*>(piece);
  for (const int count : work->done) CHECK(count == 1);
  work->ended = true;
}

void wait_for(const std::atomic<bool>& flag) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!flag) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

}  // namespace

namespace aiocuda {

// No part here has columns.
void SlotPool::give(Slot*) { std::abort(); }

// In place of pieces.cpp: every copy is a job.
size_t job_end(const Piece&, size_t begin) { return begin + 1; }

void run_host_copies(const Piece& piece, size_t begin, size_t end) {
  Work* const work = const_cast<Work*>(static_cast<const Work*>(&piece));
  Copier& copier = *work->copier;
  const bool down = to_host(piece.part->route);
  CHECK(++copier.at_work <= copier.quota.workers);
  if (!down) CHECK(++to_device_at_work <= Workers::kMostToDevice);
  CHECK(end == begin + 1);
  ++work->done[begin];
  work->begun = true;
  if (begin % 3 == 0) std::this_thread::yield();
  while (!work->may_end) std::this_thread::sleep_for(std::chrono::microseconds(20));
  if (!down) --to_device_at_work;
  --copier.at_work;
}

}  // namespace aiocuda

static void everything_once(Workers& workers) {
  Copier copiers[] = {Copier(1), Copier(2), Copier(3), Copier(64)};
  std::mt19937 random(1);
  for (int round = 0; round < 400; ++round) {
    std::deque<Work> all;
    for (int burst = 0; burst < 4; ++burst) {
      std::vector<Piece*> pieces;
      for (unsigned k = random() % 6 + 1; k != 0; --k) {
        Work& work = all.emplace_back();
        Copier& copier = copiers[random() % 4];
        work.belongs_to(copier, random() % 2 ? copier.to_host : copier.to_device, random() % 40 + 1);
        pieces.push_back(&work);
      }
      workers.submit(pieces);
      // Some bursts come while all are at work, some when they have gone to sleep.
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    }
    for (Work& work : all) wait_for(work.ended);
  }
  for (Copier& copier : copiers) CHECK(copier.quota.workers_in_use == 0);
}

// As many copy to the device as may, one of them for a copier that may have no other worker. When that one ends, its worker
// takes the next copy to the device; the copier's other job is for somebody who sleeps.
static void room_for_somebody_else(Workers& workers) {
  Copier wide(64), narrow(1);
  std::deque<Work> all;
  const auto add = [&](Copier& copier, Operation& operation, bool may_end) {
    Work& work = all.emplace_back();
    work.belongs_to(copier, operation, 1);
    work.may_end = may_end;
    workers.submit({&work});
    return &work;
  };
  Work* const first = add(narrow, narrow.to_device, false);
  for (size_t k = 1; k < Workers::kMostToDevice; ++k) add(wide, wide.to_device, false);
  for (Work& work : all) wait_for(work.begun);
  Work* const next = add(wide, wide.to_device, false);
  Work* const other = add(narrow, narrow.to_host, true);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that the others sleep
  CHECK(!next->begun && !other->begun);
  first->may_end = true;
  wait_for(next->begun);
  wait_for(other->ended);
  for (Work& work : all) work.may_end = true;
  for (Work& work : all) wait_for(work.ended);
}

int main() {
  Workers& workers = *new Workers(Workers::kMost, ended, nullptr);  // its threads never end
  everything_once(workers);
  room_for_somebody_else(workers);
  std::fflush(stdout);
  std::_Exit(0);
}
