// Runs the C++ tests: test_host [--threads-only] [--only=NAME] [--single-buffer] [--skip-waits].
// Exit code 0 if all cases pass.
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>

#include "check.h"

namespace tpkernels::test {

using host::Arena;
using host::Channel;
using host::Failure;
using host::FailureKind;

void check_failed(const char* expression, const char* file, int line, const std::string& detail) {
  throw CheckFailed(std::string(file) + ":" + std::to_string(line) + ": CHECK(" + expression +
                    ") failed" + (detail.empty() ? "" : ": " + detail));
}

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

Options& options() {
  static Options instance;
  return instance;
}

std::shared_ptr<Arena> make_arena(int world, std::size_t bytes) {
  const int fd = Arena::create(bytes, world);
  auto arena = std::make_shared<Arena>(fd, bytes, world);
  for (int rank = 0; rank < world; ++rank) arena->commit(rank, 0, bytes);
  close(fd);
  return arena;
}

namespace {

std::unique_ptr<Channel> create_channel(const Setup& setup, std::shared_ptr<Arena> arena, int rank,
                                        std::vector<int> pidfds, std::vector<int> pids) {
  auto channel = std::make_unique<Channel>(
      std::move(arena), rank, std::move(pidfds), std::move(pids),
      host::ChannelOptions{setup.timeout_s, setup.spin_us}, setup.capacity, setup.epoch);
  const Options& test_options = options();
  if (setup.max_delay_us != 0 || test_options.single_buffer || test_options.skip_waits) {
    const std::uint64_t seed = test_options.seed * 1000003 + static_cast<unsigned>(rank) * 2 + 1;
    channel->set_chaos(
        {seed, setup.max_delay_us, test_options.single_buffer, test_options.skip_waits});
  }
  return channel;
}

int run_rank(const Setup& setup, const std::shared_ptr<Arena>& arena, int rank,
             const std::vector<int>& pids, const Body& body) {
  std::vector<int> pidfds;
  for (const int pid : pids) {
    pidfds.push_back(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  }
  const auto channel = create_channel(setup, arena, rank, pidfds, pids);
  try {
    body(*channel);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    channel->abandon(error.what());
    return 1;
  }
}

}  // namespace

std::unique_ptr<Channel> make_channel(const Setup& setup, std::shared_ptr<Arena> arena, int rank) {
  const auto ranks = static_cast<std::size_t>(setup.world);
  return create_channel(setup, std::move(arena), rank, std::vector<int>(ranks, -1),
                        std::vector<int>(ranks, static_cast<int>(getpid())));
}

void on_threads(const Setup& setup, const Body& body) {
  const auto arena = make_arena(
      setup.world, Channel::region_bytes(setup.world, std::max(setup.limit, setup.capacity)));
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < setup.world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto channel = make_channel(setup, arena, rank);
      try {
        body(*channel);
      } catch (const std::exception& error) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!first) first = std::current_exception();
        channel->abandon(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

std::vector<int> on_processes(const Setup& setup, const Body& body) {
  const auto arena = make_arena(
      setup.world, Channel::region_bytes(setup.world, std::max(setup.limit, setup.capacity)));
  std::vector<int> pids;
  std::vector<int> write_ends;
  for (int rank = 0; rank < setup.world; ++rank) {
    int pipe_ends[2];
    CHECK(pipe(pipe_ends) == 0);
    const int pid = static_cast<int>(fork());
    CHECK(pid >= 0);
    if (pid == 0) {  // receives the pids of all ranks, then runs its rank
      close(pipe_ends[1]);
      std::vector<int> received_pids(static_cast<std::size_t>(setup.world));
      const auto bytes = static_cast<ssize_t>(received_pids.size() * sizeof(int));
      const bool received =
          read(pipe_ends[0], received_pids.data(), static_cast<std::size_t>(bytes)) == bytes;
      _exit(received ? run_rank(setup, arena, rank, received_pids, body) : 2);
    }
    close(pipe_ends[0]);
    pids.push_back(pid);
    write_ends.push_back(pipe_ends[1]);
  }
  for (const int write_end : write_ends) {
    const auto bytes = static_cast<ssize_t>(pids.size() * sizeof(int));
    CHECK(write(write_end, pids.data(), static_cast<std::size_t>(bytes)) == bytes);
    close(write_end);
  }
  std::vector<int> statuses;
  for (const int pid : pids) {
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid);
    statuses.push_back(status);
  }
  return statuses;
}

void require_success_on_processes(const Setup& setup, const Body& body) {
  const std::vector<int> statuses = on_processes(setup, body);
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    CHECK(statuses[rank] == 0, "rank " + std::to_string(rank) + " ended with wait status " +
                                   std::to_string(statuses[rank]));
  }
}

Failure require_failure(FailureKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const Failure& failure) {
    CHECK(failure.kind == kind, failure.what());
    return failure;
  }
  check_failed("the call fails", __FILE__, __LINE__, "it succeeded");
}

bool was_killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
void kill_process(int pid) { kill(pid, SIGKILL); }

bool contains(const std::string& string, const std::string& substring) {
  return string.find(substring) != std::string::npos;
}

double now_ms() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

void sleep_ms(double ms) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

namespace {

int run_all(int argc, char** argv) {
  bool threads_only = false;
  std::string only;
  Options& test_options = options();
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i], name = argument.substr(0, argument.find('='));
    const std::string value = argument.substr(std::min(argument.size(), name.size() + 1));
    if (name == "--threads-only") {
      threads_only = true;
    } else if (name == "--single-buffer") {
      test_options.single_buffer = true;
    } else if (name == "--skip-waits") {
      test_options.skip_waits = true;
    } else if (name == "--only") {
      only = value;
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  int failed = 0, run = 0;
  for (const Case& test : cases()) {
    if (!only.empty() && only != test.name) continue;
    if (threads_only && test.needs == Needs::kFork) continue;
    ++run;
    const double start = now_ms();
    std::string outcome = "ok";
    try {
      test.run();
    } catch (const std::exception& error) {
      outcome = std::string("FAILED: ") + error.what();
      ++failed;
    }
    std::printf("%-40s %7.0f ms  %s\n", test.name, now_ms() - start, outcome.c_str());
    std::fflush(stdout);
  }
  std::printf("%d cases, %d failed\n", run, failed);
  return failed == 0 && run > 0 ? 0 : 1;
}

}  // namespace
}  // namespace tpkernels::test

int main(int argc, char** argv) { return tpkernels::test::run_all(argc, argv); }
