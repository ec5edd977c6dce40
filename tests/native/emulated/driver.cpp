// A libcuda.so.1 whose only device is the CPU. It "loads" any image and runs the kernels of
// csrc/cuda/kernels.cu, compiled for the CPU. With it the launch code, the Python bindings, the
// kernels and the protocol between processes run without a GPU. It also fails on request.
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "../../../csrc/cuda/kernels.cu"
#include "cuda/kernels.h"
#include "graphs.h"

namespace {

constexpr int kAtOnce = 2;

template <class T>
const T& given(void** parameters, int at) {
  return *static_cast<const T*>(parameters[at]);
}

// A kernel with copies of its parameters, which a captured graph needs.
using Bound = std::function<void()>;

template <class T>
std::function<Bound(void**)> with(void (*kernel)(T)) {
  return [kernel](void** p) -> Bound { return [=, a = given<T>(p, 0)] { kernel(a); }; };
}

template <class T, class U>
std::function<Bound(void**)> with(void (*kernel)(T, U)) {
  return [kernel](void** p) -> Bound {
    return [=, a = given<T>(p, 0), b = given<U>(p, 1)] { kernel(a, b); };
  };
}

template <class T, class U, class V>
std::function<Bound(void**)> with(void (*kernel)(T, U, V)) {
  return [kernel](void** p) -> Bound {
    return [=, a = given<T>(p, 0), b = given<U>(p, 1), c = given<V>(p, 2)] { kernel(a, b, c); };
  };
}

struct Entry {
  std::function<Bound(void**)> bind;
  bool has_space;
  int threads;  // required of the launch
};

template <class First, class...>
constexpr bool has_space() {
  return std::is_same_v<First, Space>;
}

#define EMULATED_ENTRY(name, threads, ...) {#name, {with(name), has_space<__VA_ARGS__>(), threads}},
std::map<std::string, Entry> entries{TPK_KERNELS(EMULATED_ENTRY)};

int capability = 90, pushes = 0, threads_of_block = 2;
int early_launches = 0, version_of_driver = 13000;
int launches = 0, writes = 0;  // kernels, and values that streams wrote
bool streams_write = true;
emulated::Counts most;
void* current = nullptr;
char context, module_handle;

// Takes the results of the previous kernel away, and brings them back a while later.
std::thread end_previous_later() {
  emulated::Previous& previous = emulated::previous;
  std::memcpy(previous.results.data(), previous.to, previous.results.size());
  std::memset(previous.to, 0xff, previous.results.size());
  previous.ended = false;
  return std::thread([&previous] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::memcpy(previous.to, previous.results.data(), previous.results.size());
    previous.ended = true;
  });
}

int launch(void* function, unsigned blocks, unsigned threads, unsigned cluster, void** parameters,
           void* stream) {
  const Entry& entry = *static_cast<Entry*>(function);
  const bool invalid = static_cast<int>(threads) != entry.threads || blocks == 0 || cluster == 0 ||
                       blocks % cluster != 0 || current != &context;
  if (invalid) return 1;
  if (const int code = code_of("cuLaunchKernelEx"); code != 0) return code;
  ++launches;
  emulated::Grid grid{static_cast<int>(blocks), threads_of_block};
  grid.most = &most;
  grid.cluster = static_cast<int>(cluster);
  if (entry.has_space) {
    const auto& space = given<Space>(parameters, 0);
    grid.world = space.world;
    grid.regions = space.regions;
  }
  run_or_capture(stream, [grid, kernel = entry.bind(parameters)] {
    most = {};
    emulated::run(grid, kAtOnce, kernel);
  });
  return 0;
}

}  // namespace

extern "C" {

void emulated_capability(int value) { capability = value; }
int emulated_depth() { return pushes; }  // contexts pushed but not popped
void emulated_tear(int how) { emulated::tearing = static_cast<emulated::Tearing>(how); }
// What the kernel before an early launch writes; `awaited` false: the early one does not wait.
void emulated_previous(char* results, std::size_t bytes, bool awaited) {
  emulated::previous.to = results;
  emulated::previous.results.resize(bytes);
  emulated::previous.awaited = awaited;
}
int emulated_launches() { return launches; }
int emulated_writes() { return writes; }
void emulated_streams_write(bool can) { streams_write = can; }
int emulated_early_launches() { return early_launches; }
void emulated_driver_version(int version) { version_of_driver = version; }
void emulated_loose(bool loose) { emulated::loose = loose; }
void emulated_threads(int number) { threads_of_block = number; }
// What the thread that did the most did in the last launch: barriers, releases, atomics.
void emulated_counts(int* counts) {
  counts[0] = most.barriers;
  counts[1] = most.releases;
  counts[2] = most.atomics;
}

int cuInit(unsigned) { return code_of("cuInit"); }
int cuDriverGetVersion(int* version) {
  *version = version_of_driver;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_EMULATED";
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 209 ? "no kernel image is available for execution on the device" : "on request";
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : -1;
  if (attribute == kStreamWrites) *value = streams_write;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** made, int) {
  *made = &context;
  return 0;
}
int cuCtxGetCurrent(void** found) {
  *found = current;
  return 0;
}
int cuCtxPushCurrent_v2(void* pushed) {
  ++pushes;
  current = pushed;
  return 0;
}
int cuCtxPopCurrent_v2(void** popped) {
  --pushes;
  *popped = current;
  current = nullptr;
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  *module = &module_handle;
  return image == nullptr ? 1 : code_of("cuModuleLoadData");
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  const auto found = entries.find(name);
  if (found == entries.end()) return 500;
  *function = &found->second;
  return 0;
}
int cuMemcpyAsync(std::uint64_t dst, std::uint64_t src, std::size_t bytes, void* stream) {
  run_or_capture(stream, [=] {
    std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
  });
  return code_of("cuMemcpyAsync");
}
int cuStreamWriteValue64_v2(void* stream, std::uint64_t to, std::uint64_t value, unsigned flags) {
  if (const int code = code_of("cuStreamWriteValue64"); code != 0) return code;
  if (flags != 0 || !streams_write) return 1;
  if (spoils_capture(stream)) return 900;
  run_or_capture(stream, [=] {
    ++writes;
    __atomic_store_n(reinterpret_cast<std::uint64_t*>(to), value, __ATOMIC_RELEASE);
  });
  return 0;
}
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void**) {
  const unsigned *grid = config->grid, *block = config->block;
  if (grid[1] * grid[2] * block[1] * block[2] != 1) return 1;
  unsigned cluster = 1;
  bool early = false;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (capability < 90) return 1;
    if (attribute.id == kProgrammaticSerialization) {
      early = attribute.value.early == 1;
      continue;
    }
    if (attribute.id != kClusterDimension) return 1;
    if (attribute.value.cluster[1] * attribute.value.cluster[2] != 1) return 1;
    cluster = attribute.value.cluster[0];
  }
  early_launches += early;
  const bool hides = early && emulated::previous.to != nullptr;
  std::thread previous = hides ? end_previous_later() : std::thread();
  const int code = launch(function, grid[0], block[0], cluster, parameters, config->stream);
  if (hides) previous.join();
  return code;
}

}  // extern "C"
