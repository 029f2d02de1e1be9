#pragma once
#include <pthread.h>
#include <sys/prctl.h>

#include <csignal>
#include <exception>
#include <thread>
#include <utility>

namespace aiocuda {

// Starts a thread that lives until the process ends, or until its function does; whether the system had one to give. It
// takes no signals: those are for Python's main thread.
template <typename Function>
bool try_start_thread(const char* name, Function function) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    std::thread([name, function = std::move(function)] {
      prctl(PR_SET_NAME, name);
      function();
    }).detach();
  } catch (const std::exception&) {  // no thread, or no memory for what it begins with
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

}  // namespace aiocuda
