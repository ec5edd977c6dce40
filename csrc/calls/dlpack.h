// Subset of the DLPack C exchange API. It gives an extension the address, shape and strides of a
// tensor without creating Python objects. torch 2.10 and later provide it as
// `torch.Tensor.__dlpack_c_exchange_api__`. Layouts: https://dmlc.github.io/dlpack (version 1.3).
// tests/calls/test_dlpack.py compares them with the header that torch ships.
#pragma once

#include <cstdint>

namespace tpkernels::calls::dlpack {

constexpr std::uint32_t kMajorVersion = 1;  // the ABI may change with the major version
constexpr int kCpu = 1;                     // value of Device::type
constexpr std::uint8_t kInt = 0;            // values of DataType::code
constexpr std::uint8_t kFloat = 2;
constexpr std::uint8_t kBFloat = 4;

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

// The `void*` members are function pointers that this package does not call.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* owned_from_python;
  void* owned_to_python;
  int (*tensor_from_python)(void* object, Tensor* out);  // borrows; -1 with a Python error set
  void* current_stream;
};

}  // namespace tpkernels::calls::dlpack
