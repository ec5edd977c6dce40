// The channel between threads: data and words in order, every kind of failure, and the messages.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
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

TEST_CASE(words_order_data, kThreads) {
  for (const int world : {1, 2, 3, 4}) {
    Setup setup;
    setup.world = world;
    on_threads(setup, [](Channel& channel) {
      for (int i = 0; i < options().calls; ++i) exchange_values(channel, 257);
    });
  }
}

TEST_CASE(words_order_data_under_delays, kThreads) {
  Setup setup;
  setup.world = 4;
  setup.max_delay_us = 400;
  on_threads(setup, [](Channel& channel) {
    for (int i = 0; i < options().calls; ++i) exchange_values(channel, 257);
  });
}

TEST_CASE(epochs_wrap, kThreads) {
  Setup setup;
  setup.world = 3;
  setup.max_delay_us = 200;
  setup.epoch = 0xfffffff0u;
  on_threads(setup, [](Channel& channel) {
    for (int i = 0; i < 40; ++i) exchange_values(channel, 65);
    CHECK(channel.epoch() == 24, number(channel.epoch()));
  });
}

// Words in fresh memory also hold epoch 0. They must not be mistaken for an arrival.
TEST_CASE(epoch_zero_is_no_arrival, kThreads) {
  Setup setup;
  setup.epoch = 0xffffffffu;
  setup.channel.timeout_s = 0.1;
  on_threads(setup, [](Channel& channel) {
    if (channel.rank() == 1) return;
    channel.begin(kCall, "zero()");
    CHECK(channel.epoch() == 0);
    failure_of(FailureKind::kTimeout, [&] { channel.wait(1, Phase::kData); });
  });
}

TEST_CASE(buffers_grow_between_calls, kThreads) {
  Setup setup;
  setup.world = 3;
  setup.max_delay_us = 200;
  setup.capacity = 4096;
  setup.limit = 1 << 20;
  on_threads(setup, [&](Channel& channel) {
    for (std::size_t bytes = setup.capacity; bytes <= setup.limit; bytes *= 4) {
      if (bytes > channel.capacity()) {
        channel.begin(kOther, "growing()");
        channel.barrier();
        channel.grow(bytes);
      }
      for (int i = 0; i < 3; ++i) exchange_values(channel, bytes / 4 - static_cast<unsigned>(i));
    }
    bool refused = false;
    try {
      channel.grow(setup.limit * 2);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  });
}

// A fork has the rank's memory. It must not take the rank's place in a call or signal the peers.
TEST_CASE(a_fork_of_a_rank_is_not_a_rank, kFork) {
  Setup setup;
  on_processes_that_succeed(setup, [](Channel& channel) {
    exchange_values(channel, 5);
    const int pid = static_cast<int>(fork());
    CHECK(pid >= 0);
    if (pid == 0) {
      const Failure failure =
          failure_of(FailureKind::kBroken, [&] { channel.begin(kCall, "forked()"); });
      const bool clear =
          contains(failure.what(), "is a fork of rank " + std::to_string(channel.rank()));
      channel.abandon("the end of a child");
      _exit(clear ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    for (int i = 0; i < 3; ++i) exchange_values(channel, 5);
  });
}

TEST_CASE(every_rank_detects_a_mismatch, kThreads) {
  for (const bool late : {false, true}) {
    for (int odd = 0; odd < 3; ++odd) {
      Setup setup;
      setup.world = 3;
      on_threads(setup, [=](Channel& channel) {
        for (int i = 0; i < 2; ++i) exchange_values(channel, 3);  // fill the text slots
        if (late && channel.rank() == 2) sleep_ms(100);           // the others have failed by then
        const bool different = channel.rank() == odd;
        const double start = now_ms();
        const Failure failure = failure_of(FailureKind::kMismatch, [&] {
          channel.begin(different ? kOther : kCall + 1, different ? "other(7)" : "call(5)");
          channel.barrier();
        });
        CHECK(now_ms() - start < 5000);
        const std::string what = failure.what();
        CHECK(contains(what, "is in " + std::string(different ? "other(7)" : "call(5)")), what);
        CHECK(contains(what, different ? " is in call(5)" : " is in other(7)"), what);
        CHECK(contains(what, "both as call #3 of the group"), what);
        CHECK(different ? failure.peer != odd : failure.peer == odd, what);
      });
    }
  }
}

TEST_CASE(every_rank_learns_of_a_rank_that_leaves, kThreads) {
  Setup setup;
  setup.world = 3;
  on_threads(setup, [](Channel& channel) {
    channel.begin(kCall, "leaving()");
    if (channel.rank() == 2) {
      sleep_ms(30);
      channel.abandon("ArithmeticError: no luck");
      failure_of(FailureKind::kBroken, [&] { channel.begin(kCall, "more()"); });
      return;
    }
    // Rank 0 waits only for rank 1, and learns from it what happened to rank 2.
    const int awaited = channel.rank() + 1;
    const double start = now_ms();
    const Failure failure =
        failure_of(FailureKind::kPeerLost, [&] { channel.wait(awaited, Phase::kData); });
    CHECK(now_ms() - start < 5000);
    CHECK(failure.peer == 2, failure.what());
    CHECK(contains(failure.what(), "rank 2"), failure.what());
    CHECK(contains(failure.what(), "it left the call with ArithmeticError: no luck"),
          failure.what());
  });
}

TEST_CASE(a_rank_that_leaves_may_blame_another, kThreads) {
  Setup setup;
  setup.world = 3;
  on_threads(setup, [](Channel& channel) {
    channel.begin(kCall, "blaming()");
    if (channel.rank() == 0) channel.abandon("a deadline", FailureKind::kTimeout, 2);
    if (channel.rank() != 1) return;
    const Failure late = failure_of(FailureKind::kTimeout, [&] { channel.wait(0, Phase::kData); });
    CHECK(late.peer == 2 && contains(late.what(), "with a deadline"), late.what());
  });
}

// A rank that has published its last word may leave: the call has succeeded.
TEST_CASE(leaving_after_the_last_word_is_no_failure, kThreads) {
  for (int i = 0; i < 100; ++i) {
    Setup setup;
    setup.channel.spin_us = 0;
    on_threads(setup, [](Channel& channel) {
      channel.begin(kCall, "last()");
      if (channel.rank() == 0) channel.wait(1, Phase::kData);
      channel.publish(Phase::kData);
      if (channel.rank() == 0) channel.abandon("tpkernels.finalize");
      if (channel.rank() == 1) channel.wait(0, Phase::kData);
    });
  }
}

// Peers read a segment in place, and it is the user's again once a rank has left the call.
TEST_CASE(what_a_rank_that_left_has_overwritten_is_no_data, kThreads) {
  auto arena = make_arena(2, 4096);
  const std::weak_ptr<host::Arena> segment = arena;
  std::atomic<bool> left{false};
  on_threads(Setup{}, [&](Channel& channel) {
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

TEST_CASE(an_exception_from_poll_ends_a_wait, kThreads) {
  on_threads(Setup{}, [](Channel& channel) {
    channel.begin(kCall, "interrupted()");
    if (channel.rank() == 0) {
      channel.set_poll([] { throw std::domain_error("interrupted"); });
      bool thrown = false;
      try {
        channel.wait(1, Phase::kData);
      } catch (const std::domain_error&) {
        thrown = true;
      }
      CHECK(thrown);
      channel.abandon("an interrupt");
      return;
    }
    const Failure failure =
        failure_of(FailureKind::kPeerLost, [&] { channel.wait(0, Phase::kData); });
    CHECK(contains(failure.what(), "it left the call with an interrupt"), failure.what());
  });
}

TEST_CASE(long_texts_are_truncated, kThreads) {
  on_threads(Setup{}, [](Channel& channel) {
    const bool different = channel.rank() == 1;
    const std::string text = (different ? "other(" : "call(") + std::string(5000, 'x') + ")";
    const Failure failure = failure_of(FailureKind::kMismatch, [&] {
      channel.begin(different ? kOther : kCall, text);
      channel.barrier();
    });
    const std::string what = failure.what();
    CHECK(contains(what, "call(xxx") && contains(what, "other(xxx"), what);
    CHECK(what.size() < 2000);
  });
}

}  // namespace tpkernels::test
