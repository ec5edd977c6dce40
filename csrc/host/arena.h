// An anonymous shared-memory arena: `world` equal regions, one per rank, mapped by every rank.
//
// The memory is a memfd: it has no name, does not count against /dev/shm, and goes when the last
// process that maps it goes, however that process died. The size is sealed, so that no peer can
// shrink the file and turn a load into SIGBUS. Each rank commits its own region (`reserve`), on its
// own NUMA node, before anybody touches it: lack of memory is an exception here, never later.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tpkernels::host {

class Arena {
 public:
  // Makes the memfd (mode 0600, sealed) and returns its descriptor, which the caller owns.
  static int create(std::size_t region_bytes, int world);

  // Maps the memfd. The descriptor stays the caller's. Throws std::bad_alloc-like
  // std::runtime_error with errno's text where the mapping fails or the file has another size.
  Arena(int fd, std::size_t region_bytes, int world);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Commits the pages of one region; throws std::runtime_error when there is not enough memory.
  void reserve(int fd, int rank);

  std::byte* region(int rank) const { return base_ + region_bytes_ * static_cast<unsigned>(rank); }
  std::size_t region_bytes() const { return region_bytes_; }
  int world() const { return world_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t region_bytes_;
  int world_;
};

// Asks for huge pages for private memory that is about to be written; a hint, without effect where
// the kernel does not grant them.
void advise_huge_pages(void* data, std::size_t bytes);

}  // namespace tpkernels::host
