// The CUDA driver functions used by the extension, loaded at run time. The extension therefore
// imports on machines without a driver and reports a missing driver when a GPU is first used. The
// declarations are the stable driver ABI; no CUDA headers and no CUDA runtime are needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "unsupported.h"

namespace tpkernels::cuda {

using Address = std::uint64_t;
using Stream = std::uint64_t;  // a CUstream as an integer; 0 is the default stream
using Handle = void*;          // CUcontext, CUmodule, CUfunction

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  int unused;
  union {
    unsigned cluster[3];  // kClusterDimension: blocks
    int early;            // kProgrammaticSerialization: 1
    std::uint64_t bytes[8];
  } value;
};
constexpr int kClusterDimension = 4, kProgrammaticSerialization = 6;

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// Driver functions: member name, driver symbol, parameters.
// clang-format off
#define TPK_DRIVER(each)                                                                        \
  each(init, cuInit, (unsigned flags))                                                          \
  each(driver_version, cuDriverGetVersion, (int* version))                                      \
  each(error_name, cuGetErrorName, (int code, const char** name))                               \
  each(error_string, cuGetErrorString, (int code, const char** message))                        \
  each(device_count, cuDeviceGetCount, (int* count))                                            \
  each(device, cuDeviceGet, (int* device, int ordinal))                                         \
  each(attribute, cuDeviceGetAttribute, (int* value, int attribute, int device))                \
  each(retain_context, cuDevicePrimaryCtxRetain, (Handle* context, int device))                 \
  each(current_context, cuCtxGetCurrent, (Handle* context))                                     \
  each(push_context, cuCtxPushCurrent_v2, (Handle context))                                     \
  each(pop_context, cuCtxPopCurrent_v2, (Handle* context))                                      \
  each(load_module, cuModuleLoadData, (Handle* module, const void* image))                      \
  each(unload_module, cuModuleUnload, (Handle module))                                          \
  each(function, cuModuleGetFunction, (Handle* function, Handle module, const char* name))      \
  each(launch, cuLaunchKernelEx,                                                                \
       (const LaunchConfig* config, Handle function, void** parameters, void** extra))          \
  each(copy_async, cuMemcpyAsync, (Address dst, Address src, std::size_t bytes, Handle stream)) \
  each(write_value, cuStreamWriteValue64_v2,                                                    \
       (Handle stream, Address address, std::uint64_t value, unsigned flags))
// clang-format on

struct Driver {
#define TPK_DECLARE(name, symbol, parameters) int(*name) parameters;
  TPK_DRIVER(TPK_DECLARE)
#undef TPK_DECLARE

  // Throws std::runtime_error with the call name and the driver message unless `code` is 0.
  void check(int code, const char* call) const;
};

// Loads and initialises the driver at the first call. Throws Unsupported.
const Driver& driver();

int driver_version();
int device_count();

// Returns 10 * major + minor.
int compute_capability(int device);

constexpr int kStreamWrites = 122;  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS

// Returns an attribute of a device handle from `Driver::device`.
int device_attribute(int handle, int attribute);

// Makes the primary context of a device (shared with torch) current for the lifetime of the guard.
class ContextGuard {
 public:
  explicit ContextGuard(Handle context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace tpkernels::cuda
