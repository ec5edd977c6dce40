// An anonymous shared-memory arena: `world` regions of equal size, one per rank, mapped by every
// rank.
//
// The memory is a memfd. It has no name and does not count against /dev/shm. The kernel frees it
// when the last process that maps it exits, even after a crash. The size is sealed, so no peer can
// shrink the file and cause SIGBUS.
//
// A mapping only reserves address space. Each rank commits ranges of its region (`commit`) on its
// NUMA node before any access. So a lack of memory raises an exception in `commit`, and never a
// signal.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpkernels::host {

// System calls that some Python and libc builds do not wrap. The caller owns the descriptors. They
// are close-on-exec. Both functions throw std::system_error.
int open_memfd(const char* name);  // anonymous memory
int open_pidfd(int pid);           // becomes readable when the process exits

class Arena {
 public:
  // Creates the memfd (mode 0600, size sealed). The caller owns the returned descriptor.
  static int create(std::size_t region_bytes, int world, const char* name = "tpkernels");

  // Maps the memfd. The caller still owns the descriptor. Throws std::runtime_error if the mapping
  // fails, the size of the file differs, or its size is not sealed. If `keep_fd`, holds a duplicate
  // of the descriptor, so that an outside process finds the memory in /proc/PID/fd.
  Arena(int fd, std::size_t region_bytes, int world, bool keep_fd = false);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Commits the pages of bytes [offset, offset + bytes) of one region. Throws std::runtime_error if
  // memory is insufficient.
  void commit(int rank, std::size_t offset, std::size_t bytes);

  // Frees the pages that lie entirely within a committed range. Their contents are lost. Commit the
  // range again before the next store.
  void decommit(int rank, std::size_t offset, std::size_t bytes);

  // The address of a range within a region. Throws std::out_of_range.
  std::byte* address(int rank, std::size_t offset, std::size_t bytes) const;
  std::byte* region(int rank) const { return base_ + region_bytes_ * static_cast<unsigned>(rank); }
  std::size_t region_bytes() const { return region_bytes_; }
  int world() const { return world_; }

 private:
  std::size_t total() const { return region_bytes_ * static_cast<unsigned>(world_); }
  std::byte* base_ = nullptr;
  std::size_t region_bytes_;
  int world_;
  int fd_ = -1;                // a duplicate, or -1
  bool commit_by_fd_ = false;  // on kernels before 5.14
};

// Requests huge pages for private memory that will be written. The kernel may ignore this hint.
void advise_huge_pages(void* data, std::size_t bytes);

}  // namespace tpkernels::host
