// Memory that earlier results have left, for large results. Fresh memory costs a page fault per
// page, and the kernel clears each page: that takes as long as a large collective itself.
//
// Invariant: a block is in exactly one of two lists. It is in use from `take` to `give_back`, which
// is called once nothing refers to its memory any more, and idle otherwise. Only idle blocks are
// handed out or unmapped. After every call the idle blocks hold at most `limit` bytes.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "host/shared_results.h"

namespace tpkernels::host {

// Memory of a block. `data` is null if there was none.
class Mapping {
 public:
  // Anonymous private memory that begins at a huge page.
  explicit Mapping(std::size_t bytes);
  Mapping(std::shared_ptr<SharedResults> owner, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // Where it comes from; null: it is private.
  SharedResults* owner() const { return owner_.get(); }
  // In a fork: leaves the memory to the process that owns it. The memory of `copy` takes its place;
  // without one there is none.
  void leave(Mapping* copy);

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
  std::shared_ptr<SharedResults> owner_;
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
  // the kernel has no memory. Takes the most recently used block of the size class, from `owner`
  // where one is given. Throws std::bad_alloc.
  std::optional<Block> take(std::size_t bytes,
                            const std::shared_ptr<SharedResults>& owner = nullptr);

  // Neither throws nor needs the GIL: tensors die on any thread, also after the interpreter.
  void give_back(Block block) noexcept;

  // 0, as at first, turns the pool off.
  void set_limit(std::size_t bytes);
  Usage usage() const;

  // `owner` hands out no more memory, and none of its blocks stays idle. `failed`: in a call, so
  // that what is in use stays as it is (shared_results.h).
  void close(SharedResults& owner, bool failed);

  // For fork handlers. A child does not keep idle blocks: it would copy them page by page, and so
  // would the parent. It gets copies of the shared blocks in use, which would otherwise change with
  // the parent's; they are made before the fork, because the parent may hand the blocks out again
  // right after it. If there is no memory for a copy, the child cannot access the block.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  // Of that owner; null: of all, and private ones.
  void drop_idle(const SharedResults* owner);
  // Moves the oldest idle blocks beyond `most` bytes to `dropped`. The lock is held.
  void drop_oldest(std::size_t most, std::list<Mapping>& dropped);

  mutable std::mutex mutex_;
  std::list<Mapping> in_use_;
  std::list<Mapping> idle_;                      // the most recently used first
  std::list<std::pair<Block, Mapping>> copies_;  // during a fork
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
