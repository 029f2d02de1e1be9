// Runs what is queued: one thread for copy engines, kernels and everything a stream's front end does, and one thread per
// context for its host functions.
#pragma once

#include "call.h"
#include "state.h"

namespace emu {

void start_scheduler();
void wake_scheduler();
std::int64_t now_ns();

// Puts work into a stream, or into the graph that the stream is being captured into. Blocks while the stream is full.
CUresult submit(Call& call, const StreamPtr& stream, Work work, CUgraphNodeType node_type);
CUresult enqueue(Call& call, const StreamPtr& stream, WorkPtr work);
// Blocks until everything now in the stream is done, or its context has failed.
CUresult drain(Call& call, const StreamPtr& stream, const char* reason);

void fault_context(Context& context, CUresult code);
void drop_queued_work(Context& context);

bool held(const Stream& stream);
bool front_is_ready(const Stream& stream);
void step_stream(std::unique_lock<std::mutex>& lock, const StreamPtr& stream, std::uint64_t n, std::uint64_t& ran);
void settle(std::unique_lock<std::mutex>& lock);

}  // namespace emu
