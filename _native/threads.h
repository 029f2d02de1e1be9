#pragma once
#include <pthread.h>
#include <sys/prctl.h>

#include <csignal>
#include <thread>
#include <utility>

namespace aiocuda {

// Starts a thread that lives until the process ends. It takes no signals: those are for Python's main thread.
template <typename Function>
void start_thread(const char* name, Function function) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([name, function = std::move(function)] {
    prctl(PR_SET_NAME, name);
    function();
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace aiocuda
