#include "graph_calls.h"

#include <algorithm>

#include "capture.h"
#include "copies.h"
#include "scheduler.h"
#include "stream_calls.h"

namespace emu {

namespace {

template <class Value>
CUresult list(const std::vector<Value>& values, Value* out, std::size_t* count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  if (out) {
    const std::size_t n = std::min(*count, values.size());
    std::copy_n(values.begin(), n, out);
    std::fill(out + n, out + *count, Value{});
    *count = n;
  } else {
    *count = values.size();
  }
  return CUDA_SUCCESS;
}

// The destructor is the user's code and may take any lock of theirs: it runs when the call has let go of ours.
using Actions = std::vector<std::function<void()>>;

void drop_references(Actions& afterwards, const std::shared_ptr<UserObject>& object, std::uint64_t count) {
  object->references -= std::min(count, object->references);
  if (object->references > 0) return;
  driver().user_objects.remove(object->handle);
  afterwards.push_back([object] { object->destroy(object->pointer); });
}

void drop_references(Actions& afterwards, UserObjectReferences& references) {
  for (const auto& [object, count] : references) drop_references(afterwards, object, count);
  references.clear();
}

bool runs(const GraphExec& exec) {
  return std::any_of(exec.launches.begin(), exec.launches.end(),
                     [](const auto& launch) { return launch.first->completed < launch.second; });
}

template <class Build>
CUresult add(const char* name, CUgraphNode* handle, CUgraph graph_handle, const CUgraphNode* after, std::size_t count,
             CUgraphNodeType type, Build&& build) {
  return driver_call(name, Needs::healthy, [&](Call&) {
    const auto graph = driver().graphs.find(graph_handle);
    if (!handle || !graph || (count && !after)) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t index = 0; index < count; ++index) {
      const auto predecessor = driver().nodes.find(after[index]);
      if (!predecessor || predecessor->graph.lock() != graph) return CUDA_ERROR_INVALID_VALUE;
    }
    WorkFactory make;
    if (const CUresult result = build(make); result != CUDA_SUCCESS) return result;
    *handle = add_node(graph, type, std::move(make), {after, after + count})->handle;
    return CUDA_SUCCESS;
  });
}

WorkFactory always(Work work) {
  return [shared = std::make_shared<const Work>(std::move(work))] { return shared; };
}

CUresult instantiate(const char* name, CUgraphExec* handle, CUgraph graph_handle, std::uint64_t flags) {
  return driver_call(name, Needs::healthy, [&](Call&) {
    const auto graph = driver().graphs.find(graph_handle);
    if (!handle || !graph) return CUDA_ERROR_INVALID_VALUE;
    auto exec = std::make_shared<GraphExec>();
    exec->flags = flags;
    for (const auto& node : graph->nodes)
      if (node->make) exec->works.push_back(node->make);
    exec->objects = graph->objects;
    for (const auto& [object, count] : exec->objects) object->references += count;
    driver().graph_execs.add(exec);
    *handle = exec->handle;
    return CUDA_SUCCESS;
  });
}

}  // namespace

void reap_graphs(Actions& afterwards) {
  auto& dying = driver().dying_graphs;
  for (auto exec = dying.begin(); exec != dying.end();) {
    if (runs(**exec)) {
      ++exec;
      continue;
    }
    drop_references(afterwards, (*exec)->objects);
    exec = dying.erase(exec);
  }
}

CUresult cuGraphCreate(CUgraph* handle, unsigned flags) {
  return driver_call("cuGraphCreate", Needs::healthy, [&](Call&) {
    if (!handle || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    auto graph = std::make_shared<Graph>();
    graph->id = driver().next_id++;
    driver().graphs.add(graph);
    *handle = graph->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphDestroy(CUgraph handle) {
  return driver_call("cuGraphDestroy", Needs::initialised, [&](Call& call) {
    const auto graph = driver().graphs.find(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    drop_references(call.afterwards, graph->objects);
    for (const auto& node : graph->nodes) driver().nodes.remove(node->handle);
    driver().graphs.remove(handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, std::size_t* count) {
  return driver_call("cuGraphGetNodes", Needs::healthy, [&](Call&) {
    const auto graph = driver().graphs.find(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::vector<CUgraphNode> all;
    for (const auto& node : graph->nodes) all.push_back(node->handle);
    return list(all, nodes, count);
  });
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode* nodes, std::size_t* count) {
  return driver_call("cuGraphGetRootNodes", Needs::healthy, [&](Call&) {
    const auto graph = driver().graphs.find(handle);
    if (!graph) return CUDA_ERROR_INVALID_VALUE;
    std::vector<CUgraphNode> roots;
    for (const auto& node : graph->nodes)
      if (node->after.empty()) roots.push_back(node->handle);
    return list(roots, nodes, count);
  });
}

CUresult cuGraphGetEdges(CUgraph handle, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edges,
                         std::size_t* count) {
  return driver_call("cuGraphGetEdges", Needs::healthy, [&](Call&) {
    const auto graph = driver().graphs.find(handle);
    if (!graph || !count) return CUDA_ERROR_INVALID_VALUE;
    std::vector<CUgraphNode> sources, targets;
    for (const auto& node : graph->nodes) {
      sources.insert(sources.end(), node->after.begin(), node->after.end());
      targets.insert(targets.end(), node->after.size(), node->handle);
    }
    std::size_t capacity = *count;
    if (edges) std::fill_n(edges, std::min(capacity, sources.size()), CUgraphEdgeData{});
    list(sources, from, &capacity);
    return list(targets, to, count);
  });
}

CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
  return driver_call("cuGraphNodeGetType", Needs::healthy, [&](Call&) {
    const auto node = driver().nodes.find(handle);
    if (!node || !type) return CUDA_ERROR_INVALID_VALUE;
    *type = node->type;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode* dependencies, CUgraphEdgeData* edges,
                                    std::size_t* count) {
  return driver_call("cuGraphNodeGetDependencies", Needs::healthy, [&](Call&) {
    const auto node = driver().nodes.find(handle);
    if (!node || !count) return CUDA_ERROR_INVALID_VALUE;
    if (edges) std::fill_n(edges, std::min(*count, node->after.size()), CUgraphEdgeData{});
    return list(node->after, dependencies, count);
  });
}

CUresult cuGraphHostNodeGetParams(CUgraphNode handle, CUDA_HOST_NODE_PARAMS* parameters) {
  return driver_call("cuGraphHostNodeGetParams", Needs::healthy, [&](Call&) {
    const auto node = driver().nodes.find(handle);
    if (!node || node->type != node_host || !parameters) return CUDA_ERROR_INVALID_VALUE;
    *parameters = node->host;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count) {
  return add("cuGraphAddEmptyNode", node, graph, after, count, node_empty,
             [](WorkFactory&) { return CUDA_SUCCESS; });
}

CUresult cuGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                            const CUDA_HOST_NODE_PARAMS* parameters) {
  return add("cuGraphAddHostNode", node, graph, after, count, node_host, [&](WorkFactory& make) {
    if (!parameters || !parameters->function) return CUDA_ERROR_INVALID_VALUE;
    make = always(host_function_work(parameters->function, parameters->argument));
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                              const CUDA_MEMCPY3D* copy, CUcontext) {
  return add("cuGraphAddMemcpyNode", node, graph, after, count, node_memcpy, [&](WorkFactory& make) {
    if (!copy) return CUDA_ERROR_INVALID_VALUE;
    Work work{Kind::copy};
    const auto result = copy_work(*copy, work);
    make = always(std::move(work));
    return result;
  });
}

CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                              const CUDA_MEMSET_NODE_PARAMS* fill, CUcontext) {
  return add("cuGraphAddMemsetNode", node, graph, after, count, node_memset, [&](WorkFactory& make) {
    if (!fill) return CUDA_ERROR_INVALID_VALUE;
    Work work{Kind::memset};
    const auto result = memset_work(*fill, work);
    make = always(std::move(work));
    return result;
  });
}

CUresult cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                                   CUevent handle) {
  return add("cuGraphAddEventRecordNode", node, graph, after, count, node_event_record, [&](WorkFactory& make) {
    EventPtr event;
    const auto result = find_event(handle, event);
    make = [event] { return std::make_shared<const Work>(record_work(*event)); };
    return result;
  });
}

CUresult cuGraphAddEventWaitNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                                 CUevent handle) {
  return add("cuGraphAddEventWaitNode", node, graph, after, count, node_wait_event, [&](WorkFactory& make) {
    EventPtr event;
    const auto result = find_event(handle, event);
    make = [event] { return std::make_shared<const Work>(wait_work(*event)); };
    return result;
  });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
  return instantiate("cuGraphInstantiateWithFlags", exec, graph, flags);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
  if (!parameters) return CUDA_ERROR_INVALID_VALUE;
  const auto result = instantiate("cuGraphInstantiateWithParams", exec, graph, parameters->flags);
  parameters->error_node = nullptr;
  parameters->result = result == CUDA_SUCCESS ? 0 : 1;
  return result;
}

CUresult cuGraphExecGetFlags(CUgraphExec handle, std::uint64_t* flags) {
  return driver_call("cuGraphExecGetFlags", Needs::healthy, [&](Call&) {
    const auto exec = driver().graph_execs.find(handle);
    if (!exec || !flags) return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream handle) {
  return driver_call("cuGraphUpload", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    if (!driver().graph_execs.find(exec)) return CUDA_ERROR_INVALID_VALUE;
    return resolve_stream(call, handle, stream);
  });
}

// The nodes run one after another in the stream: one of the orders that the graph allows.
CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
  return driver_call("cuGraphLaunch", Needs::healthy, [&](Call& call) {
    StreamPtr stream;
    const auto exec = driver().graph_execs.find(handle);
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    if (const auto result = resolve_stream(call, stream_handle, stream); result != CUDA_SUCCESS) return result;
    if (const auto result = refuse_captured(*stream); result != CUDA_SUCCESS) return result;
    for (const auto& make : exec->works)
      if (const auto result = enqueue(call, stream, make()); result != CUDA_SUCCESS) return result;
    auto& launches = exec->launches;
    launches.erase(std::remove_if(launches.begin(), launches.end(),
                                  [](const auto& launch) { return launch.first->completed >= launch.second; }),
                   launches.end());
    launches.emplace_back(stream, stream->enqueued);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphExecDestroy(CUgraphExec handle) {
  return driver_call("cuGraphExecDestroy", Needs::initialised, [&](Call& call) {
    const auto exec = driver().graph_execs.find(handle);
    if (!exec) return CUDA_ERROR_INVALID_VALUE;
    driver().graph_execs.remove(handle);
    driver().dying_graphs.push_back(exec);
    reap_graphs(call.afterwards);
    return CUDA_SUCCESS;
  });
}

CUresult cuUserObjectCreate(CUuserObject* handle, void* pointer, CUhostFn destroy, unsigned references,
                            unsigned flags) {
  return driver_call("cuUserObjectCreate", Needs::initialised, [&](Call&) {
    constexpr unsigned no_destructor_sync = 1;
    if (!handle || !destroy || references == 0 || flags != no_destructor_sync) return CUDA_ERROR_INVALID_VALUE;
    auto object = std::make_shared<UserObject>();
    object->pointer = pointer;
    object->destroy = destroy;
    object->references = references;
    driver().user_objects.add(object);
    *handle = object->handle;
    return CUDA_SUCCESS;
  });
}

CUresult cuUserObjectRetain(CUuserObject handle, unsigned count) {
  return driver_call("cuUserObjectRetain", Needs::initialised, [&](Call&) {
    const auto object = driver().user_objects.find(handle);
    if (!object) return CUDA_ERROR_INVALID_VALUE;
    object->references += count;
    return CUDA_SUCCESS;
  });
}

CUresult cuUserObjectRelease(CUuserObject handle, unsigned count) {
  return driver_call("cuUserObjectRelease", Needs::initialised, [&](Call& call) {
    const auto object = driver().user_objects.find(handle);
    if (!object) return CUDA_ERROR_INVALID_VALUE;
    drop_references(call.afterwards, object, count);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphRetainUserObject(CUgraph graph_handle, CUuserObject handle, unsigned count, unsigned flags) {
  return driver_call("cuGraphRetainUserObject", Needs::initialised, [&](Call&) {
    const auto graph = driver().graphs.find(graph_handle);
    const auto object = driver().user_objects.find(handle);
    if (!graph || !object || count == 0) return CUDA_ERROR_INVALID_VALUE;
    constexpr unsigned move_from_caller = 1;
    if (!(flags & move_from_caller)) object->references += count;
    graph->objects.emplace_back(object, count);
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphReleaseUserObject(CUgraph graph_handle, CUuserObject handle, unsigned count) {
  return driver_call("cuGraphReleaseUserObject", Needs::initialised, [&](Call& call) {
    const auto graph = driver().graphs.find(graph_handle);
    const auto object = driver().user_objects.find(handle);
    if (!graph || !object) return CUDA_ERROR_INVALID_VALUE;
    const auto held = std::find_if(graph->objects.begin(), graph->objects.end(), [&](const auto& reference) {
      return reference.first == object && reference.second >= count;
    });
    if (held == graph->objects.end()) return CUDA_ERROR_INVALID_VALUE;
    held->second -= count;
    if (held->second == 0) graph->objects.erase(held);
    drop_references(call.afterwards, object, count);
    return CUDA_SUCCESS;
  });
}

}  // namespace emu
