#include "host/pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <new>

#include "host/arena.h"

namespace tpkernels::host {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

Mapping::Mapping(std::size_t bytes) : bytes_(bytes) {
  // Kernels align large mappings to huge pages by themselves only since 6.7, and not every size.
  const std::size_t total = bytes + kHugePage;
  void* const base =
      mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return;
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(base) % kHugePage;
  data_ = static_cast<std::byte*>(base) + head;
  if (head != 0) munmap(base, head);
  munmap(data_ + bytes, total - head - bytes);
  advise_huge_pages(data_, bytes);
}

Mapping::~Mapping() {
  if (data_) munmap(data_, bytes_);
}

std::size_t size_class(std::size_t bytes) {
  std::size_t step = kPage;
  while (step <= bytes / 16) step *= 2;
  return (bytes + step - 1) / step * step;
}

std::optional<Pool::Block> Pool::take(std::size_t bytes) {
  const std::size_t size = size_class(bytes);
  std::list<Mapping> dropped;  // unmapped after the lock is released
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (size > limit_) return std::nullopt;
    const auto found = std::find_if(idle_.begin(), idle_.end(),
                                    [&](const Mapping& idle) { return idle.bytes() == size; });
    if (found != idle_.end()) {
      in_use_.splice(in_use_.begin(), idle_, found);
      idle_bytes_ -= size;
      in_use_bytes_ += size;
      return found;
    }
  }
  std::list<Mapping> made;
  made.emplace_front(size);
  if (!made.front().data()) {  // what the idle blocks take may be what is missing
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      drop_oldest(0, dropped);
    }
    dropped.clear();
    made.clear();
    made.emplace_front(size);
  }
  if (!made.front().data()) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  in_use_.splice(in_use_.begin(), made);
  in_use_bytes_ += size;
  return in_use_.begin();
}

void Pool::give_back(Block block) noexcept {
  std::list<Mapping> dropped;  // unmapped after the lock is released
  const std::lock_guard<std::mutex> lock(mutex_);
  in_use_bytes_ -= block->bytes();
  if (block->bytes() > limit_) {  // it was lowered: do not drop all others for this one
    dropped.splice(dropped.begin(), in_use_, block);
    return;
  }
  idle_bytes_ += block->bytes();
  idle_.splice(idle_.begin(), in_use_, block);
  drop_oldest(limit_, dropped);
}

void Pool::set_limit(std::size_t bytes) {
  std::list<Mapping> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  limit_ = bytes;
  drop_oldest(bytes, dropped);
}

Pool::Usage Pool::usage() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {limit_, idle_bytes_, in_use_bytes_};
}

void Pool::after_fork_in_child() {
  idle_.clear();
  idle_bytes_ = 0;
  mutex_.unlock();
}

void Pool::drop_oldest(std::size_t most, std::list<Mapping>& dropped) {
  while (idle_bytes_ > most) {
    idle_bytes_ -= idle_.back().bytes();
    dropped.splice(dropped.begin(), idle_, std::prev(idle_.end()));
  }
}

Pool& result_pool() {
  static Pool* const pool = new Pool;
  static const int registered =
      pthread_atfork([] { pool->before_fork(); }, [] { pool->after_fork_in_parent(); },
                     [] { pool->after_fork_in_child(); });
  static_cast<void>(registered);
  return *pool;
}

}  // namespace tpkernels::host
