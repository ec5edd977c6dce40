#include "host/mailbox.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tpkernels::host {
namespace {

constexpr std::size_t kParts = 4;  // of a full ring: a reader copies one while the next is written
constexpr double kYieldUs = 5;     // after this, yield the core between polls

void ring(Bell& bell) {
  bell.word.fetch_add(1, std::memory_order_seq_cst);
  bell.wake();
}

}  // namespace

struct Mailbox::Header {
  Bell arrivals;  // rung by the writer
  Bell room;      // rung by the readers
  Count written;
};

std::size_t Mailbox::control_bytes(int readers) {
  return sizeof(Header) + sizeof(Count) * static_cast<unsigned>(readers);
}

std::size_t Mailbox::region_bytes(std::size_t capacity, int readers) {
  constexpr std::size_t kPage = 4096;
  return (control_bytes(readers) + capacity + kPage - 1) / kPage * kPage;
}

Mailbox::Mailbox(std::shared_ptr<Arena> arena, int region, int readers, int bell_region,
                 double spin_us)
    : arena_(std::move(arena)),
      region_(region),
      readers_(readers),
      patience_(spin_us),
      fork_generation_(fork_generation()) {
  const int regions = arena_->world();
  const std::size_t control = control_bytes(readers);
  if (readers < 1 || region < 0 || region >= regions || bell_region < 0 || bell_region >= regions ||
      arena_->region_bytes() <= control) {
    throw std::invalid_argument("no mailbox for " + std::to_string(readers) +
                                " readers in region " + std::to_string(region) + " of " +
                                std::to_string(regions) + ", with its bell in region " +
                                std::to_string(bell_region));
  }
  capacity_ = arena_->region_bytes() - control;
  arrivals_ = &reinterpret_cast<Header*>(arena_->region(bell_region))->arrivals;
}

Mailbox::Header& Mailbox::header() const {
  return *reinterpret_cast<Header*>(arena_->region(region_));
}

Count& Mailbox::count_of(int reader) const {
  return reinterpret_cast<Count*>(arena_->region(region_) + sizeof(Header))[reader];
}

std::byte* Mailbox::bytes_at(std::uint64_t position, std::size_t* contiguous) const {
  const std::size_t offset = position % capacity_;
  *contiguous = capacity_ - offset;
  return arena_->region(region_) + control_bytes(readers_) + offset;
}

void Mailbox::check_process() const {
  if (fork_generation() == fork_generation_) return;
  throw std::runtime_error("this process is a fork, and cannot use its parent's mailbox");
}

std::size_t Mailbox::distance(std::uint64_t written, std::uint64_t read) const {
  if (written - read > capacity_) {
    throw std::runtime_error("the mailbox is damaged: " + std::to_string(written) + " written, " +
                             std::to_string(read) + " read");
  }
  return static_cast<std::size_t>(written - read);
}

std::size_t Mailbox::room() const {
  const std::uint64_t written = header().written.bytes.load(std::memory_order_relaxed);
  std::size_t most = 0;
  for (int reader = 0; reader < readers_; ++reader) {
    const std::uint64_t read = count_of(reader).bytes.load(std::memory_order_acquire);
    most = std::max(most, distance(written, read));
  }
  return capacity_ - most;
}

std::size_t Mailbox::arrived(int reader) const {
  const std::uint64_t written = header().written.bytes.load(std::memory_order_acquire);
  return distance(written, count_of(reader).bytes.load(std::memory_order_relaxed));
}

// The first amount that is not 0, or 0 after `until_us` or a signal.
template <class Amount>
std::size_t Mailbox::wait(Bell& bell, double until_us, Amount amount) {
  std::size_t found = amount();
  if (found != 0) return found;
  const auto look = [&] { return (found = amount()) != 0; };
  wait_until(patience_, kYieldUs, look, [&](double) {
    const std::uint64_t seen = bell.word.load(std::memory_order_seq_cst);
    delay();
    if (look()) return true;
    delay();
    const double left_us = until_us - now_us();
    const auto rung = [&](std::uint64_t word) { return word != seen; };
    return left_us > 0 && sleep_on({&bell}, left_us / 1e6, 0, rung);
  });
  return found;
}

std::size_t Mailbox::write(const std::byte* data, std::size_t bytes, double seconds) {
  check_process();
  const double until_us = now_us() + seconds * 1e6;
  std::atomic<std::uint64_t>& written = header().written.bytes;
  std::size_t done = 0;
  while (done < bytes) {
    const std::size_t free = wait(header().room, until_us, [&] { return room(); });
    if (free == 0) break;
    const std::uint64_t position = written.load(std::memory_order_relaxed);
    std::size_t contiguous = 0;
    std::byte* to = bytes_at(position, &contiguous);
    const std::size_t part =
        std::min({free, bytes - done, contiguous, std::max<std::size_t>(capacity_ / kParts, 1)});
    std::memcpy(to, data + done, part);
    delay();
    written.store(position + part, std::memory_order_release);
    delay();
    ring(*arrivals_);
    done += part;
  }
  return done;
}

std::size_t Mailbox::read(int reader, std::byte* out, std::size_t bytes, double seconds) {
  check_process();
  if (reader < 0 || reader >= readers_) {
    throw std::invalid_argument("no reader " + std::to_string(reader) + " of a mailbox for " +
                                std::to_string(readers_));
  }
  const double until_us = now_us() + seconds * 1e6;
  std::atomic<std::uint64_t>& read = count_of(reader).bytes;
  std::size_t done = 0;
  while (done < bytes) {
    const std::size_t here = wait(*arrivals_, until_us, [&] { return arrived(reader); });
    if (here == 0) break;
    const std::uint64_t position = read.load(std::memory_order_relaxed);
    std::size_t contiguous = 0;
    const std::byte* from = bytes_at(position, &contiguous);
    const std::size_t part = std::min({here, bytes - done, contiguous});
    std::memcpy(out + done, from, part);
    delay();
    read.store(position + part, std::memory_order_release);
    delay();
    ring(header().room);
    done += part;
  }
  return done;
}

int Mailbox::wait_any(const std::vector<Mailbox*>& boxes, double seconds) {
  if (boxes.empty()) throw std::invalid_argument("wait_any needs a mailbox to wait for");
  Mailbox& first = *boxes.front();
  first.check_process();
  for (const Mailbox* box : boxes) {
    if (box->arrivals_ != first.arrivals_) {
      throw std::invalid_argument("wait_any needs mailboxes that share a bell");
    }
  }
  const std::size_t found = first.wait(*first.arrivals_, now_us() + seconds * 1e6, [&] {
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      if (boxes[i]->arrived(0) != 0) return i + 1;
    }
    return std::size_t{0};
  });
  return static_cast<int>(found) - 1;
}

}  // namespace tpkernels::host
