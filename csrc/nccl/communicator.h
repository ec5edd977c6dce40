// Problem: a NCCL call may wait for peers, in the call itself or later on the device, for ever.
//
// Algorithm: the communicator is non-blocking. NCCL does what may wait in a thread of its own, and
// its call returns at once with "in progress"; the caller then polls ncclCommGetAsyncError until
// that has ended or the deadline has come. At a failure or the deadline it calls ncclCommAbort,
// which also ends what is on the device. Abort and destroy may join NCCL's threads: they run on a
// thread that is left alone with the communicator if it does not come back in time.
//
// Sync: `calls_` lets one call run at a time, from its start until it is done, for NCCL refuses a
// second one while the first is in progress. `handle_mutex_` is held for each NCCL function but not
// between polls, so that another thread can check or abort meanwhile. After abort or destroy NCCL's
// communicator is gone; the state is changed first, and read before each use.
//
// A group of operations is handed over whole. NCCL's own group is thus never open between two of
// our calls, where an abort would leave it with operations of a communicator that is gone.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl/library.h"

namespace tpkernels::nccl {

enum class OperationKind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kSend, kRecv };

// Something to enqueue on a stream. `count` is NCCL's: the elements sent, those received for
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

// Sends `send_counts[r]` elements to each rank r and receives `recv_counts[r]` from it; pieces lie
// one after the other in rank order.
std::vector<Operation> all_to_all(const void* send, void* recv,
                                  const std::vector<std::size_t>& send_counts,
                                  const std::vector<std::size_t>& recv_counts, host::DType dtype,
                                  void* stream);

// Unset values are NCCL's to choose.
struct Options {
  int cta_policy = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  std::string name;       // shown in errors, and in NCCL's logs from 2.27 on
  double timeout = 30.0;  // seconds that one call may take
  // Called about 50 times a second by a waiter; may throw (a user's interrupt).
  std::function<void()> poll = [] {};
};

class Communicator {
 public:
  // Returns when all ranks have come. Uses the device that is current in this thread.
  Communicator(std::shared_ptr<const Library> library, const UniqueId& id, int rank, int world,
               const Options& options);
  // Aborts what was not closed; takes `kAbortSeconds` at the most.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }

  // Returns when the operations are on their streams; several run as one group. What they do there
  // is not waited for: see `check`.
  void enqueue(const std::vector<Operation>& operations);
  // Throws if an operation that was enqueued has failed, and aborts then.
  void check();
  // A communicator of the ranks that give the same color, ordered by key; null for kNoColor.
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name);

  // Memory that the ranks register together, for copies without staging. Null: not to be had here.
  void* register_window(void* memory, std::size_t bytes, int flags);
  void deregister_window(void* window);
  void* register_buffer(void* memory, std::size_t bytes);
  void deregister_buffer(void* registration);

  // Ends in order: waits until all ranks are through with all operations, then frees. Does nothing
  // where the communicator is closed or broken.
  void close();
  // Ends at once, with what is on the device; peers see an error. `why` is told by further calls.
  // Returns whether NCCL came back from it in time.
  bool abort(const std::string& why);

 private:
  enum class State { kLive, kClosed, kBroken };
  // NCCL's threads write here, so it is kept as long as one of them may live.
  struct Handle {
    Comm* comm = nullptr;
    std::string name;
    std::shared_ptr<void> result;  // of the call that is in progress
  };

  Communicator(const Communicator& parent, const std::string& name);
  void call(const std::string& what, const std::function<Result(Comm*)>& function);
  void finish(const std::string& what, Result code);
  void require_usable(const std::string& what) const;
  [[noreturn]] void fail(ErrorKind kind, std::string text);
  bool end(State state, const std::string& why);
  Result run(const Operation& operation, Comm* comm) const;
  std::string failed(const std::string& what, Result code) const;
  std::string place() const;

  const std::shared_ptr<const Library> library_;
  const std::shared_ptr<Handle> handle_ = std::make_shared<Handle>();
  const Options options_;
  const pid_t pid_;
  int rank_ = -1;
  int world_ = -1;
  std::timed_mutex calls_;
  std::timed_mutex handle_mutex_;
  mutable std::mutex state_mutex_;  // for what follows
  State state_ = State::kLive;
  std::string broken_by_;
};

// NCCL gets this long to abort or to destroy; less where the timeout is shorter.
constexpr double kAbortSeconds = 5.0;

}  // namespace tpkernels::nccl
