// The lock of a group and its cache of planned calls: the state that a warm call reads.
// tpkernels/groups/group.py defines who may hold the lock. The GIL protects all of this state.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "calls/arguments.h"
#include "host/wait.h"

namespace tpkernels::calls {

// A reentrant lock like threading.RLock. Acquiring a free lock runs no Python code. Its state
// changes only under the GIL. Waiting threads release the GIL and sleep on `released_`.
class Lock {
 public:
  // Returns false if a different thread holds the lock and `blocking` is false. Throws
  // error_already_set if a signal handler raises during the wait.
  bool acquire(bool blocking = true);
  // Throws std::runtime_error if this thread does not hold the lock.
  void release();
  // Whether this thread holds the lock.
  bool is_held() const;

 private:
  void wait();

  unsigned long owner_ = 0;
  int depth_ = 0;
  int waiting_ = 0;
  host::Signal released_{};  // counts the releases that woke waiting threads
};

// A planned call that the extension runs, with the state that does not change between calls.
class BoundCall {
 public:
  BoundCall() = default;
  virtual ~BoundCall() = default;
  BoundCall(const BoundCall&) = delete;
  BoundCall& operator=(const BoundCall&) = delete;

  // Whether `run` supports these arguments. Checks properties that are not in the key of the call,
  // such as strides. If it returns false, Python runs the call.
  virtual bool accepts(const Slots&, const Tensor& x) const { return is_contiguous(x); }

  // Returns the result of the op. The caller holds the group lock. Throws error_already_set and the
  // errors of the collective.
  virtual pybind11::object run(const Slots& slots, const Tensor& x) const = 0;
};

// An entry of the plan cache.
struct PlannedCall {
  pybind11::object call;             // the Python `Call`
  std::shared_ptr<BoundCall> bound;  // null if the extension cannot run the call
  std::uint64_t generation;          // value of GroupCalls::generation when it was planned
};

class GroupCalls {
 public:
  GroupCalls() = default;
  ~GroupCalls();
  GroupCalls(const GroupCalls&) = delete;
  GroupCalls& operator=(const GroupCalls&) = delete;

  // Registers this object for the process group of that name. `group` is a weak reference to it.
  void register_group(const std::string& name, pybind11::object group);
  void unregister();

  // Returns the object of a process group of that name that torch has not destroyed, or null.
  static GroupCalls* lookup(PyObject* name);

  std::shared_ptr<PlannedCall> find(const std::string& key) const;
  void insert(const std::string& key, std::shared_ptr<PlannedCall> planned);
  // Empties the plan cache. All ranks do this before the same call. A call that was already looked
  // up and waits for the lock then sees a new generation, and is planned again.
  void clear() {
    const auto cleared = std::exchange(planned_, {});  // finalizers may plan further calls
    ++generation_;
  }
  std::uint64_t generation() const { return generation_; }
  pybind11::list planned_calls() const;

  // The group lock. Its holder may run calls.
  std::shared_ptr<Lock> lock() const { return lock_; }
  void renew_lock() { lock_ = std::make_shared<Lock>(); }

  // Holds the group lock during a call. `can_run` is false if the group is not open, if this thread
  // is in a call already, or if the call must wait for asynchronous collectives.
  class CallGuard {
   public:
    explicit CallGuard(GroupCalls& group) : group_(group), lock_(group.lock()) {
      lock_->acquire();
      can_run = group.open && !group.in_call && !group.has_pending_calls;
      if (can_run) group.in_call = true;
    }
    ~CallGuard() {
      if (can_run) group_.in_call = false;
      lock_->release();
    }
    CallGuard(const CallGuard&) = delete;
    CallGuard& operator=(const CallGuard&) = delete;

    bool can_run;

   private:
    GroupCalls& group_;
    std::shared_ptr<Lock> lock_;  // a fork replaces the lock of the group
  };

  bool in_call = false;            // set by the thread that holds the lock
  bool open = true;                // false after a failure, after close, and in a fork
  bool has_pending_calls = false;  // asynchronous collectives of the backend "tpkernels"
  // Set if a problem was planned during a graph capture. Captures do not tune, so the first call
  // after the capture clears the plan cache.
  bool untuned_in_capture = false;

 private:
  std::string name_;
  pybind11::object process_group_;  // weak reference
  std::shared_ptr<Lock> lock_ = std::make_shared<Lock>();
  std::unordered_map<std::string, std::shared_ptr<PlannedCall>> planned_;
  std::uint64_t generation_ = 0;
};

}  // namespace tpkernels::calls
