#include "capture.h"

#include <algorithm>

namespace emu {

namespace {

thread_local CUstreamCaptureMode thread_capture_mode = capture_global;

std::vector<std::shared_ptr<Capture>> live_captures() {
  auto& captures = driver().captures;
  std::vector<std::shared_ptr<Capture>> live;
  for (const auto& weak : captures)
    if (auto capture = weak.lock()) live.push_back(std::move(capture));
  captures.assign(live.begin(), live.end());
  return live;
}

bool precedes(CUgraphNode earlier, const std::vector<CUgraphNode>& tail) {
  return std::any_of(tail.begin(), tail.end(), [&](CUgraphNode node) {
    return node == earlier || precedes(earlier, driver().nodes.find(node)->after);
  });
}

bool everything_joined(const Capture& capture) {
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](const StreamPtr& stream) {
    return std::all_of(stream->capture_tail.begin(), stream->capture_tail.end(),
                       [&](CUgraphNode node) { return precedes(node, capture.origin->capture_tail); });
  });
}

CUresult implicit_capture_error(const Stream& stream) {
  if (!stream.legacy) return CUDA_SUCCESS;
  for (const auto& capture : live_captures()) {
    for (const auto& captured : capture->streams)
      if (captured->context == stream.context && captured->blocking()) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  return CUDA_SUCCESS;
}

}  // namespace

std::shared_ptr<Node> add_node(const std::shared_ptr<Graph>& graph, CUgraphNodeType type, WorkFactory make,
                               std::vector<CUgraphNode> after) {
  auto node = std::make_shared<Node>();
  node->type = type;
  node->make = std::move(make);
  node->after = std::move(after);
  node->graph = graph;
  driver().nodes.add(node);
  graph->nodes.push_back(node);
  return node;
}

CUresult capture_node(Stream& stream, CUgraphNodeType type, WorkFactory make) {
  if (stream.capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  const auto node = add_node(stream.capture->graph, type, std::move(make), stream.capture_tail);
  if (type == node_host) {
    const auto work = node->make();
    node->host = {work->function, work->argument};
  }
  stream.capture_tail = {node->handle};
  return CUDA_SUCCESS;
}

CUresult join_capture(const StreamPtr& stream, const Record& record, const std::shared_ptr<Capture>& capture) {
  if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->capture && stream->capture != capture) {
    stream->capture->invalidated = capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  }
  if (!stream->capture) {
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    stream->capture = capture;
    stream->capture_tail.clear();
    capture->streams.push_back(stream);
  }
  for (const auto node : record.capture_tail)
    if (std::find(stream->capture_tail.begin(), stream->capture_tail.end(), node) == stream->capture_tail.end())
      stream->capture_tail.push_back(node);
  return CUDA_SUCCESS;
}

CUresult refuse_unsafe() {
  const pid_t self = thread_id();
  CUresult result = CUDA_SUCCESS;
  for (const auto& capture : live_captures()) {
    if (capture->mode == capture_relaxed || thread_capture_mode == capture_relaxed) continue;
    const bool own = capture->thread == self;
    const bool everywhere = capture->mode == capture_global && thread_capture_mode == capture_global;
    if (!own && !everywhere) continue;
    capture->invalidated = true;
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult refuse_beside_capture(const Stream& stream) {
  const auto result = implicit_capture_error(stream);
  if (result != CUDA_SUCCESS)
    for (const auto& capture : live_captures())
      if (capture->context == stream.context) capture->invalidated = true;
  return result;
}

CUresult refuse_captured(const Stream& stream) {
  if (stream.capture) {
    stream.capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return refuse_beside_capture(stream);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return driver_call("cuThreadExchangeStreamCaptureMode", Needs::initialised, [&](Call&) {
    if (!mode || *mode < capture_global || *mode > capture_relaxed) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, thread_capture_mode);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
  return driver_call("cuStreamBeginCapture", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->id = driver().next_id++;
    capture->graph = std::make_shared<Graph>();
    capture->graph->id = driver().next_id++;
    driver().graphs.add(capture->graph);
    capture->mode = mode;
    capture->thread = thread_id();
    capture->context = stream->context;
    capture->origin = stream.get();
    capture->streams = {stream};
    driver().captures.push_back(capture);
    stream->capture = capture;
    stream->capture_tail.clear();
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return driver_call("cuStreamEndCapture", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    const auto capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream.get()) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != capture_relaxed && capture->thread != thread_id())
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    CUresult result = CUDA_SUCCESS;
    if (capture->invalidated) {
      result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (!everything_joined(*capture)) {
      result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
    for (const auto& captured : capture->streams) {
      captured->capture = nullptr;
      captured->capture_tail.clear();
    }
    if (result == CUDA_SUCCESS) {
      *graph = capture->graph->handle;
    } else {
      for (const auto& node : capture->graph->nodes) driver().nodes.remove(node->handle);
      driver().graphs.remove(capture->graph->handle);
    }
    return result;
  });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return query_call("cuStreamIsCapturing", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (const auto result = implicit_capture_error(*stream); result != CUDA_SUCCESS) return result;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    *status = !stream->capture ? capture_none : stream->capture->invalidated ? capture_invalidated : capture_active;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, std::uint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, const CUgraphEdgeData** edges,
                                   std::size_t* count) {
  return driver_call("cuStreamGetCaptureInfo", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (const auto result = implicit_capture_error(*stream); result != CUDA_SUCCESS) return result;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    const auto& capture = stream->capture;
    *status = !capture ? capture_none : capture->invalidated ? capture_invalidated : capture_active;
    if (*status != capture_active) return CUDA_SUCCESS;
    if (id) *id = capture->id;
    if (graph) *graph = capture->graph->handle;
    if (dependencies) *dependencies = stream->capture_tail.data();
    if (edges) *edges = nullptr;
    if (count) *count = stream->capture_tail.size();
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, std::uint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, std::size_t* count) {
  return cuStreamGetCaptureInfo_v3(handle, status, id, graph, dependencies, nullptr, count);
}

CUresult cuStreamGetCaptureInfo_v1(CUstream handle, CUstreamCaptureStatus* status, std::uint64_t* id) {
  return cuStreamGetCaptureInfo_v3(handle, status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode* dependencies, const CUgraphEdgeData*,
                                           std::size_t count, unsigned flags) {
  return driver_call("cuStreamUpdateCaptureDependencies", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (const auto result = resolve_stream(call, handle, stream); result != CUDA_SUCCESS) return result;
    if (!stream->capture || (count && !dependencies)) return CUDA_ERROR_ILLEGAL_STATE;
    constexpr unsigned replace = 1;
    if (flags & replace) stream->capture_tail.clear();
    stream->capture_tail.insert(stream->capture_tail.end(), dependencies, dependencies + count);
    return CUDA_SUCCESS;
  });
}

}  // namespace emu
