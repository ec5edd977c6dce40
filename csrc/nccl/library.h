// NCCL, loaded at run time: one dlopen, then functions by name. Functions that NCCL 2.14 has are
// required. Later ones may be missing; using a missing one raises an error that names it.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/abi.h"

namespace tpkernels::nccl {

// A valid request that this library or machine does not support. The text says what is needed.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// How a NCCL call failed.
enum class ErrorKind { kFailed, kPeerLost, kTimeout, kBroken };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind(kind) {}
  ErrorKind kind;
};

// Named as in NCCL, without the prefix. Streams are cudaStream_t, windows ncclWindow_t.
struct Functions {
  Result (*GetVersion)(int*);
  Result (*GetUniqueId)(UniqueId*);
  Result (*CommInitRankConfig)(Comm**, int world, UniqueId, int rank, Config*);
  Result (*CommGetAsyncError)(Comm*, Result*);
  Result (*CommAbort)(Comm*);
  Result (*CommFinalize)(Comm*);
  Result (*CommDestroy)(Comm*);
  Result (*CommCount)(const Comm*, int*);
  Result (*CommUserRank)(const Comm*, int*);
  const char* (*GetErrorString)(Result);
  const char* (*GetLastError)(Comm*);
  Result (*AllGather)(const void*, void*, std::size_t, int dtype, Comm*, void* stream);
  Result (*ReduceScatter)(const void*, void*, std::size_t, int dtype, int op, Comm*, void* stream);
  Result (*AllReduce)(const void*, void*, std::size_t, int dtype, int op, Comm*, void* stream);
  Result (*Broadcast)(const void*, void*, std::size_t, int dtype, int root, Comm*, void* stream);
  Result (*Send)(const void*, std::size_t, int dtype, int peer, Comm*, void* stream);
  Result (*Recv)(void*, std::size_t, int dtype, int peer, Comm*, void* stream);
  Result (*GroupStart)();
  Result (*GroupEnd)();
  // Those below are null if the library lacks them: call them through `Library::need`.
  Result (*CommSplit)(Comm*, int color, int key, Comm**, Config*);
  Result (*MemAlloc)(void**, std::size_t);
  Result (*MemFree)(void*);
  Result (*CommRegister)(const Comm*, void*, std::size_t, void** handle);
  Result (*CommDeregister)(const Comm*, void* handle);
  Result (*CommWindowRegister)(Comm*, void*, std::size_t, void** window, int flags);
  Result (*CommWindowDeregister)(Comm*, void* window);
};

struct Feature {
  const char* symbol;
  int since;  // the first version that has it, as ncclGetVersion numbers it
  bool present;
};

class Library {
 public:
  // Loads the library from a path, or by its soname. It is never unloaded, because NCCL has threads
  // of its own. Throws Unsupported if there is none or a required symbol is missing.
  explicit Library(const std::string& name);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Functions& functions() const { return functions_; }
  int version() const { return version_; }
  const std::string& path() const { return path_; }
  const std::vector<Feature>& features() const { return features_; }

  // Returns `function`, or throws Unsupported with its name if it is null.
  template <typename F>
  F* need(F* function, const char* symbol) const {
    if (function == nullptr) missing(symbol);
    return function;
  }
  // Throws Unsupported if the library is older than `since`.
  void need_version(int since, const std::string& what) const;

  // Rank 0 of a new communicator makes the id and gives it to all ranks. Opens a socket.
  UniqueId unique_id() const;
  // Memory of the current device that can be registered as a window.
  void* mem_alloc(std::size_t bytes) const;
  void mem_free(void* memory) const;

  // "NCCL 2.28.9 (/usr/lib/libnccl.so.2)"
  std::string describe() const;
  // NCCL's text for an error code, with its last message if there is one.
  std::string error_text(Result code) const;
  // Throws Error unless `code` is success.
  void require(Result code, const std::string& what) const;

 private:
  template <typename F>
  void look_up(void* handle, F*& slot, const char* symbol, int since, bool required);
  [[noreturn]] void missing(const char* symbol) const;

  Functions functions_{};
  int version_ = 0;
  std::string path_;
  std::vector<Feature> features_;
};

// 22809 is "2.28.9". Before 2.9 the scheme was different: 2.8.4 is 2804.
std::string version_text(int version);

}  // namespace tpkernels::nccl
