// The few functions of the CUDA driver that are needed, loaded at run time. So the extension
// imports on machines without a driver, and reports what is missing when a GPU is first used. There
// is no CUDA header and no CUDA runtime: the declarations here are the driver's stable ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tpkernels::cuda {

// A valid request that this machine does not support. The text says what is missing.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

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

struct Driver {
  int (*init)(unsigned flags);
  int (*driver_version)(int* version);
  int (*error_name)(int code, const char** name);
  int (*error_string)(int code, const char** text);
  int (*device_count)(int* count);
  int (*device)(int* device, int ordinal);
  int (*attribute)(int* value, int attribute, int device);
  int (*retain_context)(Handle* context, int device);
  int (*current_context)(Handle* context);
  int (*push_context)(Handle context);
  int (*pop_context)(Handle* context);
  int (*load_module)(Handle* module, const void* image);
  int (*unload_module)(Handle module);
  int (*function)(Handle* function, Handle module, const char* name);
  int (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                Handle stream, void** parameters, void** extra);
  int (*launch_with)(const LaunchConfig* config, Handle function, void** parameters, void** extra);
  int (*copy_async)(Address dst, Address src, std::size_t bytes, Handle stream);
  int (*write_value)(Handle stream, Address to, std::uint64_t value, unsigned flags);
  int (*create_stream)(Handle* stream, unsigned flags);
  int (*destroy_stream)(Handle stream);
  int (*exchange_capture_mode)(int* mode);
  int (*begin_capture)(Handle stream, int mode);
  int (*end_capture)(Handle stream, Handle* graph);
  int (*instantiate)(Handle* executable, Handle graph, std::uint64_t flags);
  int (*destroy_executable)(Handle executable);
  int (*destroy_graph)(Handle graph);

  // Unless `code` is 0, throws std::runtime_error with the name of the call and the driver's text.
  void check(int code, const char* call) const;
};

// Loads and initialises the driver once. Throws Unsupported.
const Driver& driver();

int driver_version();
int device_count();

// 10 * major + minor.
int compute_capability(int device);

constexpr int kStreamWrites = 122;  // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS

// An attribute of a device that `Driver::device` returned.
int device_attribute(int handle, int attribute);

// Makes a device's primary context, which torch uses too, current for the guard's lifetime.
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
