#include "nccl/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
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

Options named(Options options, const std::string& name) {
  options.name = name;
  return options;
}

// `name` must outlive the communicator.
Config make_config(const Library& library, const Options& options, const std::string& name) {
  if (options.cta_policy != kUnset) library.need_version(22703, "cta_policy");
  if (options.min_ctas != kUnset || options.max_ctas != kUnset) {
    library.need_version(21701, "min_ctas and max_ctas");
  }
  Config config;
  config.blocking = 0;
  config.cta_policy = options.cta_policy;
  config.min_ctas = options.min_ctas;
  config.max_ctas = options.max_ctas;
  if (!name.empty()) config.comm_name = name.c_str();
  return config;
}

Result async_error(const Library& library, Comm* comm) {
  Result code = kInternalError;
  const Result result = library.functions().CommGetAsyncError(comm, &code);
  return result == kSuccess ? code : result;
}

ErrorKind kind_of(Result code) {
  if (code == kRemoteError) return ErrorKind::kPeerLost;
  return code == kTimeout ? ErrorKind::kTimeout : ErrorKind::kFailed;
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
                           int world, const Options& options)
    : library_(std::move(library)), options_(options), pid_(getpid()), rank_(rank), world_(world) {
  handle_->name = options.name;
  Config config = make_config(*library_, options, handle_->name);
  const Result code =
      library_->functions().CommInitRankConfig(&handle_->comm, world, id, rank, &config);
  if (handle_->comm == nullptr) throw Error(kind_of(code), failure_text("set-up", code));
  finish("set-up", code);
}

// A child without a NCCL communicator; `split` fills it in.
Communicator::Communicator(const Communicator& parent, const std::string& name)
    : library_(parent.library_), options_(named(parent.options_, name)), pid_(parent.pid_) {
  handle_->name = name;
}

Communicator::~Communicator() { abort("it was destroyed before it was closed"); }

std::string Communicator::label() const {
  std::string text = "NCCL communicator";
  if (!options_.name.empty()) text += " '" + options_.name + "'";
  if (world_ > 0) text += ", rank " + std::to_string(rank_) + " of " + std::to_string(world_);
  return text;
}

std::string Communicator::failure_text(const std::string& what, Result code) const {
  return label() + ": " + what + " failed: " + library_->error_text(code);
}

void Communicator::require_usable(const std::string& what) const {
  if (getpid() != pid_) {
    throw Error(ErrorKind::kBroken, label() + ": " + what + " in process " +
                                        std::to_string(getpid()) + ", a fork of process " +
                                        std::to_string(pid_) +
                                        ", which owns it; create a communicator in the child");
  }
  const std::lock_guard lock(state_mutex_);
  if (state_ == State::kBroken) {
    throw Error(ErrorKind::kBroken,
                label() + " is broken and can run no more calls; make a new one. It broke with: " +
                    broken_by_);
  }
  if (state_ == State::kClosed) {
    throw Error(ErrorKind::kBroken, label() + ": " + what + " after it was closed");
  }
}

// Runs one NCCL function, from its start to its completion.
void Communicator::call(const std::string& what, const std::function<Result(Comm*)>& function) {
  require_usable(what);
  const std::unique_lock turn(calls_, Seconds(options_.timeout));
  if (!turn.owns_lock()) {
    throw Error(ErrorKind::kTimeout, label() + ": " + what + " waited " +
                                         seconds_text(options_.timeout) +
                                         " for another thread's call");
  }
  Result code = kSuccess;
  {
    const std::lock_guard lock(handle_mutex_);
    require_usable(what);
    code = function(handle_->comm);
  }
  finish(what, code);
}

// Waits for the call to complete. NCCL returns success for some calls that are still in progress.
void Communicator::finish(const std::string& what, Result code) {
  const auto start = Clock::now();
  auto polled = start;
  Seconds pause{20e-6};
  while (code == kSuccess || code == kInProgress) {
    {
      const std::lock_guard lock(handle_mutex_);
      require_usable(what);
      code = async_error(*library_, handle_->comm);
    }
    if (code == kSuccess) return;
    if (code != kInProgress) break;
    const auto now = Clock::now();
    if (now - start >= Seconds(options_.timeout)) {
      fail(ErrorKind::kTimeout, label() + ": " + what + " did not complete within " +
                                    seconds_text(options_.timeout) +
                                    ": a rank did not join or cannot be reached");
    }
    if (now - polled >= kPoll) {
      polled = now;
      try {
        options_.poll();
      } catch (...) {
        abort(what + " was interrupted");
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
  fail(kind_of(code), failure_text(what, code));
}

void Communicator::fail(ErrorKind kind, std::string text) {
  if (!abort(text)) text += "; ncclCommAbort did not return and was abandoned";
  throw Error(kind, text + ". The communicator is broken: make a new one.");
}

bool Communicator::abort(const std::string& why) {
  if (getpid() != pid_) return true;  // the parent still uses its sockets and device
  return end(State::kBroken, why);
}

// Aborts (for kBroken) or destroys (for kClosed), once. Returns whether NCCL returned in time.
bool Communicator::end(State state, const std::string& why) {
  const Seconds limit(std::min(options_.timeout, kAbortSeconds));
  {
    const std::lock_guard lock(state_mutex_);
    if (state_ != State::kLive) return true;
    state_ = state;
    broken_by_ = why;
  }
  if (handle_->comm == nullptr) return true;  // a child whose split failed
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
    throw Error(ErrorKind::kTimeout, label() + ": ncclCommDestroy did not return within " +
                                         seconds_text(std::min(options_.timeout, kAbortSeconds)) +
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
    fail(kind_of(code), failure_text("an operation in flight", code));
  }
}

std::unique_ptr<Communicator> Communicator::split(int color, int key, const std::string& name) {
  auto* const function = library_->need(library_->functions().CommSplit, "ncclCommSplit");
  std::unique_ptr<Communicator> child(new Communicator(*this, name));
  Handle& handle = *child->handle_;
  Config config = make_config(*library_, child->options_, handle.name);
  call("split", [&](Comm* comm) {
    handle_->result = child->handle_;
    return function(comm, color, key, &handle.comm, &config);
  });
  if (handle.comm == nullptr) return nullptr;
  child->finish("set-up by split", kInProgress);
  const Functions& f = library_->functions();
  f.CommCount(handle.comm, &child->world_);
  f.CommUserRank(handle.comm, &child->rank_);
  return child;
}

}  // namespace tpkernels::nccl
