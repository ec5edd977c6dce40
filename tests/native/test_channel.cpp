// The channel between threads: order of data and words, every kind of failure, and what it says.
#include <atomic>
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

// One call in which every rank writes its buffer and reads all others'; the values tell rank, epoch
// and place.
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

void timeout_of(double spin_us) {
  Setup setup;
  setup.channel = {0.15, spin_us};
  on_threads(setup, [](Channel& channel) {
    if (channel.rank() == 1) return;
    channel.begin(kCall, "lonely()");
    const double start = now_ms();
    const Failure failure =
        failure_of(FailureKind::kTimeout, [&] { channel.wait(1, Phase::kData); });
    const double waited = now_ms() - start;
    CHECK(waited >= 150 && waited < 900, std::to_string(waited) + " ms");
    CHECK(failure.peer == 1);
    const std::string what = failure.what();
    CHECK(contains(what, "lonely(): rank 0 waited 0."), what);
    CHECK(contains(what, "for rank 1 (pid "), what);
    CHECK(contains(what, "which lives; expected call #1, seen #0"), what);
    const Failure again =
        failure_of(FailureKind::kBroken, [&] { channel.begin(kCall, "again()"); });
    CHECK(contains(again.what(), "It broke with: lonely(): rank 0 waited"), again.what());
  });
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

// Epoch 0 is what words of fresh memory hold as well: it must not be taken for an arrival.
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

TEST_CASE(growth_keeps_the_epoch, kThreads) {
  Setup small;
  small.world = 3;
  small.max_delay_us = 200;
  small.epoch = 0xfffffffdu;  // the growth itself is the wrap
  Setup large = small;
  large.capacity = 1 << 20;
  const auto arena = make_arena(3, Channel::region_bytes(3, large.capacity));
  on_threads(small, [&](Channel& channel) {
    exchange_values(channel, 33);
    channel.begin(kOther, "growing()");
    channel.barrier();
    Setup grown = large;
    grown.epoch = channel.epoch();
    const auto next = make_channel(grown, arena, channel.rank());
    CHECK(next->capacity() == large.capacity);
    for (int i = 0; i < 5; ++i) exchange_values(*next, (large.capacity / 4) >> i);
    CHECK(next->epoch() == 4, number(next->epoch()));
  });
}

TEST_CASE(wait_any_takes_peers_in_order_of_arrival, kThreads) {
  Setup setup;
  setup.world = 4;
  for (const double spin_us : {0.0, 50.0}) {
    setup.channel.spin_us = spin_us;
    on_threads(setup, [](Channel& channel) {
      for (int call = 0; call < 8; ++call) {
        channel.begin(kCall, "relay()");
        if (channel.rank() == 0) {  // 3, 2, 1: each peer is let go when the one before has come
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
}

TEST_CASE(a_sleeper_is_woken, kThreads) {
  Setup setup;
  setup.channel.spin_us = 0;
  on_threads(setup, [](Channel& channel) {
    for (int i = 0; i < 3; ++i) {
      if (channel.rank() == i % 2) sleep_ms(30);  // the other one is asleep by then
      exchange_values(channel, 8);
    }
  });
}

TEST_CASE(timeout, kThreads) { timeout_of(20); }
TEST_CASE(timeout_without_spinning, kThreads) { timeout_of(0); }

TEST_CASE(timeout_of_wait_any, kThreads) {
  Setup setup;
  setup.world = 3;
  setup.channel.timeout_s = 0.15;
  on_threads(setup, [](Channel& channel) {
    if (channel.rank() == 2) return;
    channel.begin(kCall, "any()");
    channel.publish(Phase::kData);
    std::vector<int> waiting{1 - channel.rank(), 2};
    CHECK(channel.wait_any(waiting, Phase::kData) == waiting[0]);
    const Failure failure =
        failure_of(FailureKind::kTimeout, [&] { channel.wait_any({2}, Phase::kData); });
    CHECK(failure.peer == 2);
  });
}

TEST_CASE(a_mismatch_is_found_by_all, kThreads) {
  for (const bool late : {false, true}) {
    for (int odd = 0; odd < 3; ++odd) {
      Setup setup;
      setup.world = 3;
      on_threads(setup, [=](Channel& channel) {
        for (int i = 0; i < 2; ++i) exchange_values(channel, 3);  // leave texts of their own
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

TEST_CASE(a_rank_that_leaves_is_told_to_all, kThreads) {
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
    // Rank 0 waits for rank 1 only, and learns through it what became of rank 2.
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

// A rank that has said all it had to say may leave: the call has succeeded.
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

TEST_CASE(an_exception_of_the_poll_ends_a_wait, kThreads) {
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

TEST_CASE(long_texts_are_cut, kThreads) {
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
