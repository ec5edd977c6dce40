#include "nccl/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

namespace tpkernels::nccl {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kSpin{50e-6};  // about the time it takes NCCL to start a thread
constexpr Seconds kLongestPause{1e-3};
constexpr Seconds kPoll{20e-3};

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f s", seconds);
  return text;
}

const char* name_of(OperationKind kind) { return kOperations[static_cast<int>(kind)]; }

std::string describe(const std::vector<Operation>& operations) {
  const Operation& first = operations.front();
  if (operations.size() > 1) {
    return "group of " + std::to_string(operations.size()) + " operations (" + name_of(first.kind) +
           ", ...)";
  }
  return std::string(name_of(first.kind)) + " of " + std::to_string(first.count) + " elements";
}

// ncclDataType_t, by host::DType.
int data_type(host::DType dtype) {
  return dtype == host::DType::kF16    ? 6
         : dtype == host::DType::kF64  ? 8
         : dtype == host::DType::kBF16 ? 9
                                       : 7;
}

Result async_error(const Library& library, Comm* comm) {
  Result code = kInternalError;
  const Result result = library.functions().CommGetAsyncError(comm, &code);
  return result == kSuccess ? code : result;
}

const char* error_type(Result code) {
  if (code == kRemoteError) return "PeerLostError";
  return code == kTimeout ? "CollectiveTimeoutError" : "TpkernelsError";
}

// Runs a function that may never return on its own thread. Returns whether it ended in time.
bool run_bounded(std::function<void()> function, Seconds limit) {
  auto done = std::make_shared<std::promise<void>>();
  std::future<void> ended = done->get_future();
  try {
    std::thread([done, function = std::move(function)] {
      function();
      done->set_value();
    }).detach();
  } catch (const std::system_error&) {  // no thread could be started
    return false;
  }
  return ended.wait_for(limit) == std::future_status::ready;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<const Library> library, const UniqueId& id, int rank,
                           int world, const std::string& name, double timeout,
                           std::function<void()> poll)
    : library_(std::move(library)),
      label_("NCCL communicator '" + name + "', rank " + std::to_string(rank) + " of " +
             std::to_string(world)),
      timeout_(timeout),
      poll_(std::move(poll)),
      pid_(getpid()) {
  handle_->name = name;
  Config config;
  config.comm_name = handle_->name.c_str();
  const Result code =
      library_->functions().CommInitRankConfig(&handle_->comm, world, id, rank, &config);
  if (handle_->comm == nullptr) throw Error(error_type(code), failure_text("set-up", code));
  finish("set-up", code);
}

Communicator::~Communicator() { abort("it was destroyed before it was closed"); }

std::string Communicator::failure_text(const std::string& name, Result code) const {
  return label_ + ": " + name + " failed: " + library_->error_text(code);
}

void Communicator::require_usable(const std::string& name) const {
  if (getpid() != pid_) {
    throw Error("GroupBrokenError", label_ + ": " + name + " in process " +
                                        std::to_string(getpid()) + ", a fork of process " +
                                        std::to_string(pid_) +
                                        ", which owns it; create a communicator in the child");
  }
  const std::lock_guard lock(state_mutex_);
  if (state_ == State::kBroken) {
    throw Error("GroupBrokenError",
                label_ + " is broken and can run no more calls; make a new one. It broke with: " +
                    broken_by_);
  }
  if (state_ == State::kClosed) {
    throw Error("GroupBrokenError", label_ + ": " + name + " after it was closed");
  }
}

// Runs one NCCL function, from its start to its completion.
void Communicator::call(const std::string& name, const std::function<Result(Comm*)>& function) {
  require_usable(name);
  const std::unique_lock turn(calls_, Seconds(timeout_));
  if (!turn.owns_lock()) {
    throw Error(
        "CollectiveTimeoutError",
        label_ + ": " + name + " waited " + seconds_text(timeout_) + " for another thread's call");
  }
  Result code = kSuccess;
  {
    const std::lock_guard lock(handle_mutex_);
    require_usable(name);
    code = function(handle_->comm);
  }
  finish(name, code);
}

// Waits for the call to complete. NCCL returns success for some calls that are still in progress.
void Communicator::finish(const std::string& name, Result code) {
  const auto start = Clock::now();
  auto polled = start;
  Seconds pause{20e-6};
  while (code == kSuccess || code == kInProgress) {
    {
      const std::lock_guard lock(handle_mutex_);
      require_usable(name);
      code = async_error(*library_, handle_->comm);
    }
    if (code == kSuccess) return;
    if (code != kInProgress) break;
    const auto now = Clock::now();
    if (now - start >= Seconds(timeout_)) {
      fail("CollectiveTimeoutError", label_ + ": " + name + " did not complete within " +
                                         seconds_text(timeout_) +
                                         ": a rank did not join or cannot be reached");
    }
    if (now - polled >= kPoll) {
      polled = now;
      try {
        poll_();
      } catch (...) {
        abort(name + " was interrupted");
        throw;
      }
    }
    if (now - start < kSpin) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }
  fail(error_type(code), failure_text(name, code));
}

void Communicator::fail(const char* type, std::string text) {
  if (!abort(text)) text += "; ncclCommAbort did not return and was abandoned";
  throw Error(type, text + ". The communicator is broken: make a new one.");
}

bool Communicator::abort(const std::string& why) {
  if (getpid() != pid_) return true;  // the parent still uses its sockets and device
  return end(State::kBroken, why);
}

// Aborts (for kBroken) or destroys (for kClosed), once. Returns whether NCCL returned in time.
bool Communicator::end(State state, const std::string& why) {
  const Seconds limit(std::min(timeout_, kAbortSeconds));
  {
    const std::lock_guard lock(state_mutex_);
    if (state_ != State::kLive) return true;
    state_ = state;
    broken_by_ = why;
  }
  // A thread that holds the lock for longer is stuck in NCCL, and only an abort can free it. So
  // proceed without the lock after the limit.
  const std::unique_lock lock(handle_mutex_, limit);
  return run_bounded(
      [library = library_, handle = handle_, state] {
        const Functions& f = library->functions();
        (state == State::kBroken ? f.CommAbort : f.CommDestroy)(handle->comm);
      },
      limit);
}

void Communicator::close() {
  {
    const std::lock_guard lock(state_mutex_);
    if (state_ != State::kLive) return;
  }
  call("close", library_->functions().CommFinalize);
  if (!end(State::kClosed, "")) {
    throw Error("CollectiveTimeoutError", label_ + ": ncclCommDestroy did not return within " +
                                              seconds_text(std::min(timeout_, kAbortSeconds)) +
                                              " and was abandoned");
  }
}

void Communicator::check() {
  Result code = kSuccess;
  require_usable("check");
  {
    const std::lock_guard lock(handle_mutex_);
    require_usable("check");
    code = async_error(*library_, handle_->comm);
  }
  if (code != kSuccess && code != kInProgress) {
    fail(error_type(code), failure_text("an operation in flight", code));
  }
}

void Communicator::enqueue(const std::vector<Operation>& operations) {
  std::vector<Operation> nonempty;  // all ranks skip the same empty operations
  std::copy_if(operations.begin(), operations.end(), std::back_inserter(nonempty),
               [](const Operation& operation) { return operation.count > 0; });
  if (nonempty.empty()) return check();
  call(describe(nonempty), [&](Comm* comm) {
    if (nonempty.size() == 1) return run(nonempty.front(), comm);
    const Functions& f = library_->functions();
    Result code = f.GroupStart();
    if (code != kSuccess) return code;
    for (const Operation& operation : nonempty) {
      code = run(operation, comm);
      if (code != kSuccess && code != kInProgress) break;
    }
    // Even after a failure: otherwise the thread's next call would join this group.
    const Result ended = f.GroupEnd();
    return code != kSuccess && code != kInProgress ? code : ended;
  });
}

Result Communicator::run(const Operation& o, Comm* comm) const {
  const Functions& f = library_->functions();
  const int type = data_type(o.dtype);
  switch (o.kind) {
    case OperationKind::kAllGather:
      return f.AllGather(o.send, o.recv, o.count, type, comm, o.stream);
    case OperationKind::kReduceScatter:
      return f.ReduceScatter(o.send, o.recv, o.count, type, kSum, comm, o.stream);
    case OperationKind::kAllReduce:
      return f.AllReduce(o.send, o.recv, o.count, type, kSum, comm, o.stream);
    case OperationKind::kBroadcast:
      return f.Broadcast(o.send, o.recv, o.count, type, o.peer, comm, o.stream);
    case OperationKind::kSend:
      return f.Send(o.send, o.count, type, o.peer, comm, o.stream);
    case OperationKind::kRecv:
      break;
  }
  return f.Recv(o.recv, o.count, type, o.peer, comm, o.stream);
}

}  // namespace tpkernels::nccl
