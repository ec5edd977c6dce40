// A libcuda.so.1 with the CPU as its only device.
// It accepts any image and runs the kernels of csrc/cuda/kernels.cu, compiled for the CPU. The
// launch code, the Python bindings, the kernels and the protocol between processes thus run without
// a GPU. Driver functions can fail on request.
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "../../../csrc/cuda/kernels.cu"
#include "cuda/kernels.h"

namespace {

constexpr int kMaxBlocks = 2;

// Settings and counters. Tests access them by name.
struct Settings {
  int capability = 90, version = 13000, threads = 2, tearing = 0, loose = 0, awaited = 1;
  int streams_write = 1;  // whether stream writes of values are supported
  // Counters: kernel launches, early launches, values written by streams, and the depth of the
  // context stack.
  int launches = 0, early = 0, writes = 0, depth = 0;
  // Counters of the last launch, maximum over its threads: barriers, releases, ordering atomics.
  int barriers = 0, releases = 0, atomics = 0;
};
Settings settings;
#define NAMED(name) {#name, &settings.name}
const std::map<std::string, int*> settings_by_name{
    NAMED(capability), NAMED(version),       NAMED(threads),  NAMED(tearing), NAMED(loose),
    NAMED(awaited),    NAMED(streams_write), NAMED(launches), NAMED(early),   NAMED(writes),
    NAMED(depth),      NAMED(barriers),      NAMED(releases), NAMED(atomics)};

std::string failing_function;
int failing_code = 0;
int failure_code(const char* function) { return failing_function == function ? failing_code : 0; }

// Only one capture can be active. Work queued on its stream is added to the graph and runs at each
// launch of the graph.
struct Graph {
  void* stream = nullptr;
  std::vector<std::function<void()>> nodes;
};
std::unique_ptr<Graph> capture;

bool is_captured(void* stream) { return capture && capture->stream == stream; }

void run_or_capture(void* stream, const std::function<void()>& node) {
  if (is_captured(stream)) {
    capture->nodes.push_back(node);
  } else {
    node();
  }
}

// The fault of one kernel in this process, set by `emulated_plant`.
struct PlantedFault {
  std::string kernel, kind;
} planted;

// Returns the argument as changed by the planted fault.
template <class T>
T corrupt(T argument) {
  if constexpr (std::is_same_v<T, Workspace>) {
    if (planted.kind != "stale parity") return argument;
    argument.buffers_offset += argument.buffer_stride;
    argument.buffer_stride = -argument.buffer_stride;
  }
  if constexpr (std::is_same_v<T, AllReduce> || std::is_same_v<T, Shards>) {
    if (planted.kind == "wrong peer offset") argument.slot_bytes += 256;
    if (planted.kind == "off-by-one rows") {
      argument.x = static_cast<const char*>(argument.x) + 16;
    }
  }
  return argument;
}

// Effects of the planted fault during a launch.
struct Fault {
  explicit Fault(bool applies) {
    if (!applies) return;
    if (planted.kind == "crash") std::raise(SIGSEGV);
    while (planted.kind == "hang") std::this_thread::sleep_for(std::chrono::seconds(1));
    if (planted.kind.starts_with("missing fence")) emulated::fault = emulated::Fault::kMissingFence;
    if (planted.kind == "lost wake-up") emulated::fault = emulated::Fault::kLostWakeUp;
    if (planted.kind == "torn word") emulated::tearing = emulated::Tearing::kTornWords;
  }
  ~Fault() {
    emulated::fault = emulated::Fault::kNone;
    emulated::tearing = static_cast<emulated::Tearing>(settings.tearing);
  }
};

struct Entry {
  // Returns a call with copies of the kernel parameters, as a captured graph needs them.
  std::function<std::function<void()>(void**)> bind;
  std::string name;
  int threads;  // required threads per block
};

template <class First, class... More>
Entry entry(const char* name, void (*kernel)(First, More...), int threads) {
  const auto bind = [kernel, name](void** parameters) -> std::function<void()> {
    const bool faulty = planted.kernel == name;
    const auto next = [&]<class T>(T*) {
      const T argument = *static_cast<T*>(*parameters++);
      return faulty ? corrupt(argument) : argument;
    };
    const std::tuple arguments{next(static_cast<First*>(nullptr)),
                               next(static_cast<More*>(nullptr))...};
    return [kernel, arguments] { std::apply(kernel, arguments); };
  };
  return {bind, name, threads};
}

#define EMULATED_ENTRY(name, threads, ...) {#name, entry(#name, name, threads)},
std::map<std::string, Entry> entries{TPK_KERNELS(EMULATED_ENTRY)};

void* current = nullptr;
char context, module_handle;

// Hides the results of the previous kernel and restores them after a delay.
std::thread hide_previous_results() {
  emulated::Previous& previous = emulated::previous;
  std::memcpy(previous.results.data(), previous.dst, previous.results.size());
  std::memset(previous.dst, 0xff, previous.results.size());
  previous.ended = false;
  return std::thread([&previous] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::memcpy(previous.dst, previous.results.data(), previous.results.size());
    previous.ended = true;
  });
}

int launch(void* function, unsigned blocks, unsigned threads, unsigned cluster, void** parameters,
           void* stream) {
  const Entry& entry = *static_cast<Entry*>(function);
  const bool invalid = static_cast<int>(threads) != entry.threads || blocks == 0 || cluster == 0 ||
                       blocks % cluster != 0 || current != &context;
  if (invalid) return 1;
  if (const int code = failure_code("cuLaunchKernelEx"); code != 0) return code;
  ++settings.launches;
  emulated::Grid grid{static_cast<int>(blocks), settings.threads};
  grid.cluster = static_cast<int>(cluster);
  const bool faulty = entry.name == planted.kernel;
  run_or_capture(stream, [grid, faulty, kernel = entry.bind(parameters)]() mutable {
    const Fault fault(faulty);
    emulated::Counts max_counts;
    grid.max_counts = &max_counts;
    emulated::run(grid, kMaxBlocks, kernel);
    settings.barriers = max_counts.barriers;
    settings.releases = max_counts.releases;
    settings.atomics = max_counts.atomics;
  });
  return 0;
}

}  // namespace

extern "C" {

// Makes `function` return `code` from now on. "": no function fails.
void emulated_fail(const char* function, int code) {
  failing_function = function;
  failing_code = code;
}
// Plants a fault of a kind in one kernel of this process. "": no fault.
void emulated_plant(const char* kernel, const char* kind) { planted = {kernel, kind}; }
int emulated_get(const char* name) { return *settings_by_name.at(name); }
int emulated_set(const char* name, int value) {  // returns the previous value
  std::swap(*settings_by_name.at(name), value);
  emulated::tearing = static_cast<emulated::Tearing>(settings.tearing);
  emulated::loose = settings.loose != 0;
  emulated::previous.awaited = settings.awaited != 0;
  return value;
}
// Sets the result memory of the kernel that precedes an early launch.
void emulated_previous(char* results, std::size_t bytes) {
  emulated::previous.dst = results;
  emulated::previous.results.resize(bytes);
}

int cuInit(unsigned) { return failure_code("cuInit"); }
int cuDriverGetVersion(int* version) {
  *version = settings.version;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_EMULATED";
  return 0;
}
int cuGetErrorString(int code, const char** message) {
  *message =
      code == 209 ? "no kernel image is available for execution on the device" : "on request";
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
  *value = attribute == 75   ? settings.capability / 10
           : attribute == 76 ? settings.capability % 10
                             : -1;
  if (attribute == kStreamWrites) *value = settings.streams_write;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** result, int) {
  *result = &context;
  return 0;
}
int cuCtxGetCurrent(void** result) {
  *result = current;
  return 0;
}
int cuCtxPushCurrent_v2(void* pushed) {
  ++settings.depth;
  current = pushed;
  return 0;
}
int cuCtxPopCurrent_v2(void** popped) {
  --settings.depth;
  *popped = std::exchange(current, nullptr);
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  *module = &module_handle;
  return image == nullptr ? 1 : failure_code("cuModuleLoadData");
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  const auto entry = entries.find(name);
  if (entry == entries.end()) return 500;
  *function = &entry->second;
  return 0;
}
int cuMemcpyAsync(std::uint64_t dst, std::uint64_t src, std::size_t bytes, void* stream) {
  run_or_capture(stream, [=] {
    std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
  });
  return failure_code("cuMemcpyAsync");
}
int cuStreamWriteValue64_v2(void* stream, std::uint64_t dst, std::uint64_t value, unsigned flags) {
  if (const int code = failure_code("cuStreamWriteValue64"); code != 0) return code;
  if (flags != 0 || !settings.streams_write) return 1;
  run_or_capture(stream, [=] {
    ++settings.writes;
    __atomic_store_n(reinterpret_cast<std::uint64_t*>(dst), value, __ATOMIC_RELEASE);
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
    if (settings.capability < 90) return 1;
    if (attribute.id == kProgrammaticSerialization) {
      early = attribute.value.early == 1;
      continue;
    }
    if (attribute.id != kClusterDimension) return 1;
    if (attribute.value.cluster[1] * attribute.value.cluster[2] != 1) return 1;
    cluster = attribute.value.cluster[0];
  }
  settings.early += early;
  const bool hides_previous = early && emulated::previous.dst != nullptr;
  std::thread previous = hides_previous ? hide_previous_results() : std::thread();
  const int code = launch(function, grid[0], block[0], cluster, parameters, config->stream);
  if (hides_previous) previous.join();
  return code;
}

int cuStreamBeginCapture_v2(void* stream, int) {
  capture = std::make_unique<Graph>();
  capture->stream = stream;
  return 0;
}
int cuStreamEndCapture(void*, Graph** graph) {
  const std::unique_ptr<Graph> ended = std::move(capture);
  *graph = new Graph(*ended);
  return 0;
}
int cuGraphInstantiateWithFlags(Graph** executable, const Graph* graph, std::uint64_t) {
  *executable = new Graph(*graph);
  return 0;
}
int cuGraphLaunch(const Graph* executable, void*) {
  for (const auto& node : executable->nodes) node();
  return 0;
}
int cuGraphDestroy(Graph* graph) {
  delete graph;
  return 0;
}
int cuGraphExecDestroy(Graph* executable) { return cuGraphDestroy(executable); }

}  // extern "C"
