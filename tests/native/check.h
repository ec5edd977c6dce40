// Test framework: self-registering cases, CHECK, and functions that run the ranks of a group as
// threads or as processes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/arena.h"
#include "host/channel.h"

namespace tpkernels::test {

struct CheckFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void check_failed(const char* expression, const char* file, int line,
                               const std::string& detail);

// CHECK(expression) or CHECK(expression, detail): fails the case by throwing.
#define CHECK(expression, ...)                                                          \
  do {                                                                                  \
    if (!(expression)) {                                                                \
      ::tpkernels::test::check_failed(#expression, __FILE__, __LINE__,                  \
                                      ::tpkernels::test::detail_or_empty(__VA_ARGS__)); \
    }                                                                                   \
  } while (0)

inline std::string detail_or_empty() { return ""; }
inline std::string detail_or_empty(const std::string& detail) { return detail; }

enum class Needs { kThreads, kFork };

struct Case {
  const char* name;
  Needs needs;
  void (*run)();
};

std::vector<Case>& cases();

struct Registration {
  Registration(const char* name, Needs needs, void (*run)()) {
    cases().push_back({name, needs, run});
  }
};

#define TEST_CASE(name, needs)                                                                  \
  void name();                                                                                  \
  const ::tpkernels::test::Registration register_##name(#name, ::tpkernels::test::Needs::needs, \
                                                        &name);                                 \
  void name()

// Options from the command line.
struct Options {
  int calls = 200;             // calls per random sequence
  std::uint64_t seed = 1;      // seed of the sequences and their delays
  bool single_buffer = false;  // negative control: the tests must detect it
  bool skip_waits = false;     // negative control
};
Options& options();

struct Setup {
  int world = 2;
  std::size_t capacity = 1 << 16;
  std::size_t limit = 1 << 16;  // maximum size of a buffer
  double timeout_s = 20, spin_us = 20;
  std::uint32_t epoch = 0;
  unsigned max_delay_us = 0;
};

using Body = std::function<void(host::Channel&)>;

// Creates an arena of `world` regions of `bytes` each, fully committed.
std::shared_ptr<host::Arena> make_arena(int world, std::size_t bytes);
// Creates the channel of one rank in this process. It watches no processes.
std::unique_ptr<host::Channel> make_channel(const Setup& setup, std::shared_ptr<host::Arena> arena,
                                            int rank);

// Runs `body` for each rank in a thread. Rethrows the first exception.
void on_threads(const Setup& setup, const Body& body);

// Runs `body` for each rank in a forked process that watches its peers. Returns the wait statuses.
std::vector<int> on_processes(const Setup& setup, const Body& body);
// Runs `on_processes` and CHECKs that every rank exits with status 0.
void require_success_on_processes(const Setup& setup, const Body& body);

// Returns the Failure that `call` throws. CHECKs that it throws, and the kind.
host::Failure require_failure(host::FailureKind kind, const std::function<void()>& call);
bool was_killed(int status);  // whether `kill_process` caused the wait status
void kill_process(int pid);
bool contains(const std::string& string, const std::string& substring);
// Milliseconds on a clock that is equal for all processes.
double now_ms();
void sleep_ms(double ms);

}  // namespace tpkernels::test
