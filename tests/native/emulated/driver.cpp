// A libcuda.so.1 whose only device is the CPU. It "loads" any image and runs the kernels of
// csrc/cuda/kernels.cu, compiled for the CPU. With it the launch code, the Python bindings, the
// kernels and the protocol between processes run without a GPU. It also fails on request.
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

constexpr int kAtOnce = 2;

// What tests set, and read, by name.
struct Settings {
  int capability = 90, version = 13000, threads = 2, tearing = 0, loose = 0, awaited = 1;
  int streams_write = 1;  // whether writes of values work
  // Launches of kernels, early ones among them, and values that streams wrote; contexts pushed but
  // not popped.
  int launches = 0, early = 0, writes = 0, depth = 0;
  // Of the last launch, by the thread that did the most: barriers, releases, ordering atomics.
  int barriers = 0, releases = 0, atomics = 0;
};
Settings now;
#define NAMED(name) {#name, &now.name}
const std::map<std::string, int*> by_name{
    NAMED(capability), NAMED(version),       NAMED(threads),  NAMED(tearing), NAMED(loose),
    NAMED(awaited),    NAMED(streams_write), NAMED(launches), NAMED(early),   NAMED(writes),
    NAMED(depth),      NAMED(barriers),      NAMED(releases), NAMED(atomics)};

std::string failing;
int failing_code = 0;
int code_of(const char* function) { return failing == function ? failing_code : 0; }

// One capture at a time: what is queued on its stream goes into the graph, and runs at each launch.
struct Graph {
  void* stream = nullptr;
  std::vector<std::function<void()>> nodes;
};
std::unique_ptr<Graph> capture;

bool captured(void* stream) { return capture && capture->stream == stream; }

void run_or_capture(void* stream, const std::function<void()>& node) {
  if (captured(stream)) {
    capture->nodes.push_back(node);
  } else {
    node();
  }
}

// A fault of one kernel in this process, planted by `emulated_plant`.
struct Planted {
  std::string kernel, kind;
} planted;

// The same arguments as a kernel with a fault would take them.
template <class T>
T spoilt(T argument) {
  if constexpr (std::is_same_v<T, Space>) {
    if (planted.kind != "stale parity") return argument;
    argument.buffers_at += argument.buffer_stride;
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

// What a fault does besides.
struct Fault {
  explicit Fault(bool here) {
    if (!here) return;
    if (planted.kind == "crash") std::raise(SIGSEGV);
    while (planted.kind == "hang") std::this_thread::sleep_for(std::chrono::seconds(1));
    if (planted.kind.starts_with("missing fence")) emulated::fault = emulated::Fault::kMissingFence;
    if (planted.kind == "lost wake-up") emulated::fault = emulated::Fault::kLostWakeUp;
    if (planted.kind == "torn word") emulated::tearing = emulated::Tearing::kTornWords;
  }
  ~Fault() {
    emulated::fault = emulated::Fault::kNone;
    emulated::tearing = static_cast<emulated::Tearing>(now.tearing);
  }
};

struct Entry {
  // A kernel with copies of its parameters, which a captured graph needs.
  std::function<std::function<void()>(void**)> bind;
  std::string name;
  int threads;  // required of the launch
};

template <class First, class... More>
Entry entry(const char* name, void (*kernel)(First, More...), int threads) {
  const auto bind = [kernel, name](void** parameters) -> std::function<void()> {
    const bool faulty = planted.kernel == name;
    const auto next = [&]<class T>(T*) {
      const T argument = *static_cast<T*>(*parameters++);
      return faulty ? spoilt(argument) : argument;
    };
    const std::tuple given{next(static_cast<First*>(nullptr)),
                           next(static_cast<More*>(nullptr))...};
    return [kernel, given] { std::apply(kernel, given); };
  };
  return {bind, name, threads};
}

#define EMULATED_ENTRY(name, threads, ...) {#name, entry(#name, name, threads)},
std::map<std::string, Entry> entries{TPK_KERNELS(EMULATED_ENTRY)};

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
  ++now.launches;
  emulated::Grid grid{static_cast<int>(blocks), now.threads};
  grid.cluster = static_cast<int>(cluster);
  const bool faulty = entry.name == planted.kernel;
  run_or_capture(stream, [grid, faulty, kernel = entry.bind(parameters)]() mutable {
    const Fault fault(faulty);
    emulated::Counts most;
    grid.most = &most;
    emulated::run(grid, kAtOnce, kernel);
    now.barriers = most.barriers;
    now.releases = most.releases;
    now.atomics = most.atomics;
  });
  return 0;
}

}  // namespace

extern "C" {

// From now on the driver function `function` fails with `code`; "": none does.
void emulated_fail(const char* function, int code) {
  failing = function;
  failing_code = code;
}
// From now on this process has a fault of a kind in one kernel; "" for none.
void emulated_plant(const char* kernel, const char* kind) { planted = {kernel, kind}; }
int emulated_get(const char* name) { return *by_name.at(name); }
int emulated_set(const char* name, int value) {  // returns what was there
  std::swap(*by_name.at(name), value);
  emulated::tearing = static_cast<emulated::Tearing>(now.tearing);
  emulated::loose = now.loose != 0;
  emulated::previous.awaited = now.awaited != 0;
  return value;
}
// What the kernel before an early launch writes.
void emulated_previous(char* results, std::size_t bytes) {
  emulated::previous.to = results;
  emulated::previous.results.resize(bytes);
}

int cuInit(unsigned) { return code_of("cuInit"); }
int cuDriverGetVersion(int* version) {
  *version = now.version;
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
  *value = attribute == 75 ? now.capability / 10 : attribute == 76 ? now.capability % 10 : -1;
  if (attribute == kStreamWrites) *value = now.streams_write;
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
  ++now.depth;
  current = pushed;
  return 0;
}
int cuCtxPopCurrent_v2(void** popped) {
  --now.depth;
  *popped = std::exchange(current, nullptr);
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
  if (flags != 0 || !now.streams_write) return 1;
  run_or_capture(stream, [=] {
    ++now.writes;
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
    if (now.capability < 90) return 1;
    if (attribute.id == kProgrammaticSerialization) {
      early = attribute.value.early == 1;
      continue;
    }
    if (attribute.id != kClusterDimension) return 1;
    if (attribute.value.cluster[1] * attribute.value.cluster[2] != 1) return 1;
    cluster = attribute.value.cluster[0];
  }
  now.early += early;
  const bool hides = early && emulated::previous.to != nullptr;
  std::thread previous = hides ? end_previous_later() : std::thread();
  const int code = launch(function, grid[0], block[0], cluster, parameters, config->stream);
  if (hides) previous.join();
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
