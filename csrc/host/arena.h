// An anonymous shared-memory arena: `world` equal regions, one per rank, mapped by every rank.
//
// The memory is a memfd: it has no name, does not count against /dev/shm, and goes when the last
// process that maps it goes, however that process died. The size is sealed, so that no peer can
// shrink the file and turn a load into SIGBUS. It is address space only: each rank commits the
// parts of its own region (`commit`), on its own NUMA node, before anybody touches them, so that
// lack of memory is an exception here and never a signal later.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpkernels::host {

// System calls for which Python and libc builds may have no function. The descriptors are the
// caller's and close on exec. They throw std::system_error.
int open_memfd(const char* name);  // anonymous memory
int open_pidfd(int pid);           // readable when the process has ended

class Arena {
 public:
  // Makes the memfd (mode 0600, sealed) and returns its descriptor, which the caller owns.
  static int create(std::size_t region_bytes, int world);

  // Maps the memfd. The descriptor stays the caller's. Throws std::runtime_error where the mapping
  // fails, the file has another size, or its size is not sealed.
  Arena(int fd, std::size_t region_bytes, int world);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Commits bytes [offset, offset + bytes) of one region, in whole pages; throws std::runtime_error
  // when there is not enough memory.
  void commit(int rank, std::size_t offset, std::size_t bytes);

  // Gives back the whole pages within what was committed so. Nobody may have stored there.
  void give_back(int rank, std::size_t offset, std::size_t bytes);

  std::byte* region(int rank) const { return base_ + region_bytes_ * static_cast<unsigned>(rank); }
  std::size_t region_bytes() const { return region_bytes_; }
  int world() const { return world_; }

 private:
  std::size_t total() const { return region_bytes_ * static_cast<unsigned>(world_); }
  // Where a part of a region begins in the arena; throws std::out_of_range.
  std::size_t begin_of(int rank, std::size_t offset, std::size_t bytes) const;

  std::byte* base_ = nullptr;
  std::size_t region_bytes_;
  int world_;
  int fd_ = -1;  // kept only where committing takes a descriptor
};

// Asks for huge pages for private memory that is about to be written; a hint, without effect where
// the kernel does not grant them.
void advise_huge_pages(void* data, std::size_t bytes);

}  // namespace tpkernels::host
