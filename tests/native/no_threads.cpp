// Preloaded into a process, it lets that start so many more threads: std::thread asks pthread_create for them, as Python does.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>

static std::atomic<int> allowed{1 << 20};

extern "C" void allow_threads(int count) { allowed = count; }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const Create create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (allowed.fetch_sub(1) <= 0) return EAGAIN;
  return create(thread, attributes, body, argument);
}
