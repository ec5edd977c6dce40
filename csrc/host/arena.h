// An anonymous shared-memory arena: `world` equal regions, one per rank, mapped by every rank.
//
// The memory is a memfd: it has no name, does not count against /dev/shm, and is freed when the
// last process that maps it exits, however that process died. The size is sealed, so no peer can
// shrink the file and turn a load into SIGBUS. A mapping only reserves address space. Each rank
// commits the parts of its own region (`commit`), on its own NUMA node, before anyone touches them,
// so running out of memory is an exception here and never a signal later.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpkernels::host {

// System calls that some Python and libc builds do not wrap. The caller owns the descriptors, which
// are close-on-exec. Both throw std::system_error.
int open_memfd(const char* name);  // anonymous memory
int open_pidfd(int pid);           // becomes readable when the process exits

class Arena {
 public:
  // Creates the memfd (mode 0600, size sealed) and returns its descriptor, which the caller owns.
  static int create(std::size_t region_bytes, int world);

  // Maps the memfd; the caller keeps the descriptor. Throws std::runtime_error if the mapping
  // fails, the file has a different size, or its size is not sealed.
  Arena(int fd, std::size_t region_bytes, int world);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Commits bytes [offset, offset + bytes) of one region, in whole pages. Throws std::runtime_error
  // if there is not enough memory.
  void commit(int rank, std::size_t offset, std::size_t bytes);

  // Gives back the whole pages within what was committed so. What was stored there is lost, and
  // they are committed again before the next store.
  void give_back(int rank, std::size_t offset, std::size_t bytes);

  // The address of a part of a region; throws std::out_of_range.
  std::byte* at(int rank, std::size_t offset, std::size_t bytes) const;
  std::byte* region(int rank) const { return base_ + region_bytes_ * static_cast<unsigned>(rank); }
  std::size_t region_bytes() const { return region_bytes_; }
  int world() const { return world_; }

 private:
  std::size_t total() const { return region_bytes_ * static_cast<unsigned>(world_); }
  std::byte* base_ = nullptr;
  std::size_t region_bytes_;
  int world_;
  int fd_ = -1;  // kept only where commit needs a descriptor
};

// Asks for huge pages for private memory that is about to be written. A hint: it has no effect
// where the kernel does not grant them.
void advise_huge_pages(void* data, std::size_t bytes);

}  // namespace tpkernels::host
