// NCCL, found at run time: one dlopen, and its functions by name. What every version from 2.14 has
// is required; what came later may be missing, and is named when somebody asks for it.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl/abi.h"

namespace tpkernels::nccl {

// Right, but not to be had with this library or on this machine; the text says what would be.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// NCCL could not do what it was asked to.
enum class ErrorKind { kFailed, kPeerLost, kTimeout, kBroken };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), kind(kind) {}
  ErrorKind kind;
};

// Named as in NCCL, without the prefix. A stream is a cudaStream_t, a window an ncclWindow_t.
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
  // From here on null where the library has none: call them through `Library::need`.
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
  int since;  // the version that brought it, as ncclGetVersion counts
  bool present;
};

class Library {
 public:
  // Loads the library at a path, or finds one by its soname. It is never unloaded: NCCL has threads
  // of its own. Throws Unsupported where there is none, or one without a required symbol.
  explicit Library(const std::string& name);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Functions& functions() const { return functions_; }
  int version() const { return version_; }
  const std::string& path() const { return path_; }
  const std::vector<Feature>& features() const { return features_; }

  // Throws Unsupported for a null function, naming it.
  template <typename F>
  F* need(F* function, const char* symbol) const {
    if (function == nullptr) missing(symbol);
    return function;
  }
  // Throws Unsupported if the library is older than `since`.
  void need_version(int since, const std::string& what) const;

  // Rank 0 of a future communicator makes one and gives it to all ranks. Opens a socket.
  UniqueId unique_id() const;
  // Device memory that can be a window, on the current device.
  void* mem_alloc(std::size_t bytes) const;
  void mem_free(void* memory) const;

  // "NCCL 2.28.9 (/usr/lib/libnccl.so.2)"
  std::string describe() const;
  // What went wrong, in NCCL's words.
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

// 22809 is "2.28.9"; before 2.9 NCCL counted 2.8.4 as 2804.
std::string version_text(int version);

}  // namespace tpkernels::nccl
