// The arena and the channel between threads: order of data and signals, failures, and error
// messages. Also wake-ups and exits of processes.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace tpkernels::test {
namespace {

using host::Channel;
using host::Failure;
using host::FailureKind;
using host::Phase;

constexpr std::uint32_t kCall = 0x1234567;
constexpr std::uint32_t kGrowCall = 0x7654321;

template <class Error, class F>
std::string require_error(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  check_failed("the call throws", __FILE__, __LINE__, "it succeeded");
}

std::string to_string(std::uint32_t value) { return std::to_string(value); }

// Runs a call in which every rank writes its buffer and reads the buffers of all peers. The values
// encode rank, epoch and index.
void exchange_values(Channel& channel, std::size_t count) {
  channel.begin(kCall, "exchange_values()");
  const auto value = [&](int rank, std::size_t i) {
    return static_cast<std::uint32_t>(rank) * 1000003u + channel.epoch() * 97u +
           static_cast<std::uint32_t>(i);
  };
  auto* local = reinterpret_cast<std::uint32_t*>(channel.buffer(channel.rank()));
  for (std::size_t i = 0; i < count; ++i) local[i] = value(channel.rank(), i);
  channel.publish(Phase::kData);
  for (int i = 1; i < channel.world(); ++i) {
    const int peer = (channel.rank() + i) % channel.world();
    channel.wait(peer, Phase::kData);
    const auto* remote = reinterpret_cast<const std::uint32_t*>(channel.buffer(peer));
    for (std::size_t k = 0; k < count; ++k) {
      CHECK(remote[k] == value(peer, k), "epoch " + to_string(channel.epoch()) + ": rank " +
                                             to_string(static_cast<unsigned>(peer)) + " wrote " +
                                             to_string(remote[k]));
    }
  }
}

}  // namespace

// Memory of the arena. For seals and refusals see tests/failures/test_left.py and
// tests/symm/test_set_up.py.

TEST_CASE(only_committed_ranges_use_memory, kThreads) {
  const std::size_t region = std::size_t{4} << 20;
  const int fd = host::Arena::create(region, 2);
  host::Arena arena(fd, region, 2);
  const auto allocated = [&] {
    struct stat info{};
    CHECK(fstat(fd, &info) == 0);
    return static_cast<std::size_t>(info.st_blocks) * 512;
  };
  const std::size_t before = allocated();
  arena.commit(1, 0, 100);
  const std::size_t after_commit = allocated();
  CHECK(after_commit > before && after_commit < 2 * region, std::to_string(after_commit));
  arena.commit(1, 0, region);
  CHECK(allocated() >= region);
  std::memset(arena.region(1), 7, 100);
  arena.decommit(1, 100, region - 100);
  CHECK(allocated() <= after_commit, std::to_string(allocated()));
  CHECK(arena.region(1)[0] == std::byte{7} && arena.region(1)[99] == std::byte{7});
  require_error<std::out_of_range>([&] { arena.decommit(1, 1, region); });
  require_error<std::out_of_range>([&] { arena.commit(1, 1, region); });
  require_error<std::out_of_range>([&] { arena.commit(2, 0, 1); });
  close(fd);
}

TEST_CASE(committed_ranges_cover_disjoint_buffers, kThreads) {
  for (const int world : {1, 3, 64}) {
    const std::size_t limit = std::size_t{1} << 20;
    const std::size_t bytes = Channel::region_bytes(world, limit);
    const auto arena = make_arena(world, bytes);
    std::vector<char> committed(bytes, 0);
    std::size_t begin_bytes = 0;
    for (const std::size_t end_bytes : {std::size_t{5000}, std::size_t{70000}, limit}) {
      for (const auto& [offset, size] :
           Channel::commit_ranges(world, bytes, begin_bytes, end_bytes)) {
        CHECK(offset + size <= bytes);
        std::memset(committed.data() + offset, 1, size);
      }
      const auto channel = make_channel({.world = world, .capacity = end_bytes}, arena, 0);
      CHECK(channel->buffer_offset(0) + end_bytes <= channel->buffer_offset(1));
      CHECK(channel->buffer_offset(1) + end_bytes <= bytes &&
            channel->buffer_offset(0) % 4096 == 0);
      for (std::size_t i = 0; i < channel->buffer_offset(0) + end_bytes; ++i) CHECK(committed[i]);
      for (std::size_t i = 0; i < end_bytes; ++i) CHECK(committed[channel->buffer_offset(1) + i]);
      begin_bytes = end_bytes;
    }
  }
}

// Records of calls.

TEST_CASE(readers_never_get_a_torn_record, kThreads) {
  constexpr std::uint32_t kCalls = 50000;
  const auto arena = make_arena(1, Channel::region_bytes(1, 4096));
  const auto channel = make_channel({.world = 1, .capacity = 4096}, arena, 0);
  const auto text = [](std::uint32_t number) {
    std::string text;
    for (int i = 0; i < 12; ++i) text += to_string(number);
    return text;
  };
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (std::uint32_t i = 1; i <= kCalls; ++i) {
      host::set_caller(text(i));
      channel->begin(i, text(i));
      if (i % 3 == 0) channel->end_call();
    }
    done = true;
  });
  const std::size_t offset = [&] {
    const auto& info = *reinterpret_cast<const host::RankInfo*>(arena->region(0));
    return static_cast<std::size_t>(info.ring_offset.load());
  }();
  std::size_t copies = 0;
  std::string wrong;
  while (!done) {
    for (const host::CallInfo& call : host::read_rank(arena->region(0), offset, 64).calls) {
      ++copies;
      if (call.text != text(call.number) || call.caller != call.text) wrong = call.text;
    }
  }
  writer.join();
  CHECK(wrong.empty(), wrong);
  CHECK(copies > 0);
  CHECK(host::read_rank(arena->region(0), offset, 99).calls.size() == host::kRecordedCalls);
}

// Calls.

TEST_CASE(words_order_data_under_delays, kThreads) {
  for (const int world : {1, 2, 4}) {
    on_threads({.world = world, .epoch = 0xfffffff0u, .max_delay_us = 400}, [](Channel& channel) {
      for (int i = 0; i < options().calls; ++i) exchange_values(channel, 257);
      CHECK(channel.epoch() == static_cast<unsigned>(options().calls) - 16);
    });
  }
}

// Signals in fresh memory are zero, which also encodes epoch 0. They must not count as an arrival.
TEST_CASE(fresh_memory_is_not_an_arrival, kThreads) {
  on_threads({.timeout_s = 0.1, .epoch = 0xffffffffu}, [](Channel& channel) {
    if (channel.rank() == 1) return;
    channel.begin(kCall, "zero()");
    CHECK(channel.epoch() == 0);
    require_failure(FailureKind::kTimeout, [&] { channel.wait(1, Phase::kData); });
  });
}

TEST_CASE(buffers_grow_between_calls, kThreads) {
  const Setup setup{.world = 3, .capacity = 4096, .limit = 1 << 20, .max_delay_us = 200};
  on_threads(setup, [&](Channel& channel) {
    for (std::size_t bytes = setup.capacity; bytes <= setup.limit; bytes *= 4) {
      if (bytes > channel.capacity()) {
        channel.begin(kGrowCall, "growing()");
        channel.barrier();
        channel.grow(bytes);
      }
      for (int i = 0; i < 3; ++i) exchange_values(channel, bytes / 4 - static_cast<unsigned>(i));
    }
    require_error<std::invalid_argument>([&] { channel.grow(setup.limit * 2); });
  });
}

// A peer reads a segment in place. After the owner leaves the call early, the user may overwrite
// it, so the call of the peer must fail.
TEST_CASE(data_overwritten_after_an_early_exit_is_an_error, kThreads) {
  auto arena = make_arena(2, 4096);
  const std::weak_ptr<host::Arena> segment = arena;
  std::atomic<bool> left{false};
  on_threads({}, [&](Channel& channel) {
    channel.add_segment(1, segment);
    if (channel.rank() == 1) {
      while (!left) sleep_ms(1);
    }
    channel.begin(kCall, "late()");
    channel.set_location(1, 0);
    channel.publish(Phase::kData);
    if (channel.rank() == 0) {
      channel.abandon("a deadline", FailureKind::kTimeout, 1);
      arena->region(0)[0] = std::byte{9};
      left = true;
      return;
    }
    channel.wait(0, Phase::kData);
    const std::byte* remote = channel.data(0, 64);
    arena = nullptr;  // as if a second thread frees the tensor
    CHECK(!segment.expired() && remote[0] == std::byte{9});
    const Failure failure = require_failure(FailureKind::kTimeout, [&] { channel.end_read(0); });
    CHECK(segment.expired());
    CHECK(contains(failure.what(), "has read the memory of rank 0"), failure.what());
  });
}

// Between processes. Killed and stopped processes are tested in tests/failures.

// Every wait sleeps, because polling is disabled. A wake-up by futex is much faster than the 20 ms
// between two checks of a sleeper.
TEST_CASE(processes_wake_each_other, kFork) {
  require_success_on_processes({.spin_us = 0}, [](Channel& channel) {
    std::vector<double> durations_ms;
    for (int i = 0; i < 60; ++i) {
      const double start = now_ms();
      channel.begin(kCall, "ping()");
      if (channel.rank() == i % 2) sleep_ms(1);
      channel.barrier();
      durations_ms.push_back(now_ms() - start);
    }
    std::nth_element(durations_ms.begin(), durations_ms.begin() + 30, durations_ms.end());
    CHECK(durations_ms[30] < 10, std::to_string(durations_ms[30]) + " ms");
  });
}

// Signals published before a process died count: the call succeeds, and the next call fails.
TEST_CASE(signals_of_killed_processes_count, kFork) {
  const auto statuses = on_processes({}, [](Channel& channel) {
    channel.begin(kCall, "last()");
    channel.buffer(channel.rank())[0] = std::byte{42};
    channel.publish(Phase::kData);
    if (channel.rank() == 1) kill_process(getpid());
    sleep_ms(100);
    channel.wait(1, Phase::kData);
    CHECK(channel.buffer(1)[0] == std::byte{42});
    channel.begin(kCall, "next()");
    const Failure failure =
        require_failure(FailureKind::kPeerLost, [&] { channel.wait(1, Phase::kData); });
    CHECK(contains(failure.what(), "expected call #2, seen #1"), failure.what());
  });
  CHECK(statuses[0] == 0 && was_killed(statuses[1]));
}

}  // namespace tpkernels::test
