#pragma once

#include "abi.h"

namespace emu {

CUresult cuGraphCreate(CUgraph* graph, unsigned flags);
CUresult cuGraphDestroy(CUgraph graph);
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, std::size_t* count);
CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode* nodes, std::size_t* count);
CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* edges,
                         std::size_t* count);
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type);
CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode* dependencies, CUgraphEdgeData* edges,
                                    std::size_t* count);
CUresult cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS* parameters);
CUresult cuGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count);
CUresult cuGraphAddHostNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                            const CUDA_HOST_NODE_PARAMS* parameters);
CUresult cuGraphAddMemcpyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                              const CUDA_MEMCPY3D* copy, CUcontext context);
CUresult cuGraphAddMemsetNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                              const CUDA_MEMSET_NODE_PARAMS* fill, CUcontext context);
CUresult cuGraphAddEventRecordNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                                   CUevent event);
CUresult cuGraphAddEventWaitNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, std::size_t count,
                                 CUevent event);
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphInstantiateWithParams(CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* parameters);
CUresult cuGraphExecGetFlags(CUgraphExec exec, std::uint64_t* flags);
CUresult cuGraphUpload(CUgraphExec exec, CUstream stream);
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream);
CUresult cuGraphExecDestroy(CUgraphExec exec);
CUresult cuUserObjectCreate(CUuserObject* object, void* pointer, CUhostFn destroy, unsigned references,
                            unsigned flags);
CUresult cuUserObjectRetain(CUuserObject object, unsigned count);
CUresult cuUserObjectRelease(CUuserObject object, unsigned count);
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags);
CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count);

}  // namespace emu
