// Problem: one process sends messages of any size to others on its host. A reader must never see
// bytes that are not written yet, the writer must never overwrite bytes that a reader still needs,
// nobody may burn a core while waiting, and no wake-up may be lost.
//
// Algorithm: a ring of bytes in one region of an arena, with one writer and a fixed number of
// readers, each of which reads everything. The writer counts the bytes it has written, each reader
// those it has read. Counts only grow: byte n lies at n modulo the capacity. A message larger than
// the ring goes through it in parts.
//
// Sync: only the writer stores `written`, and only reader r stores `read[r]`. The writer copies
// bytes in, then stores `written` (release); a reader loads it (acquire), then copies them out,
// then stores its count (release), which the writer loads (acquire) before it uses the room again.
//
// Invariant (no overwritten read): written - read[r] <= capacity for every r. The writer writes
// only into the room that the slowest reader leaves, so byte n replaces byte n - capacity after
// every reader has counted that one.
//
// Wake-up: a bell is a counter that is rung after every change of a count. A waiter takes the
// bell's value, then looks at the counts, then announces itself as a sleeper, then sleeps unless
// the bell was rung since. A ringer stores its count, rings, then looks for sleepers. If the
// waiter's look missed the count, then the ring comes after the value that it took. The ring and
// the announcement are sequentially consistent: either the waiter sees the ring and does not sleep,
// or the ringer sees the sleeper and wakes it.
//
// Death: a process that dies leaves the ring as it is, so its peer's wait ends when its time is up.
// Waits are bounded, and callers watch the process. A sleeper that died costs later ringers a
// needless system call each.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "host/arena.h"
#include "host/wait.h"

namespace tpkernels::host {

using Bell = Signal;  // its word counts the rings

// On a cache line of its own.
struct alignas(64) Count {
  std::atomic<std::uint64_t> bytes;
};

// One end of the ring. An object serves one thread at a time.
class Mailbox {
 public:
  // Size of a region whose ring holds at least `capacity` bytes; whole pages.
  static std::size_t region_bytes(std::size_t capacity, int readers);

  // The region must be committed, and zero when the first end is made. The writer rings for its
  // readers in `bell_region`: their own region, or one that several mailboxes share so that one
  // reader can wait for any of them. A wait polls for at most `spin_us` before it sleeps.
  Mailbox(std::shared_ptr<Arena> arena, int region, int readers, int bell_region, double spin_us);

  // Writes up to `bytes` bytes and returns how many. Fewer if `seconds` are over before the readers
  // have left room, or if a signal has interrupted the wait. One thread of one process writes.
  std::size_t write(const std::byte* data, std::size_t bytes, double seconds);
  // The same for reading, by reader number `reader`.
  std::size_t read(int reader, std::byte* out, std::size_t bytes, double seconds);
  // The index of a mailbox that has bytes for its reader 0, or -1 if none has within `seconds` or
  // before a signal. All share a bell.
  static int wait_any(const std::vector<Mailbox*>& boxes, double seconds);

  std::size_t capacity() const { return capacity_; }

  // For tests: called between the steps of the protocol.
  void set_delay(std::function<void()> delay) { delay_ = std::move(delay); }

 private:
  struct Header;  // the start of the region; a Count for each reader follows, then the ring

  static std::size_t control_bytes(int readers);
  Header& header() const;
  Count& count_of(int reader) const;
  std::byte* bytes_at(std::uint64_t position, std::size_t* contiguous) const;
  std::size_t room() const;
  std::size_t arrived(int reader) const;
  std::size_t distance(std::uint64_t written, std::uint64_t read) const;
  void check_process() const;
  void delay() const {
    if (delay_) delay_();
  }
  template <class Amount>
  std::size_t wait(Bell& bell, double until_us, Amount amount);

  std::shared_ptr<Arena> arena_;
  int region_;
  int readers_;
  Bell* arrivals_;
  std::size_t capacity_;
  Patience patience_;
  std::uint32_t fork_generation_;
  std::function<void()> delay_;
};

}  // namespace tpkernels::host
