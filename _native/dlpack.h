// What DLPack 1.3 lays down, as far as it is needed: what a capsule of __dlpack__() holds, and, for a type's
// __dlpack_c_exchange_api__, the address of a table, by which one call of a C function tells where a tensor lies.
#pragma once
#include <cstdint>

namespace aiocuda::dlpack {

constexpr const char* kCapsule = "dlpack_exchange_api";
// Of what is lent, and what who takes it makes of the name.
constexpr const char* kLent = "dltensor";
constexpr const char* kTaken = "used_dltensor";
constexpr const char* kLentVersioned = "dltensor_versioned";
constexpr const char* kTakenVersioned = "used_dltensor_versioned";
constexpr uint32_t kMajor = 1;

constexpr int32_t kCpu = 1;
constexpr int32_t kCuda = 2;
constexpr int32_t kCudaHost = 3;
constexpr uint8_t kComplex = 5;

struct Tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t dimensions;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; none: contiguous
  uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);  // may be absent
};

// Of another major version nothing but the deleter may be used.
struct ManagedVersioned {
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};
constexpr uint64_t kReadOnly = 1;

struct Exchange {
  uint32_t major;
  uint32_t minor;
  Exchange* previous;
  void* allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  // 0, or -1 with a Python exception set. May be absent. The tensor is valid until control returns to Python.
  int (*tensor_from_object)(void* object, Tensor* out);
  void* current_work_stream;
};

// No memory is larger, and no product of two such numbers is looked at that would not fit.
constexpr int64_t kMostNbytes = int64_t{1} << 47;

// The bytes of a contiguous tensor of whole bytes; -1 for all else.
inline int64_t contiguous_nbytes(const Tensor& tensor) {
  if (tensor.type_lanes != 1 || tensor.type_bits % 8 != 0) return -1;
  int64_t count = 1;
  for (int32_t axis = tensor.dimensions; axis-- > 0;) {
    const int64_t length = tensor.shape[axis];
    if (length < 0 || (length != 0 && count > kMostNbytes / length)) return -1;
    if (tensor.strides != nullptr && length != 1 && tensor.strides[axis] != count) return -1;
    count *= length;
  }
  return count * (tensor.type_bits / 8);
}

}  // namespace aiocuda::dlpack
