// NCCL 2.14 or newer, loaded at run time: one dlopen, then functions by name.
//
// This header declares the subset of the NCCL ABI that is used, so the build needs no NCCL header.
// The ABI is stable throughout 2.x: values are never reused, and structs grow only at the end.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <string>

#include "unsupported.h"

namespace tpkernels::nccl {

struct Comm;  // opaque

struct UniqueId {
  char bytes[128];
};

using Result = int;  // ncclResult_t
constexpr Result kSuccess = 0, kInProgress = 7;
constexpr int kSum = 0;  // ncclRedOp_t

inline bool has_failed(Result code) { return code != kSuccess && code != kInProgress; }

// ncclConfig_t as of 2.14. A newer library reads from `size` and `version` which fields the caller
// sets, and uses defaults for the rest.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
static_assert(sizeof(Config) == 24, "the layout of ncclConfig_t");

// Every function: return type, name without the prefix `nccl`, parameters. Streams are
// cudaStream_t.
// clang-format off
#define TPK_NCCL(each)                                                                             \
  each(Result, GetVersion, (int*))                                                                 \
  each(Result, GetUniqueId, (UniqueId*))                                                           \
  each(const char*, GetErrorString, (Result))                                                      \
  each(const char*, GetLastError, (Comm*))                                                         \
  each(Result, CommInitRankConfig, (Comm**, int world, UniqueId, int rank, Config*))               \
  each(Result, CommGetAsyncError, (Comm*, Result*))                                                \
  each(Result, CommFinalize, (Comm*))                                                              \
  each(Result, CommDestroy, (Comm*))                                                               \
  each(Result, CommAbort, (Comm*))                                                                 \
  each(Result, GroupStart, ())                                                                     \
  each(Result, GroupEnd, ())                                                                       \
  each(Result, AllGather, (const void*, void*, std::size_t, int dtype, Comm*, void* stream))       \
  each(Result, ReduceScatter,                                                                      \
       (const void*, void*, std::size_t, int dtype, int op, Comm*, void* stream))                  \
  each(Result, AllReduce,                                                                          \
       (const void*, void*, std::size_t, int dtype, int op, Comm*, void* stream))                  \
  each(Result, Broadcast,                                                                          \
       (const void*, void*, std::size_t, int dtype, int root, Comm*, void* stream))                \
  each(Result, Send, (const void*, std::size_t, int dtype, int peer, Comm*, void* stream))         \
  each(Result, Recv, (void*, std::size_t, int dtype, int peer, Comm*, void* stream))
// clang-format on

struct Library {
#define TPK_DECLARE(type, name, parameters) type(*name) parameters;
  TPK_NCCL(TPK_DECLARE)
#undef TPK_DECLARE
  std::string path;

  // Loads the library by path or soname. It is never unloaded, because NCCL runs threads. Throws
  // Unsupported if the library cannot be loaded or lacks a required symbol.
  explicit Library(const std::string& name) {
    void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw Unsupported("cannot load '" + name + "': " + dlerror());
    const auto find = [&](const char* symbol) {
      void* address = dlsym(handle, symbol);
      if (address != nullptr) return address;
      throw Unsupported("'" + name + "' does not provide " + symbol +
                        "; tpkernels needs NCCL 2.14 or newer");
    };
#define TPK_FIND(type, name, parameters) \
  name = reinterpret_cast<type(*) parameters>(find("nccl" #name));
    TPK_NCCL(TPK_FIND)
#undef TPK_FIND
    Dl_info info{};
    path = dladdr(reinterpret_cast<void*>(GetVersion), &info) != 0 ? info.dli_fname : name;
  }

  // Returns the NCCL error string and the last NCCL message, if any. NCCL stores one message per
  // process and does not clear it, so show it only with an error.
  std::string error_message(Result code) const {
    const char* last = GetLastError(nullptr);
    const bool is_empty = last == nullptr || *last == '\0';
    return GetErrorString(code) + (is_empty ? "" : std::string("; last message: ") + last);
  }
};

}  // namespace tpkernels::nccl
