#include "cuda/driver.h"

#include <dlfcn.h>

namespace tpkernels::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
// CUdevice_attribute: compute capability, major and minor.
constexpr int kMajor = 75, kMinor = 76;

template <class Function>
void load_symbol(void* library, const char* name, Function& function) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) {
    throw Unsupported(std::string(kLibrary) + " does not provide " + name +
                      ": the NVIDIA driver is too old; install one for CUDA 12 or newer");
  }
  function = reinterpret_cast<Function>(symbol);
}

Driver load() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Unsupported(std::string("no NVIDIA driver on this machine: ") + dlerror());
  }
  Driver d;
#define TPK_FIND(name, symbol, parameters) load_symbol(library, #symbol, d.name);
  TPK_DRIVER(TPK_FIND)
#undef TPK_FIND
  if (const int code = d.init(0); code != 0) {
    const char* message = nullptr;
    d.error_string(code, &message);
    throw Unsupported(std::string("the NVIDIA driver found no usable GPU: cuInit: ") +
                      (message != nullptr ? message : "error " + std::to_string(code)));
  }
  return d;
}

}  // namespace

void Driver::check(int code, const char* call) const {
  if (code == 0) return;
  const char *name = nullptr, *message = nullptr;
  error_name(code, &name);
  error_string(code, &message);
  throw std::runtime_error(std::string(call) + ": " +
                           (name != nullptr ? name : "error " + std::to_string(code)) +
                           (message != nullptr ? std::string(" (") + message + ")" : ""));
}

const Driver& driver() {
  static const Driver loaded = load();  // if load() throws, the next call tries again
  return loaded;
}

int driver_version() {
  int version = 0;
  driver().check(driver().driver_version(&version), "cuDriverGetVersion");
  return version;
}

int device_count() {
  int count = 0;
  driver().check(driver().device_count(&count), "cuDeviceGetCount");
  return count;
}

int compute_capability(int device) {
  const Driver& d = driver();
  const int count = device_count();
  if (device < 0 || device >= count) {
    throw Unsupported("GPU " + std::to_string(device) +
                      " does not exist; the driver reports a GPU count of " +
                      std::to_string(count));
  }
  int handle = 0;
  d.check(d.device(&handle, device), "cuDeviceGet");
  return 10 * device_attribute(handle, kMajor) + device_attribute(handle, kMinor);
}

int device_attribute(int handle, int attribute) {
  int value = 0;
  driver().check(driver().attribute(&value, attribute, handle), "cuDeviceGetAttribute");
  return value;
}

ContextGuard::ContextGuard(Handle context) {
  const Driver& d = driver();
  Handle current = nullptr;
  d.check(d.current_context(&current), "cuCtxGetCurrent");
  if (current == context) return;
  d.check(d.push_context(context), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextGuard::~ContextGuard() {
  Handle popped = nullptr;
  if (pushed_) driver().pop_context(&popped);
}

}  // namespace tpkernels::cuda
