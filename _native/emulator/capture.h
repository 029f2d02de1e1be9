// Stream capture and the graphs that it makes.
#pragma once

#include "call.h"
#include "state.h"

namespace emu {

struct Node {
  CUgraphNode handle = nullptr;
  CUgraphNodeType type = node_empty;
  WorkFactory make;  // empty for a node that does nothing
  std::vector<CUgraphNode> after;
  CUDA_HOST_NODE_PARAMS host{};
  std::weak_ptr<Graph> graph;
};

using UserObjectReferences = std::vector<std::pair<std::shared_ptr<UserObject>, std::uint64_t>>;

// Nodes are in the order of their creation, which is a topological one: a node's predecessors exist before it does.
struct Graph {
  CUgraph handle = nullptr;
  std::uint64_t id = 0;
  std::vector<std::shared_ptr<Node>> nodes;
  UserObjectReferences objects;
};

struct GraphExec {
  CUgraphExec handle = nullptr;
  std::uint64_t flags = 0;
  std::vector<WorkFactory> works;
  UserObjectReferences objects;
  std::vector<std::pair<StreamPtr, std::uint64_t>> launches;  // and the place in the stream where each ends
};

struct Capture {
  std::uint64_t id = 0;
  std::shared_ptr<Graph> graph;
  CUstreamCaptureMode mode = capture_global;
  pid_t thread = 0;
  ContextPtr context;
  bool invalidated = false;
  Stream* origin = nullptr;
  std::vector<StreamPtr> streams;
};

CUresult capture_node(Stream& stream, CUgraphNodeType type, WorkFactory make);
// An event wait inside a capture: makes the stream part of the event's capture and orders it behind the record.
CUresult join_capture(const StreamPtr& stream, const Record& record, const std::shared_ptr<Capture>& capture);

// Lets go of what destroyed graphs own as soon as they no longer run.
void reap_graphs(std::vector<std::function<void()>>& afterwards);

// A call that a capture somewhere forbids: refuses it and invalidates that capture.
CUresult refuse_unsafe();
// Work on the legacy default stream while a stream that synchronises with it is being captured.
CUresult refuse_beside_capture(const Stream& stream);
// A call that cannot be captured, on a stream that is being captured.
CUresult refuse_captured(const Stream& stream);

std::shared_ptr<Node> add_node(const std::shared_ptr<Graph>& graph, CUgraphNodeType type, WorkFactory make,
                               std::vector<CUgraphNode> after);

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode);
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode);
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph);
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status);
CUresult cuStreamGetCaptureInfo_v1(CUstream stream, CUstreamCaptureStatus* status, std::uint64_t* id);
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, std::uint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, std::size_t* count);
CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, std::uint64_t* id, CUgraph* graph,
                                   const CUgraphNode** dependencies, const CUgraphEdgeData** edges,
                                   std::size_t* count);
CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* dependencies, const CUgraphEdgeData* edges,
                                           std::size_t count, unsigned flags);

}  // namespace emu
