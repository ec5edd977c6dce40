#include "nccl/library.h"

#include <dlfcn.h>
#include <link.h>

namespace tpkernels::nccl {
namespace {

std::string real_path(void* handle, const std::string& name) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || *map->l_name == '\0') {
    return name;
  }
  return map->l_name;
}

// 22809 is "2.28.9". Before 2.9 the scheme was different: 2.8.4 is 2804.
std::string version_text(int version) {
  const int thousand = version < 10000 ? 1000 : 10000;
  return std::to_string(version / thousand) + "." + std::to_string(version % thousand / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Library::Library(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw Unsupported("cannot load '" + name + "': " + (why == nullptr ? "no reason given" : why));
  }
  path_ = real_path(handle, name);
  const auto version = reinterpret_cast<Result (*)(int*)>(dlsym(handle, "ncclGetVersion"));
  if (version == nullptr || version(&version_) != kSuccess) {
    throw Unsupported("'" + path_ + "' is not NCCL: ncclGetVersion is missing or fails");
  }
  const auto find = [&](const char* symbol, int since) {
    void* found = dlsym(handle, symbol);
    if (found == nullptr) {
      throw Unsupported("NCCL " + version_text(version_) + " (" + path_ +
                        ") is too old: it has no " + symbol + ", which was added in NCCL " +
                        version_text(since) + "; tpkernels needs NCCL 2.14.0 or newer");
    }
    return found;
  };
#define TPK_FIND(type, name, since, parameters) \
  functions_.name = reinterpret_cast<type(*) parameters>(find("nccl" #name, since));
  TPK_NCCL(TPK_FIND)
#undef TPK_FIND
}

std::string Library::version() const { return version_text(version_); }

UniqueId Library::unique_id() const {
  UniqueId id{};
  const Result code = functions_.GetUniqueId(&id);
  if (code != kSuccess)
    throw Error("TpkernelsError", "ncclGetUniqueId failed: " + error_text(code));
  return id;
}

std::string Library::error_text(Result code) const {
  std::string text = functions_.GetErrorString(code);
  // NCCL keeps one last message per process, which outlives its cause: show it only with an error.
  const char* last = functions_.GetLastError(nullptr);
  if (last != nullptr && *last != '\0') text += std::string("; last message: ") + last;
  return text;
}

}  // namespace tpkernels::nccl
