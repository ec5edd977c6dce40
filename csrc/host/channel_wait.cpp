// How a rank waits for its peers: it polls, then yields its core between polls, then sleeps.
#include <sched.h>

#include <algorithm>
#include <optional>

#include "host/channel.h"
#include "host/clock.h"
#include "host/futex.h"
#include "host/region.h"

namespace tpkernels::host {
namespace {

constexpr double kSlice = 0.02;  // s between checks of the peers while asleep
// s between checks of words that the waiter cannot sleep on: at first, and after backing off.
constexpr double kBlindSlice = 5e-4, kLongestBlindSlice = 5e-3;

// Reports a wait to the callback of set_on_wait.
class WaitReport {
 public:
  explicit WaitReport(const std::function<void(bool)>& on_wait) : on_wait_(on_wait) {
    if (on_wait_) on_wait_(true);
  }
  ~WaitReport() {
    if (on_wait_) on_wait_(false);
  }
  WaitReport(const WaitReport&) = delete;
  WaitReport& operator=(const WaitReport&) = delete;

 private:
  const std::function<void(bool)>& on_wait_;
};

}  // namespace

bool Channel::arrived(int peer, const Signal& signal) const {
  const std::uint64_t word = signal.word.load(std::memory_order_acquire);
  if (word == word_of(signature_, epoch_)) return true;
  if (epoch_of(word) == epoch_ && word != 0) check_mismatch(peer);
  return false;
}

bool Channel::spin(int peer, const Signal& theirs, double start_us, double limit_us) const {
  while (true) {
    for (int i = 0; i < 32; ++i) {
      cpu_relax();
      if (arrived(peer, theirs)) return true;
    }
    const double waited_us = now_us() - start_us;
    if (waited_us >= limit_us) return false;
    // The peer may need this core.
    if (waited_us >= options_.yield_us) sched_yield();
  }
}

void Channel::sleep(Signal& signal, double seconds) {
  signal.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint64_t seen = signal.word.load(std::memory_order_seq_cst);
  if (seen != word_of(signature_, epoch_)) futex_wait(&signal.word, epoch_of(seen), seconds);
  signal.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Channel::sleep_any(const std::vector<int>& peers, Phase phase, int index,
                        double blind_seconds) {
  std::vector<FutexWaiter> waiters;
  waiters.reserve(peers.size());
  for (const int peer : peers) {
    signal(peer, phase, index).sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  bool arrived_already = false;
  for (const int peer : peers) {
    Signal& theirs = signal(peer, phase, index);
    const std::uint64_t seen = theirs.word.load(std::memory_order_seq_cst);
    arrived_already = arrived_already || seen == word_of(signature_, epoch_);
    waiters.emplace_back(&theirs.word, epoch_of(seen));
  }
  if (!arrived_already) futex_wait_any(waiters.data(), waiters.size(), kSlice, blind_seconds);
  for (const int peer : peers) {
    signal(peer, phase, index).sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
}

void Channel::wait(int peer, Phase phase, int index) {
  if (chaos_) {
    delay();
    if (chaos_->skip_waits) return;
  }
  Signal& theirs = signal(peer, phase, index);
  if (peer == rank_ || arrived(peer, theirs)) return;
  const WaitReport report(on_wait_);
  const double start_us = now_us();
  const double limit_us = patience_.begin(start_us);
  bool here = spin(peer, theirs, start_us, limit_us);
  while (!here) {
    sleep(theirs, std::min(kSlice, options_.timeout_s));
    here = arrived(peer, theirs);
    if (here) break;
    check(peer, theirs, (now_us() - start_us) / 1e6);
    if (const auto poll = std::atomic_load(&poll_)) (*poll)();
  }
  const double waited_us = now_us() - start_us;
  patience_.end(waited_us, std::min(waited_us, limit_us));
}

int Channel::wait_any(const std::vector<int>& peers, Phase phase, int index) {
  if (peers.empty()) throw std::invalid_argument("wait_any needs a peer to wait for");
  if (chaos_) {
    delay();
    if (chaos_->skip_waits) return peers.front();
  }
  const double start_us = now_us();
  const double limit_us = patience_.begin(start_us);
  std::optional<WaitReport> report;
  double blind_s = kBlindSlice;
  while (true) {
    for (const int peer : peers) {
      if (peer == rank_ || arrived(peer, signal(peer, phase, index))) {
        if (report) patience_.end(now_us() - start_us, std::min(now_us() - start_us, limit_us));
        return peer;
      }
    }
    if (!report) report.emplace(on_wait_);
    const double waited_us = now_us() - start_us;
    if (waited_us < limit_us) {
      waited_us < options_.yield_us ? cpu_relax() : static_cast<void>(sched_yield());
      continue;
    }
    sleep_any(peers, phase, index, peers.size() == 1 ? kSlice : blind_s);
    blind_s = std::min(2 * blind_s, kLongestBlindSlice);
    for (const int peer : peers) {
      const Signal& theirs = signal(peer, phase, index);
      if (!arrived(peer, theirs)) check(peer, theirs, waited_us / 1e6);
    }
    if (const auto poll = std::atomic_load(&poll_)) (*poll)();
  }
}

void Channel::barrier() {
  publish(Phase::kData);
  for (int peer = 0; peer < world(); ++peer) wait(peer, Phase::kData);
}

}  // namespace tpkernels::host
