// The arena and the channel between threads: data and words in order, every kind of failure, and
// the messages.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace tpkernels::test {
namespace {

using host::Channel;
using host::Failure;
using host::FailureKind;
using host::Phase;

constexpr std::uint32_t kCall = 0x1234567;
constexpr std::uint32_t kOther = 0x7654321;

template <class Error, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  check_failed("the call throws", __FILE__, __LINE__, "it succeeded");
}

std::string number(std::uint32_t value) { return std::to_string(value); }

// One call in which every rank writes its buffer and reads those of all others. The values encode
// rank, epoch and index.
void exchange_values(Channel& channel, std::size_t count) {
  channel.begin(kCall, "exchange_values()");
  const auto value = [&](int rank, std::size_t i) {
    return static_cast<std::uint32_t>(rank) * 1000003u + channel.epoch() * 97u +
           static_cast<std::uint32_t>(i);
  };
  auto* own = reinterpret_cast<std::uint32_t*>(channel.buffer(channel.rank()));
  for (std::size_t i = 0; i < count; ++i) own[i] = value(channel.rank(), i);
  channel.publish(Phase::kData);
  for (int i = 1; i < channel.world(); ++i) {
    const int peer = (channel.rank() + i) % channel.world();
    channel.wait(peer, Phase::kData);
    const auto* theirs = reinterpret_cast<const std::uint32_t*>(channel.buffer(peer));
    for (std::size_t k = 0; k < count; ++k) {
      CHECK(theirs[k] == value(peer, k), "epoch " + number(channel.epoch()) + ": rank " +
                                             number(static_cast<unsigned>(peer)) + " wrote " +
                                             number(theirs[k]));
    }
  }
}

}  // namespace

// The memory. Seals and refusals are in tests/failures/test_left.py and tests/symm/test_set_up.py.

TEST_CASE(only_committed_parts_take_memory, kThreads) {
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
  const std::size_t one = allocated();
  CHECK(one > before && one < 2 * region, std::to_string(one));
  arena.commit(1, 0, region);
  CHECK(allocated() >= region);
  std::memset(arena.region(1), 7, 100);
  arena.give_back(1, 100, region - 100);
  CHECK(allocated() <= one, std::to_string(allocated()));
  CHECK(arena.region(1)[0] == std::byte{7} && arena.region(1)[99] == std::byte{7});
  error_of<std::out_of_range>([&] { arena.give_back(1, 1, region); });
  error_of<std::out_of_range>([&] { arena.commit(1, 1, region); });
  error_of<std::out_of_range>([&] { arena.commit(2, 0, 1); });
  close(fd);
}

TEST_CASE(committed_parts_cover_buffers_that_do_not_overlap, kThreads) {
  for (const int world : {1, 3, 64}) {
    const std::size_t limit = std::size_t{1} << 20;
    const std::size_t bytes = Channel::region_bytes(world, limit);
    const auto arena = make_arena(world, bytes);
    std::vector<char> committed(bytes, 0);
    std::size_t from = 0;
    for (const std::size_t to : {std::size_t{5000}, std::size_t{70000}, limit}) {
      for (const auto& [offset, size] : Channel::parts(world, bytes, from, to)) {
        CHECK(offset + size <= bytes);
        std::memset(committed.data() + offset, 1, size);
      }
      const auto channel = make_channel({.world = world, .capacity = to}, arena, 0);
      CHECK(channel->buffer_offset(0) + to <= channel->buffer_offset(1));
      CHECK(channel->buffer_offset(1) + to <= bytes && channel->buffer_offset(0) % 4096 == 0);
      for (std::size_t i = 0; i < channel->buffer_offset(0) + to; ++i) CHECK(committed[i]);
      for (std::size_t i = 0; i < to; ++i) CHECK(committed[channel->buffer_offset(1) + i]);
      from = to;
    }
  }
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

// Words in fresh memory also hold epoch 0. They must not be mistaken for an arrival.
TEST_CASE(epoch_zero_is_no_arrival, kThreads) {
  on_threads({.timeout_s = 0.1, .epoch = 0xffffffffu}, [](Channel& channel) {
    if (channel.rank() == 1) return;
    channel.begin(kCall, "zero()");
    CHECK(channel.epoch() == 0);
    failure_of(FailureKind::kTimeout, [&] { channel.wait(1, Phase::kData); });
  });
}

TEST_CASE(buffers_grow_between_calls, kThreads) {
  const Setup setup{.world = 3, .capacity = 4096, .limit = 1 << 20, .max_delay_us = 200};
  on_threads(setup, [&](Channel& channel) {
    for (std::size_t bytes = setup.capacity; bytes <= setup.limit; bytes *= 4) {
      if (bytes > channel.capacity()) {
        channel.begin(kOther, "growing()");
        channel.barrier();
        channel.grow(bytes);
      }
      for (int i = 0; i < 3; ++i) exchange_values(channel, bytes / 4 - static_cast<unsigned>(i));
    }
    error_of<std::invalid_argument>([&] { channel.grow(setup.limit * 2); });
  });
}

// Peers read a segment in place, and it is the user's again once a rank has left the call.
TEST_CASE(what_a_rank_that_left_has_overwritten_is_no_data, kThreads) {
  auto arena = make_arena(2, 4096);
  const std::weak_ptr<host::Arena> segment = arena;
  std::atomic<bool> left{false};
  on_threads({}, [&](Channel& channel) {
    channel.add_segment(1, segment);
    if (channel.rank() == 1) {
      while (!left) sleep_ms(1);
    }
    channel.begin(kCall, "late()");
    channel.locate(1, 0);
    channel.publish(Phase::kData);
    if (channel.rank() == 0) {
      channel.abandon("a deadline", FailureKind::kTimeout, 1);
      arena->region(0)[0] = std::byte{9};
      left = true;
      return;
    }
    channel.wait(0, Phase::kData);
    const std::byte* theirs = channel.data(0, 64);
    arena = nullptr;  // another thread frees the tensor
    CHECK(!segment.expired() && theirs[0] == std::byte{9});
    const Failure failure = failure_of(FailureKind::kTimeout, [&] { channel.end_read(0); });
    CHECK(segment.expired());
    CHECK(contains(failure.what(), "has read the memory of rank 0"), failure.what());
  });
}

// Between processes. Those that are killed or stopped are in tests/failures.

// Without spinning every wait goes to sleep. If the futex wakes it, the wait takes far less than
// the 20 ms after which a sleeper checks by itself.
TEST_CASE(processes_wake_each_other, kFork) {
  on_processes_that_succeed({.spin_us = 0}, [](Channel& channel) {
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

// Words that a process published before it died count: the call succeeds, the next one fails.
TEST_CASE(words_of_dead_processes_count, kFork) {
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
        failure_of(FailureKind::kPeerLost, [&] { channel.wait(1, Phase::kData); });
    CHECK(contains(failure.what(), "expected call #2, seen #1"), failure.what());
  });
  CHECK(statuses[0] == 0 && was_killed(statuses[1]));
}

}  // namespace tpkernels::test
