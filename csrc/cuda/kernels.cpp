#include "cuda/kernels.h"

#include <string_view>

namespace tpkernels::cuda {
namespace {

// Kernels with bulk copies need sm_90 (TPK_SM_90 in cuda/kernels.cu).
constexpr int kBulkCapability = 90;
bool needs_bulk_copies(std::string_view name) { return name.find("bulk") != name.npos; }

// Requirements of early launches. Graphs can capture them since CUDA 12.3.
constexpr int kEarlyLaunchCapability = 90, kEarlyLaunchDriver = 12030;

constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

Handle stream_handle(Stream stream) { return reinterpret_cast<Handle>(stream); }

}  // namespace

Kernels::Kernels(int device, const void* image) {
  const Driver& d = driver();
  const int capability = compute_capability(device);
  int handle = 0;
  d.check(d.device(&handle, device), "cuDeviceGet");
  d.check(d.retain_context(&context_, handle), "cuDevicePrimaryCtxRetain");
  const ContextGuard guard(context_);
  if (const int code = d.load_module(&module_, image); code != 0) {
    const char* message = nullptr;
    d.error_string(code, &message);
    throw Unsupported("cannot load the CUDA kernels on GPU " + std::to_string(device) + " (sm_" +
                      std::to_string(capability) +
                      "): " + (message != nullptr ? message : "no reason given"));
  }
  streams_write_ = device_attribute(handle, kStreamWrites) != 0;
  launches_early_ = capability >= kEarlyLaunchCapability && driver_version() >= kEarlyLaunchDriver;
#define TPK_ENTRY(name, threads, ...) {#name, threads, nullptr},
  kernels_ = {TPK_KERNELS(TPK_ENTRY)};
#undef TPK_ENTRY
  // Load all functions now: loading one at its first launch would invalidate a stream capture.
  for (Kernel& kernel : kernels_) {
    if (needs_bulk_copies(kernel.name) && capability < kBulkCapability) continue;
    d.check(d.function(&kernel.function, module_, kernel.name), kernel.name);
  }
}

// The primary context stays retained, because torch tensors live in it.
Kernels::~Kernels() {
  try {
    const ContextGuard guard(context_);
    driver().unload_module(module_);
  } catch (const std::exception&) {  // the driver may be gone before the process exits
  }
}

void Kernels::launch_with(const char* name, Stream stream, Shape shape, void** parameters) {
  const Kernel* kernel = kernels_.data();
  while (kernel->name != std::string_view(name)) ++kernel;
  if (kernel->function == nullptr) {
    throw Unsupported(std::string(name) + " needs a GPU of compute capability 9.0 or higher");
  }
  LaunchAttribute attributes[2] = {};
  LaunchConfig config{};
  if (shape.cluster > 1) {
    LaunchAttribute& cluster = attributes[config.attribute_count++];
    cluster.id = kClusterDimension;
    cluster.value.cluster[0] = shape.cluster;
    cluster.value.cluster[1] = cluster.value.cluster[2] = 1;
  }
  if (shape.early && launches_early_) {
    LaunchAttribute& early = attributes[config.attribute_count++];
    early.id = kProgrammaticSerialization;
    early.value.early = 1;
  }
  config.grid[0] = shape.blocks;
  config.block[0] = kernel->threads;
  config.grid[1] = config.grid[2] = config.block[1] = config.block[2] = 1;
  config.stream = stream_handle(stream);
  config.attributes = attributes;
  const Driver& d = driver();
  const ContextGuard guard(context_);
  d.check(d.launch(&config, kernel->function, parameters, nullptr), "cuLaunchKernelEx");
}

void Kernels::copy(Stream stream, Address dst, Address src, std::size_t bytes) const {
  if (bytes == 0) return;
  const ContextGuard guard(context_);
  driver().check(driver().copy_async(dst, src, bytes, stream_handle(stream)), "cuMemcpyAsync");
}

void Kernels::set_flag(Stream stream, const Workspace& workspace, int index, bool captured) {
  if (captured || !streams_write_) return launch("call_flag", stream, {}, workspace, index);
  const ContextGuard guard(context_);
  const auto address = reinterpret_cast<Address>(workspace.state + kStateFlags + index);
  const int code = driver().write_value(stream_handle(stream), address, kFlagSet, 0);
  if (code != kNotSupported) return driver().check(code, "cuStreamWriteValue64");
  streams_write_ = false;
  launch("call_flag", stream, {}, workspace, index);
}

}  // namespace tpkernels::cuda
