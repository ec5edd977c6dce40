// Problem: a NCCL call may wait for peers forever, in the call itself or later on the device.
//
// Algorithm: the communicator is non-blocking. NCCL runs anything that may wait on a thread of its
// own, and the call returns at once with "in progress". The caller then polls ncclCommGetAsyncError
// until the work completes or the deadline passes. After a failure or the deadline it calls
// ncclCommAbort, which also ends work on the device. Abort and destroy may join NCCL's threads, so
// they run on a separate thread; if that does not return in time, it is abandoned together with the
// communicator.
//
// Sync: `calls_` admits one call at a time, from its start to its completion, because NCCL refuses
// a second call while one is in progress. `handle_mutex_` is held during each NCCL function but not
// between polls, so another thread can check or abort meanwhile. Abort and destroy free NCCL's
// communicator, so the state is changed before they run and checked before each use.
//
// A group of operations is enqueued in one call. So NCCL's own group is never open between two of
// our calls, where an abort would leave it holding operations of a freed communicator.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/vector.h"
#include "nccl/library.h"

namespace tpkernels::nccl {

enum class OperationKind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kSend, kRecv };
constexpr const char* kOperations[] = {"all_gather", "reduce_scatter", "all_reduce",
                                       "broadcast",  "send",           "recv"};

// An operation to enqueue on a stream. `count` is as in NCCL: elements sent, or received for
// kReduceScatter. `peer` is the root of a broadcast.
struct Operation {
  OperationKind kind;
  const void* send;
  void* recv;
  std::size_t count;
  host::DType dtype;
  int peer;
  void* stream;
};

class Communicator {
 public:
  // Returns when all ranks have joined. Uses the device that is current on this thread. `name`
  // appears in errors and, since NCCL 2.27, in its logs; `timeout` limits a call, in seconds. A
  // waiter calls `poll` about 50 times a second; it may throw, for example on Ctrl-C.
  Communicator(
      std::shared_ptr<const Library> library, const UniqueId& id, int rank, int world,
      const std::string& name, double timeout, std::function<void()> poll = [] {});
  // Aborts unless closed. Takes at most `kAbortSeconds`.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Returns when the operations are on their streams; several run as one group. Does not wait for
  // them to complete: see `check`.
  void enqueue(const std::vector<Operation>& operations);
  // Aborts and throws if an enqueued operation has failed.
  void check();
  // Waits until all ranks have completed all operations, then frees the communicator. Does nothing
  // if it is closed or broken.
  void close();
  // Ends the communicator and its work on the device at once; peers see an error. Later calls
  // report `why`. Returns whether NCCL returned in time.
  bool abort(const std::string& why);

 private:
  enum class State { kLive, kClosed, kBroken };
  // NCCL's threads write here, so it lives as long as any of them may run.
  struct Handle {
    Comm* comm = nullptr;
    std::string name;
  };

  void call(const std::string& name, const std::function<Result(Comm*)>& function);
  void finish(const std::string& name, Result code);
  void require_usable(const std::string& name) const;
  [[noreturn]] void fail(const char* type, std::string text);
  bool end(State state, const std::string& why);
  Result run(const Operation& operation, Comm* comm) const;
  std::string failure_text(const std::string& name, Result code) const;

  const std::shared_ptr<const Library> library_;
  const std::shared_ptr<Handle> handle_ = std::make_shared<Handle>();
  const std::string label_;
  const double timeout_;
  const std::function<void()> poll_;
  const pid_t pid_;
  std::timed_mutex calls_;
  std::timed_mutex handle_mutex_;
  mutable std::mutex state_mutex_;  // guards the members below
  State state_ = State::kLive;
  std::string broken_by_;
};

// How long NCCL may take to abort or destroy; the timeout, if that is shorter.
constexpr double kAbortSeconds = 5.0;

}  // namespace tpkernels::nccl
