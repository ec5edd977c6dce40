// The mailbox between threads. Processes, one of which dies, are in tests/launch/test_mailbox.py.
#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "host/mailbox.h"

namespace tpkernels::test {
namespace {

using host::Arena;
using host::Mailbox;

constexpr double kSlice = 5;  // s; a lost wake-up costs this

std::shared_ptr<Arena> mailboxes(int regions, std::size_t capacity, int readers) {
  return make_arena(regions, Mailbox::region_bytes(capacity, readers));
}

std::byte byte_at(std::size_t position) {
  return static_cast<std::byte>(position * 2654435761u >> 13);
}

// Random sizes and pauses. Mostly none, sometimes long enough for the other side to fall asleep.
class Source {
 public:
  explicit Source(std::uint64_t seed) : random_(seed) {}
  std::size_t size(std::size_t most) {
    constexpr std::size_t kSizes[] = {1, 16, 900, 9000};
    return std::min(most, kSizes[random_() % 4]);
  }
  void pause() {
    CHECK(now_ms() - start_ < kSlice * 1e3, "a wake-up was lost");
    if (random_() % 16 == 0) sleep_ms(static_cast<double>(random_() % 100) * 0.01);
  }

 private:
  std::mt19937_64 random_;
  double start_ = now_ms();
};

// One end, with random delays between the steps of the protocol.
class End : public Mailbox {
 public:
  End(const std::shared_ptr<Arena>& arena, int region, int readers, std::uint64_t seed,
      double spin_us = 0)
      : Mailbox(arena, region, readers, region, spin_us) {
    set_delay([random = std::mt19937_64(seed)]() mutable {
      const auto drawn = random() % 64;
      if (drawn == 0) sleep_ms(0.2);
      if (drawn < 8) std::this_thread::yield();
    });
  }
};

void write_all(Mailbox& box, std::size_t total, std::uint64_t seed) {
  Source source(seed);
  std::vector<std::byte> part;
  for (std::size_t at = 0; at < total; at += part.size()) {
    part.resize(source.size(total - at));
    for (std::size_t i = 0; i < part.size(); ++i) part[i] = byte_at(at + i);
    CHECK(box.write(part.data(), part.size(), kSlice) == part.size(), "a wake-up was lost");
    source.pause();
  }
}

void read_all(Mailbox& box, int reader, std::size_t total, std::uint64_t seed) {
  Source source(seed);
  std::vector<std::byte> part;
  for (std::size_t at = 0; at < total; at += part.size()) {
    part.resize(source.size(total - at));
    CHECK(box.read(reader, part.data(), part.size(), kSlice) == part.size(), "a wake-up was lost");
    for (std::size_t i = 0; i < part.size(); ++i) {
      CHECK(part[i] == byte_at(at + i), "byte " + std::to_string(at + i));
    }
    source.pause();
  }
}

constexpr int kReaders = 2;

// Bytes through a ring of `capacity` bytes between a writer and readers.
void stream(std::size_t capacity, std::size_t total, double spin_us) {
  const auto arena = mailboxes(1, capacity, kReaders);
  std::vector<std::thread> threads;
  std::exception_ptr failed[kReaders + 1];
  for (int end = 0; end <= kReaders; ++end) {
    threads.emplace_back([&, end] {
      const std::uint64_t seed = options().seed * 1000 + static_cast<unsigned>(end);
      try {
        End box(arena, 0, kReaders, seed, spin_us);
        end < kReaders ? read_all(box, end, total, seed) : write_all(box, total, seed);
      } catch (...) {
        failed[end] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : failed) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

// Most messages wrap around. A small ring is full or empty most of the time: where nobody polls,
// each side sleeps often, and each store has to wake the other.
TEST_CASE(mailbox_orders_bytes_under_delays, kThreads) {
  for (const double spin_us : {0.0, 50.0}) {
    stream(5000, 300000, spin_us);
    stream(64, 20000, spin_us);
  }
}

}  // namespace tpkernels::test
