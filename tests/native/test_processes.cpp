// The channel and the collectives between forked processes, some of which die.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <string>
#include <vector>

#include "collective_cases.h"

namespace tpkernels::test {
namespace {

using host::Channel;
using host::Failure;
using host::FailureKind;
using host::Phase;

constexpr std::uint32_t kCall = 0x1234567;

bool killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

// Slots in a shared page where ranks record the times of events for the parent.
struct Times {
  std::shared_ptr<host::Arena> arena = make_arena(1, 4096);
  double* at(int i) const { return reinterpret_cast<double*>(arena->region(0)) + i; }
};

}  // namespace

TEST_CASE(random_collectives_between_processes, kFork) {
  for (const int world : {1, 2, 4}) {
    const auto segment = make_arena(world, kSegmentBytes);
    Setup setup;
    setup.world = world;
    setup.capacity = 8192;
    setup.max_delay_us = 300;
    setup.epoch = 0xfffffff0u;
    on_processes_that_succeed(setup, [&](Channel& channel) {
      channel.add_segment(1, segment);
      run_random_collectives(channel, options().seed, options().calls, segment);
    });
  }
}

// Without spinning every wait goes to sleep. If the futex wakes it, the wait takes far less than
// the 20 ms after which a sleeper checks by itself.
TEST_CASE(processes_wake_each_other, kFork) {
  Setup setup;
  setup.channel.spin_us = 0;
  on_processes_that_succeed(setup, [](Channel& channel) {
    std::vector<double> took;
    for (int i = 0; i < 60; ++i) {
      const double start = now_ms();
      channel.begin(kCall, "ping()");
      if (channel.rank() == i % 2) sleep_ms(1);
      channel.barrier();
      took.push_back(now_ms() - start);
    }
    std::nth_element(took.begin(), took.begin() + 30, took.end());
    CHECK(took[30] < 10, std::to_string(took[30]) + " ms");
  });
}

TEST_CASE(a_killed_process_is_reported_to_all, kFork) {
  for (const bool by_any : {false, true}) {
    for (const double spin_us : {0.0, 50.0}) {
      Setup setup;
      setup.world = 3;
      setup.channel.spin_us = spin_us;
      const Times times;
      int victim = 0;
      const auto statuses = on_processes(
          setup,
          [&](Channel& channel) {
            channel.begin(kCall, "first()");
            channel.barrier();
            channel.begin(kCall + 1, "second()");
            channel.publish(Phase::kData);
            if (channel.rank() == 1) {
              *times.at(0) = now_ms();
              raise(SIGKILL);
            }
            // Rank 0 waits for the dead rank; rank 2 waits for rank 0 and learns from it.
            const int awaited = channel.rank() == 0 ? 1 : 0;
            const Failure failure = failure_of(FailureKind::kPeerLost, [&] {
              if (by_any) {
                channel.wait_any({awaited}, Phase::kResult);
              } else {
                channel.wait(awaited, Phase::kResult);
              }
            });
            *times.at(1 + channel.rank()) = now_ms();
            const std::string what = failure.what();
            CHECK(failure.peer == 1, what);
            CHECK(contains(what, "rank 0 waited for rank 1 (pid "), what);
            CHECK(contains(what, "whose process has ended; expected call #2, which it had begun"),
                  what);
          },
          [&](const std::vector<int>& pids) { victim = pids[1]; });
      CHECK(victim > 0);
      CHECK(killed(statuses[1]) && statuses[0] == 0 && statuses[2] == 0);
      for (const int rank : {0, 2}) {
        const double took = *times.at(1 + rank) - *times.at(0);
        CHECK(took < 1000, std::to_string(took) + " ms");
      }
    }
  }
}

TEST_CASE(a_process_killed_from_outside_is_reported, kFork) {
  Setup setup;
  setup.world = 4;
  setup.capacity = 4096;
  setup.max_delay_us = 2000;
  setup.channel.timeout_s = 60;
  const Times times;
  const auto statuses = on_processes(
      setup,
      [&](Channel& channel) {
        *times.at(1 + channel.rank()) = 1;
        const Failure failure = failure_of(FailureKind::kPeerLost, [&] {
          run_random_collectives(channel, options().seed, 1 << 30);
        });
        *times.at(1 + channel.rank()) = now_ms();
        CHECK(failure.peer == 2, failure.what());
        CHECK(contains(failure.what(), "for rank 2 (pid "), failure.what());
      },
      [&](const std::vector<int>& pids) {
        sleep_ms(150);
        *times.at(0) = now_ms();
        kill(pids[2], SIGKILL);
      });
  for (int rank = 0; rank < 4; ++rank) {
    const auto status = statuses[static_cast<std::size_t>(rank)];
    if (rank == 2) {
      CHECK(killed(status));
      continue;
    }
    CHECK(status == 0);
    const double took = *times.at(1 + rank) - *times.at(0);
    CHECK(took > 0 && took < 1000, std::to_string(took) + " ms");
  }
}

// Words that a process published before it died count: the call succeeds, the next one fails.
TEST_CASE(words_of_dead_processes_count, kFork) {
  const auto statuses = on_processes(Setup{}, [](Channel& channel) {
    channel.begin(kCall, "last()");
    channel.buffer(channel.rank())[0] = std::byte{42};
    channel.publish(Phase::kData);
    if (channel.rank() == 1) raise(SIGKILL);
    sleep_ms(100);
    channel.wait(1, Phase::kData);
    CHECK(channel.buffer(1)[0] == std::byte{42});
    channel.begin(kCall, "next()");
    const Failure failure =
        failure_of(FailureKind::kPeerLost, [&] { channel.wait(1, Phase::kData); });
    CHECK(contains(failure.what(), "expected call #2, seen #1"), failure.what());
  });
  CHECK(statuses[0] == 0 && killed(statuses[1]));
}

// `watch` is for waits outside the channel: it reports a rank that died or is late, but not one
// that has finished.
TEST_CASE(watch_reports_dead_and_late_ranks, kFork) {
  Setup setup;
  setup.world = 3;
  setup.channel.timeout_s = 0.2;
  const auto statuses = on_processes(setup, [](Channel& channel) {
    channel.begin(kCall, "watched()");
    channel.barrier();
    if (channel.rank() == 1) {  // finishes, then dies
      channel.publish(Phase::kResult);
      raise(SIGKILL);
    }
    if (channel.rank() == 2) {  // waits for rank 0, then dies within the call
      channel.wait(0, Phase::kRead);
      raise(SIGKILL);
    }
    sleep_ms(50);
    channel.watch(Phase::kResult, 0.1);  // before the deadline, while rank 2 is alive
    channel.publish(Phase::kRead);
    sleep_ms(50);
    const Failure lost =
        failure_of(FailureKind::kPeerLost, [&] { channel.watch(Phase::kResult, 0.1); });
    CHECK(lost.peer == 2, lost.what());
  });
  CHECK(statuses[0] == 0 && killed(statuses[1]) && killed(statuses[2]));
}

TEST_CASE(a_stopped_process_is_a_timeout, kFork) {
  Setup setup;
  setup.channel.timeout_s = 0.3;
  const auto statuses = on_processes(
      setup,
      [](Channel& channel) {
        if (channel.rank() == 1) raise(SIGSTOP);
        channel.begin(kCall, "stopped()");
        const double start = now_ms();
        const Failure failure =
            failure_of(channel.rank() == 0 ? FailureKind::kTimeout : FailureKind::kPeerLost,
                       [&] { channel.wait(1 - channel.rank(), Phase::kData); });
        if (channel.rank() != 0) return;
        CHECK(now_ms() - start >= 300);
        CHECK(contains(failure.what(), ", which is alive; expected call #1, seen #0"),
              failure.what());
      },
      [](const std::vector<int>& pids) {
        int status = 0;
        CHECK(waitpid(pids[1], &status, WUNTRACED) == pids[1] && WIFSTOPPED(status));
        siginfo_t ended{};
        CHECK(waitid(P_PID, static_cast<id_t>(pids[0]), &ended, WEXITED | WNOWAIT) == 0);
        kill(pids[1], SIGKILL);
      });
  CHECK(statuses[0] == 0 && killed(statuses[1]));
}

}  // namespace tpkernels::test
