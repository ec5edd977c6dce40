#include "host/pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

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

Mapping::Mapping(std::shared_ptr<SharedResults> owner, std::size_t bytes)
    : data_(owner->take(bytes)), bytes_(bytes), owner_(std::move(owner)) {}

Mapping::~Mapping() {
  if (!data_) return;
  if (owner_) {
    owner_->give_back(data_, bytes_);
  } else {
    munmap(data_, bytes_);
  }
}

void Mapping::leave(Mapping* copy) {
  // Never freed: with its last owner the arena would unmap the copies too.
  new std::shared_ptr<SharedResults>(std::move(owner_));
  owner_ = nullptr;
  if (copy && copy->data_ &&
      mremap(copy->data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, data_) == data_) {
    copy->data_ = nullptr;
    return;
  }
  mprotect(data_, bytes_, PROT_NONE);
  data_ = nullptr;
}

std::size_t size_class(std::size_t bytes) {
  std::size_t step = kPage;
  while (step <= bytes / 16) step *= 2;
  return (bytes + step - 1) / step * step;
}

std::optional<Pool::Block> Pool::take(std::size_t bytes,
                                      const std::shared_ptr<SharedResults>& owner) {
  const std::size_t size = size_class(bytes);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (size > limit_) return std::nullopt;
    const auto found = std::find_if(idle_.begin(), idle_.end(), [&](const Mapping& idle) {
      return idle.bytes() == size && idle.owner() == owner.get();
    });
    if (found != idle_.end()) {
      in_use_.splice(in_use_.begin(), idle_, found);
      idle_bytes_ -= size;
      in_use_bytes_ += size;
      return found;
    }
  }
  std::list<Mapping> made;
  owner ? made.emplace_front(owner, size) : made.emplace_front(size);
  if (!owner && !made.front().data()) {  // what the idle blocks take may be what is missing
    drop_idle(nullptr);
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
  const bool unusable = !block->data() || (block->owner() && block->owner()->closed());
  // If the limit was lowered: do not drop all others for this one.
  if (unusable || block->bytes() > limit_) {
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

void Pool::close(SharedResults& owner, bool failed) {
  drop_idle(&owner);  // gives the memory back, which is safe for idle blocks
  failed ? owner.retire() : owner.close();
  drop_idle(&owner);  // those that were given back meanwhile
}

void Pool::before_fork() {
  mutex_.lock();
  for (auto block = in_use_.begin(); block != in_use_.end(); ++block) {
    if (!block->owner()) continue;
    try {
      copies_.emplace_front(std::piecewise_construct, std::forward_as_tuple(block),
                            std::forward_as_tuple(block->bytes()));
    } catch (const std::bad_alloc&) {
      continue;
    }
    std::byte* const to = copies_.front().second.data();
    if (to) std::memcpy(to, block->data(), block->bytes());
  }
}

void Pool::after_fork_in_parent() {
  copies_.clear();
  mutex_.unlock();
}

void Pool::after_fork_in_child() {
  for (auto& [block, copy] : copies_) block->leave(&copy);
  copies_.clear();
  for (std::list<Mapping>* const blocks : {&in_use_, &idle_}) {
    for (Mapping& block : *blocks) {
      if (block.owner()) block.leave(nullptr);
    }
  }
  idle_.clear();
  idle_bytes_ = 0;
  mutex_.unlock();
}

void Pool::drop_idle(const SharedResults* owner) {
  std::list<Mapping> dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!owner) return drop_oldest(0, dropped);
  for (auto it = idle_.begin(); it != idle_.end();) {
    const auto next = std::next(it);
    if (it->owner() == owner) {
      idle_bytes_ -= it->bytes();
      dropped.splice(dropped.begin(), idle_, it);
    }
    it = next;
  }
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
