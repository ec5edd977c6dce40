// Whose turn it is on a group, and the calls that were planned for it. tpkernels/groups/group.py
// says who may have a turn; here is what a warm call needs of it. All of it under the GIL.
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

// A lock that its thread may take again, as threading.RLock, but without a Python call where it is
// free. Its state changes under the GIL only; those who wait without it sleep on a word.
class Lock {
 public:
  // False: another thread has it, and the caller does not want to wait. Throws error_already_set
  // where a signal handler raises during the wait.
  bool acquire(bool blocking = true);
  // Throws std::runtime_error where this thread does not have it.
  void release();

 private:
  void wait();

  unsigned long owner_ = 0;
  int depth_ = 0;
  int waiting_ = 0;
  host::Signal released_{};  // counts the releases that somebody waited for
};

// A planned call that the extension runs, with everything that does not change from call to call.
class Bound {
 public:
  Bound() = default;
  virtual ~Bound() = default;
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

  // Whether it can run a call with these arguments. It sees what the key of the call does not
  // tell, such as strides; the other calls go through Python.
  virtual bool takes(const Slots&, const Tensor& x) const { return is_contiguous(x); }

  // Runs it, with the group's turn: the op's result. Throws what the collective throws, and
  // error_already_set.
  virtual pybind11::object run(const Slots& slots, const Tensor& x) const = 0;
};

// A planned call: Python's `Call`, and, where the extension can run it by itself, how.
struct Planned {
  pybind11::object call;
  std::shared_ptr<Bound> bound;
  std::uint64_t generation;  // of the plans of the group
};

class Turns {
 public:
  Turns() = default;
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // Calls of the process group of that name, to which `group` is a weak reference, are this
  // object's from here on.
  void admit(const std::string& name, pybind11::object group);
  void retire();

  // Those of a process group of that name that torch still has; null where there are none.
  static Turns* of(PyObject* name);

  std::shared_ptr<Planned> find(const std::string& key) const;
  void remember(const std::string& key, std::shared_ptr<Planned> planned);
  // All calls are to be planned anew, on all ranks from the same call on: also one that has been
  // found already and waits for its turn, which compares generations.
  void forget() {
    const auto forgotten = std::exchange(planned_, {});  // finalizers may plan further calls
    ++generation_;
  }
  std::uint64_t generation() const { return generation_; }
  pybind11::list planned() const;

  // Who has it has the turn.
  std::shared_ptr<Lock> lock() const { return lock_; }
  void renew_lock() { lock_ = std::make_shared<Lock>(); }

  // A call's turn: waits for the lock. Not `taken` where the group cannot be used.
  class Turn {
   public:
    explicit Turn(Turns& turns) : turns_(turns), lock_(turns.lock()) {
      lock_->acquire();
      taken = turns.open && !turns.in_call;
      if (taken) turns.in_call = true;
    }
    ~Turn() {
      if (taken) turns_.in_call = false;
      lock_->release();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    bool taken;

   private:
    Turns& turns_;
    std::shared_ptr<Lock> lock_;  // that was taken: a fork has another
  };

  bool in_call = false;  // on the thread that has the lock
  bool open = true;      // calls can run: nothing has failed, nobody closed it, no fork
  // A problem was planned while a graph was captured, where nothing is tuned: a call after the
  // capture is to forget all plans.
  bool untuned_in_capture = false;

 private:
  std::string name_;
  pybind11::object group_;
  std::shared_ptr<Lock> lock_ = std::make_shared<Lock>();
  std::unordered_map<std::string, std::shared_ptr<Planned>> planned_;
  std::uint64_t generation_ = 0;
};

}  // namespace tpkernels::calls
