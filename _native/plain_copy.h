// A contiguous copy between two addresses, one of which is on a device: whether it is as plain as that, and a small one
// whose stream is idle finished inside the call.
#pragma once
#include <cstddef>
#include <cstdint>

#include "inline_copy.h"
#include "memory.h"
#include "operation.h"

namespace aiocuda {

struct PlainCopy {
  uint64_t on_device = 0;
  uint64_t on_host = 0;
  size_t nbytes = 0;
  bool to_host = false;
  uint64_t stream = 0;
  int device = -1;  // that it must be on, or any
  bool inlined = false;
  bool marked = false;   // the stream is marked, without the question whether it is idle, unless it may end inside the call
  uint64_t parks_until_ns = 0;  // no copy ends inside a call before

  // What has come of it.
  MemoryInfo memory;
  InlineLane::Run run;
  uint64_t begin_ns = 0;  // when what went on inside the call began, and ended
  uint64_t end_ns = 0;
  bool beside_loading = false;  // of the kernel, for which the driver makes calls wait, once
};

// Makes it the only part of an operation, with a mark where its stream is busy. Without the GIL. Returns 0, or else for
// what is not plain or cannot be: then the operation is of no use any more.
int begin_plain(PlainCopy* copy, Operation* operation);

}  // namespace aiocuda
