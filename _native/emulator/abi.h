// The slice of the driver's binary interface that is emulated: own declarations, so that no CUDA toolkit is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu {

enum CUresult : int {
#define RESULT(name, value) name = value,
#include "results.inc"
#undef RESULT
};

using CUdevice = int;
using CUdeviceptr = std::uint64_t;
using CUcontext = struct ContextHandle*;
using CUstream = struct StreamHandle*;
using CUevent = struct EventHandle*;
using CUmemoryPool = struct PoolHandle*;
using CUmodule = struct ModuleHandle*;
using CUfunction = struct FunctionHandle*;
using CUgraph = struct GraphHandle*;
using CUgraphNode = struct NodeHandle*;
using CUgraphExec = struct GraphExecHandle*;
using CUuserObject = struct UserObjectHandle*;
using CUgreenCtx = struct GreenContextHandle*;
using CUarray = struct ArrayHandle*;
using CUhostFn = void (*)(void*);

// The handles that name default streams without having been created.
constexpr std::uintptr_t legacy_stream_handle = 1;
constexpr std::uintptr_t per_thread_stream_handle = 2;

constexpr unsigned stream_non_blocking = 1;
constexpr unsigned event_disable_timing = 2;
constexpr unsigned event_record_external = 1;
constexpr unsigned event_wait_external = 1;

enum CUstreamCaptureStatus : int { capture_none = 0, capture_active = 1, capture_invalidated = 2 };
enum CUstreamCaptureMode : int { capture_global = 0, capture_thread_local = 1, capture_relaxed = 2 };

enum CUdriverProcAddressQueryResult : int { symbol_found = 0, symbol_not_found = 1, symbol_version_insufficient = 2 };
constexpr std::uint64_t proc_address_legacy_stream = 1;
constexpr std::uint64_t proc_address_per_thread_stream = 2;

enum CUmemorytype : int { memory_host = 1, memory_device = 2, memory_array = 3, memory_unified = 4 };

enum CUmemLocationType : int {
  location_none = 0,
  location_device = 1,
  location_host = 2,
  location_host_numa = 3,
  location_host_numa_current = 4,
};

struct CUmemLocation {
  CUmemLocationType type;
  int id;
};

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
constexpr int access_none = 0;
constexpr int access_read_write = 3;

enum CUmemAllocationType : int { allocation_pinned = 1, allocation_managed = 2 };

struct CUmemPoolProps {
  CUmemAllocationType type;
  int handle_types;
  CUmemLocation location;
  void* security_attributes;
  std::size_t max_size;
  unsigned short usage;
  unsigned char reserved[54];
};
static_assert(sizeof(CUmemPoolProps) == 88);

struct CUmemcpyAttributes {
  int source_access_order;
  CUmemLocation source_hint;
  CUmemLocation destination_hint;
  unsigned flags;
};
static_assert(sizeof(CUmemcpyAttributes) == 24);

struct CopyOperand2D {
  std::size_t x, y;
  CUmemorytype type;
  void* host;
  CUdeviceptr device;
  CUarray array;
  std::size_t pitch;
};

struct CUDA_MEMCPY2D {
  CopyOperand2D source, destination;
  std::size_t width, height;
};
static_assert(sizeof(CUDA_MEMCPY2D) == 128);

struct CopyOperand3D {
  std::size_t x, y, z, lod;
  CUmemorytype type;
  void* host;
  CUdeviceptr device;
  CUarray array;
  void* reserved;
  std::size_t pitch, height;
};

struct CUDA_MEMCPY3D {
  CopyOperand3D source, destination;
  std::size_t width, height, depth;
};
static_assert(sizeof(CUDA_MEMCPY3D) == 200);

struct CUDA_MEMSET_NODE_PARAMS {
  CUdeviceptr destination;
  std::size_t pitch;
  unsigned value, element_size;
  std::size_t width, height;
};

struct CUDA_HOST_NODE_PARAMS {
  CUhostFn function;
  void* argument;
};

struct CUgraphEdgeData {
  unsigned char from_port, to_port, type, reserved[5];
};

struct CUDA_GRAPH_INSTANTIATE_PARAMS {
  std::uint64_t flags;
  CUstream upload_stream;
  CUgraphNode error_node;
  int result;
};

enum CUgraphNodeType : int {
  node_kernel = 0,
  node_memcpy = 1,
  node_memset = 2,
  node_host = 3,
  node_graph = 4,
  node_empty = 5,
  node_wait_event = 6,
  node_event_record = 7,
  node_batch_mem_op = 12,
};

struct CUuuid {
  unsigned char bytes[16];
};

}  // namespace emu
