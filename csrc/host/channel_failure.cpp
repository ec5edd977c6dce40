// How a channel detects and reports that a call cannot complete. It is broken from then on.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "host/channel.h"
#include "host/fork.h"
#include "host/region.h"

namespace tpkernels::host {

// What a waiter checks while the word has not arrived: whether the peer is in the same call,
// whether it has failed, whether it is alive, and whether time is left.
void Channel::check(int peer, const Signal& awaited, double waited_s) const {
  if (forked()) fail_forked();
  check_mismatch(peer);
  const Header& theirs = header(peer);
  if (const auto kind = static_cast<FailureKind>(theirs.fault.load(std::memory_order_acquire));
      kind != FailureKind{}) {
    if (arrived(peer, awaited)) return;  // published before it failed or left
    const int culprit = theirs.culprit.load(std::memory_order_relaxed);
    if (kind == FailureKind::kMismatch && culprit != name(rank_)) {
      const auto& names = options_.names;
      const auto found = std::find(names.begin(), names.end(), culprit);
      if (found != names.end()) check_mismatch(static_cast<int>(found - names.begin()));
    }
    fail(kind, peer, culprit,
         "waited for " + peer_name(peer) + ", which failed: " + theirs.fault_text.read());
  }
  if (ended(peer)) {
    if (arrived(peer, awaited)) return;  // published before it exited
    fail(FailureKind::kPeerLost, peer, name(peer),
         "waited for " + peer_name(peer) + ", whose process has ended; " + progress(peer));
  }
  if (waited_s >= options_.timeout_s) {
    char waited[32];
    std::snprintf(waited, sizeof(waited), "%.2f s", waited_s);
    fail(FailureKind::kTimeout, peer, name(peer),
         std::string("waited ") + waited + " for " + peer_name(peer) + ", which is alive; " +
             progress(peer));
  }
}

void Channel::end_read(int peer) {
  held_[static_cast<std::size_t>(peer)] = nullptr;
  fence_after_reads();
  check_fault(peer, "has read the memory of ");
  publish(Phase::kRead, peer);
}

void Channel::check_fault(int peer, const char* what) const {
  const Header& theirs = header(peer);
  const auto kind = static_cast<FailureKind>(theirs.fault.load(std::memory_order_acquire));
  if (kind == FailureKind{}) return;
  fail(kind, peer, theirs.culprit.load(std::memory_order_relaxed),
       what + peer_name(peer) + ", which has failed: " + theirs.fault_text.read());
}

bool Channel::ended(int peer) const {
  pollfd life{pidfds_[static_cast<std::size_t>(peer)], POLLIN, 0};
  return life.fd >= 0 && ::poll(&life, 1, 0) == 1 && (life.revents & POLLIN) != 0;
}

void Channel::watch(Phase phase, double waited_s) const {
  for (int peer = 0; peer < world(); ++peer) {
    const Signal& theirs = signal(peer, phase, 0);
    if (peer != rank_ && !arrived(peer, theirs)) check(peer, theirs, waited_s);
  }
}

void Channel::check_peers() const {
  if (forked()) fail_forked();
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank_) continue;
    check_fault(peer, "looked at ");
    if (ended(peer)) {
      fail(FailureKind::kPeerLost, peer, name(peer),
           "found that the process of " + peer_name(peer) + " has ended");
    }
  }
}

void Channel::check_mismatch(int peer) const {
  const std::uint64_t entered =
      header(peer).calls[parity()].entered.word.load(std::memory_order_acquire);
  if (epoch_of(entered) != epoch_ || entered == 0 || signature_of(entered) == signature_) return;
  fail(FailureKind::kMismatch, peer, name(peer),
       "is in " + call_text(rank_) + ", but " + peer_name(peer) + " is in " + call_text(peer) +
           ", both as call #" + std::to_string(epoch_) + " of the group");
}

void Channel::fail(FailureKind kind, int peer, int culprit, const std::string& what) const {
  std::string message = "rank " + std::to_string(name(rank_)) + " ";
  const std::string call = call_text(rank_);  // empty before the first one
  if (kind != FailureKind::kMismatch && !call.empty()) message = call + ": " + message;
  message += what;
  set_fault(kind, culprit, message);
  throw Failure(kind, kind == FailureKind::kMismatch ? name(peer) : culprit,
                message + ". The group is broken: make a new one.");
}

void Channel::set_fault(FailureKind kind, int culprit, const std::string& what) const {
  broken_ = true;
  broken_by_ = what;
  if (forked()) return;  // the region belongs to the parent
  Header& own = header(rank_);
  own.fault_text.write(what);
  own.culprit.store(culprit, std::memory_order_relaxed);
  own.fault.store(static_cast<std::uint32_t>(kind), std::memory_order_release);
  fence_before_overwrites();  // by the user, of what peers may still read in place
}

void Channel::abandon(const std::string& why, FailureKind kind, int culprit) {
  if (broken_) return;
  set_fault(kind, culprit < 0 ? name(rank_) : culprit, "it left the call with " + why);
}

bool Channel::forked() const { return fork_generation() != fork_generation_; }

void Channel::fail_forked() const {
  throw Failure(
      FailureKind::kBroken, -1,
      "process " + std::to_string(getpid()) + " is a fork of " + peer_name(rank_) +
          " and cannot take its place in a call; create a new process group in the child");
}

std::string Channel::call_text(int rank) const { return header(rank).calls[parity()].text.read(); }

std::string Channel::peer_name(int rank) const {
  return "rank " + std::to_string(name(rank)) + " (pid " +
         std::to_string(pids_[static_cast<std::size_t>(rank)]) + ")";
}

std::string Channel::progress(int peer) const {
  const Header& theirs = header(peer);
  const std::uint32_t here = epoch_of(theirs.calls[parity()].entered.word.load());
  const std::uint32_t before = epoch_of(theirs.calls[parity() ^ 1].entered.word.load());
  const std::string expected = "expected call #" + std::to_string(epoch_) + ", ";
  if (here == epoch_) return expected + "which it had begun but not completed";
  return expected + "seen #" + std::to_string(before == epoch_ - 1 ? before : here);
}

}  // namespace tpkernels::host
