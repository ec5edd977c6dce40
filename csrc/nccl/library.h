// NCCL 2.14 or newer, loaded at run time: one dlopen, then functions by name.
//
// The part of NCCL's ABI that is used stands here, so that building needs no NCCL header. The ABI
// is stable throughout 2.x: values are never reused, and structs grow only at the end.
#pragma once

#include <climits>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "unsupported.h"

namespace tpkernels::nccl {

struct Comm;  // opaque

struct UniqueId {
  char bytes[128];
};

enum Result : int {
  kSuccess = 0,
  kInternalError = 3,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // since 2.30
};

constexpr int kUnset = INT_MIN;  // NCCL chooses
constexpr int kSum = 0;          // ncclRedOp_t

// ncclConfig_t as of 2.27. `size` and `version` tell the library which fields the caller knows:
// newer libraries use defaults for the rest, older ones read only the fields that they know.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 22700;
  int blocking = 0;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;
  const char* comm_name = nullptr;  // 2.27; NCCL keeps the pointer
  int collnet_enable = kUnset;
  int cta_policy = kUnset;
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
};
static_assert(sizeof(Config) == 72 && offsetof(Config, blocking) == 16 &&
                  offsetof(Config, net_name) == 32 && offsetof(Config, comm_name) == 48 &&
                  offsetof(Config, cta_policy) == 60,
              "the layout of ncclConfig_t");

// A failed call; `type` is the class of tpkernels.errors to raise.
struct Error : std::runtime_error {
  Error(const char* type, const std::string& text) : std::runtime_error(text), type(type) {}
  const char* type;
};

// Every function: what it returns, its name without NCCL's prefix, the first version that has it
// (as ncclGetVersion numbers it), and its parameters. Streams are cudaStream_t.
// clang-format off
#define TPK_NCCL(each)                                                                           \
  each(Result, GetUniqueId, 20000, (UniqueId*))                                                  \
  each(const char*, GetErrorString, 20000, (Result))                                             \
  each(Result, CommDestroy, 20000, (Comm*))                                                      \
  each(Result, AllGather, 20000,                                                                 \
       (const void*, void*, std::size_t, int dtype, Comm*, void* stream))                        \
  each(Result, ReduceScatter, 20000,                                                             \
       (const void*, void*, std::size_t, int dtype, int op, Comm*, void* stream))                \
  each(Result, AllReduce, 20000,                                                                 \
       (const void*, void*, std::size_t, int dtype, int op, Comm*, void* stream))                \
  each(Result, Broadcast, 20202,                                                                 \
       (const void*, void*, std::size_t, int dtype, int root, Comm*, void* stream))              \
  each(Result, GroupStart, 20000, ())                                                            \
  each(Result, GroupEnd, 20000, ())                                                              \
  each(Result, CommGetAsyncError, 2402, (Comm*, Result*))                                        \
  each(Result, CommAbort, 2402, (Comm*))                                                         \
  each(Result, Send, 2703, (const void*, std::size_t, int dtype, int peer, Comm*, void* stream)) \
  each(Result, Recv, 2703, (void*, std::size_t, int dtype, int peer, Comm*, void* stream))       \
  each(const char*, GetLastError, 21304, (Comm*))                                                \
  each(Result, CommInitRankConfig, 21400, (Comm**, int world, UniqueId, int rank, Config*))      \
  each(Result, CommFinalize, 21400, (Comm*))
// clang-format on

struct Functions {
#define TPK_DECLARE(type, name, since, parameters) type(*name) parameters;
  TPK_NCCL(TPK_DECLARE)
#undef TPK_DECLARE
};

class Library {
 public:
  // Loads the library from a path, or by its soname. It is never unloaded, because NCCL has threads
  // of its own. Throws Unsupported if there is none or a required symbol is missing.
  explicit Library(const std::string& name);
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const Functions& functions() const { return functions_; }
  std::string version() const;  // such as "2.28.9"
  const std::string& path() const { return path_; }
  UniqueId unique_id() const;  // of a new communicator; opens a socket
  // Returns NCCL's text for an error code, with its last message if there is one.
  std::string error_text(Result code) const;

 private:
  Functions functions_{};
  int version_ = 0;
  std::string path_;
};

}  // namespace tpkernels::nccl
