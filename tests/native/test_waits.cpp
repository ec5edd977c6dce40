// Waits of ranks: order of arrival, wake-ups, polling budget, and CPU time.
#include <atomic>
#include <cmath>
#include <ctime>
#include <string>
#include <vector>

#include "check.h"
#include "host/wait.h"

namespace tpkernels::test {
namespace {

using host::Channel;
using host::Phase;

constexpr std::uint32_t kCall = 0x1234567;

// Simulates Linux before 5.16 and seccomp filters, where a thread can wait for one futex only.
class WithoutWaitv {
 public:
  WithoutWaitv() { host::futex_waitv_works = false; }
  ~WithoutWaitv() { host::futex_waitv_works = before_; }
  WithoutWaitv(const WithoutWaitv&) = delete;
  WithoutWaitv& operator=(const WithoutWaitv&) = delete;

 private:
  bool before_ = host::futex_waitv_works;
};

double thread_ms() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

void relay(double spin_us) {
  on_threads({.world = 4, .spin_us = spin_us}, [](Channel& channel) {
    for (int call = 0; call < 8; ++call) {
      channel.begin(kCall, "relay()");
      if (channel.rank() == 0) {  // release peers 3, 2, 1, each after the previous has published
        std::vector<int> waiting{1, 2, 3};
        for (int next = 3; next >= 1; --next) {
          channel.publish(Phase::kResult, next);
          CHECK(channel.wait_any(waiting, Phase::kData) == next);
          waiting.erase(waiting.begin() + next - 1);
        }
      } else {
        channel.wait(0, Phase::kResult, channel.rank());
        channel.publish(Phase::kData);
      }
    }
  });
}

// Returns the CPU time per second of a thread that waits for many late peers.
double cpu_load_of_waiting(int peers) {
  std::atomic<double> load{0};
  on_threads({.world = peers + 1, .spin_us = 50}, [&](Channel& channel) {
    channel.begin(kCall, "late()");
    if (channel.rank() != 0) {
      sleep_ms(400 + 2 * channel.rank());
      channel.publish(Phase::kData);
      channel.wait(0, Phase::kData);
      return;
    }
    std::vector<int> waiting;
    for (int peer = 1; peer <= peers; ++peer) waiting.push_back(peer);
    const double start = now_ms(), before = thread_ms();
    while (!waiting.empty()) {
      const int next = channel.wait_any(waiting, Phase::kData);
      for (std::size_t i = 0; i < waiting.size(); ++i) {
        if (waiting[i] == next) waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i--));
      }
    }
    load = (thread_ms() - before) / (now_ms() - start);
    channel.publish(Phase::kData);
  });
  return load;
}

}  // namespace

TEST_CASE(wait_any_returns_peers_in_order_of_arrival, kThreads) {
  const double start = now_ms();
  for (const double spin_us : {0.0, 50.0}) relay(spin_us);
  // 48 waits. Without wake-ups a sleeper checks every 20 ms, which took 1069 ms. With wake-ups a
  // loaded machine needed 207 ms under AddressSanitizer.
  const double elapsed_ms = now_ms() - start;
  CHECK(elapsed_ms < 480, std::to_string(elapsed_ms) + " ms");
  const WithoutWaitv without_waitv;
  for (const double spin_us : {0.0, 50.0}) relay(spin_us);
}

// A peer may need the core of a waiting thread.
TEST_CASE(waiting_for_many_is_cheap, kThreads) {
  const double load = cpu_load_of_waiting(14);
  CHECK(load < 0.02, std::to_string(load) + " of a core");
}

// Returns the polling time of the wait that follows `waits` waits of `waited_us`, with `apart_us`
// of work after each.
double polling_time_after(double waited_us, double apart_us, int waits = 100,
                          double max_us = 2000) {
  host::SpinBudget budget(max_us);
  double now = 1e6, limit = 0;
  for (int i = 0; i < waits; ++i) {
    limit = budget.begin(now);
    budget.end(waited_us, std::min(waited_us, limit));
    now += waited_us + apart_us;
  }
  return budget.begin(now);
}

TEST_CASE(waiters_poll_through_the_waits_that_are_usual, kThreads) {
  CHECK(polling_time_after(10, 100) == 2000);
  CHECK(polling_time_after(500, 5000) == 2000);
  CHECK(polling_time_after(50e3, 1000) == 100, "polling would not help");
  CHECK(polling_time_after(50e3, 1000, 3) == 2000, "some long waits make waiters give up");
  CHECK(polling_time_after(100, 1000, 100, 0) == 0);
}

TEST_CASE(polling_never_takes_more_than_half_of_the_time, kThreads) {
  for (const double waited_us : {20.0, 1900.0, 5000.0}) {
    host::SpinBudget budget(2000);
    double now = 1e6, polled = 0;
    while (now < 11e6) {  // no work between the waits
      const double limit = std::min(waited_us, budget.begin(now));
      budget.end(waited_us, limit);
      polled += limit;
      now += waited_us;
    }
    CHECK(polled < 0.51 * 10e6, std::to_string(polled) + " us");
  }
}

}  // namespace tpkernels::test
