// What DLPack 1.3 lays down for a type's __dlpack_c_exchange_api__, as far as it is needed: where a tensor lies, told by
// one call of a C function. A capsule of this name holds the address of the table.
#pragma once
#include <cstdint>

namespace aiocuda::dlpack {

constexpr const char* kCapsule = "dlpack_exchange_api";
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

// The bytes of a contiguous tensor of whole bytes; -1 for all else.
inline int64_t contiguous_nbytes(const Tensor& tensor) {
  if (tensor.type_lanes != 1 || tensor.type_bits % 8 != 0) return -1;
  int64_t count = 1;
  for (int32_t axis = tensor.dimensions; axis-- > 0;) {
    const int64_t length = tensor.shape[axis];
    if (tensor.strides != nullptr && length != 1 && tensor.strides[axis] != count) return -1;
    count *= length;
  }
  return count * (tensor.type_bits / 8);
}

}  // namespace aiocuda::dlpack
