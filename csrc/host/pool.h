// Memory that earlier results have left, for large results. Fresh memory costs a page fault per
// page, and the kernel clears each page: that takes as long as a large collective itself.
//
// Invariant: a block is in exactly one of two lists. It is in use from `take` to `give_back`, which
// is called once nothing refers to its memory any more, and idle otherwise. Only idle blocks are
// handed out or unmapped. After every call the idle blocks hold at most `limit` bytes.
#pragma once

#include <cstddef>
#include <list>
#include <mutex>
#include <optional>

namespace tpkernels::host {

// Anonymous private memory that begins at a huge page. `data` is null if there was none.
class Mapping {
 public:
  explicit Mapping(std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

// Any thread may call any method.
class Pool {
 public:
  using Block = std::list<Mapping>::iterator;

  struct Usage {
    std::size_t limit;
    std::size_t idle;
    std::size_t in_use;
  };

  // A block of at least `bytes`, with any content. None if the block would exceed the limit, or if
  // the kernel has no memory. Takes the most recently used block of the size class. Throws
  // std::bad_alloc.
  std::optional<Block> take(std::size_t bytes);

  // Neither throws nor needs the GIL: tensors die on any thread, also after the interpreter.
  void give_back(Block block) noexcept;

  // 0, as at first, turns the pool off.
  void set_limit(std::size_t bytes);
  Usage usage() const;

  // For fork handlers. A child does not keep idle blocks: it would copy them page by page, and so
  // would the parent.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  // Moves the oldest idle blocks beyond `most` bytes to `dropped`. The lock is held.
  void drop_oldest(std::size_t most, std::list<Mapping>& dropped);

  mutable std::mutex mutex_;
  std::list<Mapping> in_use_;
  std::list<Mapping> idle_;  // the most recently used first
  std::size_t in_use_bytes_ = 0;
  std::size_t idle_bytes_ = 0;
  std::size_t limit_ = 0;
};

// Bytes of the block for `bytes`: eight classes per power of two, so less than an eighth is unused.
std::size_t size_class(std::size_t bytes);

// The pool of this process, which forks inherit. It is never destroyed, because tensors may outlive
// static objects.
Pool& result_pool();

}  // namespace tpkernels::host
