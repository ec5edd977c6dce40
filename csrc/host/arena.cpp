#include "host/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif
#ifndef SYS_pidfd_open  // Linux 5.3; same number on all architectures
#define SYS_pidfd_open 434
#endif

namespace tpkernels::host {
namespace {

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

int open_memfd(const char* name) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  return fd;
}

int open_pidfd(int pid) {
  const long fd = syscall(SYS_pidfd_open, pid, 0);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "pidfd_open");
  return static_cast<int>(fd);
}

int Arena::create(std::size_t region_bytes, int world, const char* name) {
  const int fd = open_memfd(name);
  const auto total = static_cast<off_t>(region_bytes * static_cast<unsigned>(world));
  const bool ok = total > 0 && fchmod(fd, 0600) == 0 && ftruncate(fd, total) == 0 &&
                  fcntl(fd, F_ADD_SEALS, kSizeSeals) == 0;
  if (!ok) {
    const int error = total > 0 ? errno : EOVERFLOW;
    close(fd);
    fail("cannot size shared memory to " + mebibytes(region_bytes) + " for each of " +
             std::to_string(world) + " ranks",
         error);
  }
  return fd;
}

Arena::Arena(int fd, std::size_t region_bytes, int world, bool keep_fd)
    : region_bytes_(region_bytes), world_(world) {
  struct stat info{};
  if (fstat(fd, &info) != 0) fail("cannot read the size of shared memory", errno);
  if (static_cast<std::size_t>(info.st_size) != total()) {
    throw std::runtime_error("shared memory holds " + std::to_string(info.st_size) +
                             " bytes, expected " + std::to_string(total()));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    throw std::runtime_error("the size of shared memory is not sealed: a peer could truncate it");
  }
  void* base = mmap(nullptr, total(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("cannot map " + mebibytes(total()) + " of shared memory", errno);
  base_ = static_cast<std::byte*>(base);
  madvise(base, total(), MADV_HUGEPAGE);  // hint: fewer TLB misses
  commit_by_fd_ = madvise(base, 0, MADV_POPULATE_WRITE) != 0;
  if (keep_fd || commit_by_fd_) fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

Arena::~Arena() {
  munmap(base_, total());
  if (fd_ >= 0) close(fd_);
}

std::byte* Arena::address(int rank, std::size_t offset, std::size_t bytes) const {
  if (rank < 0 || rank >= world_ || offset > region_bytes_ || bytes > region_bytes_ - offset) {
    throw std::out_of_range("bytes [" + std::to_string(offset) + ", +" + std::to_string(bytes) +
                            ") are outside region " + std::to_string(rank));
  }
  return region(rank) + offset;
}

void Arena::commit(int rank, std::size_t offset, std::size_t bytes) {
  const auto first = static_cast<std::size_t>(address(rank, offset, bytes) - base_);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t begin = first / page * page;
  const std::size_t end = std::min(total(), (first + bytes + page - 1) / page * page);
  if (begin >= end) return;
  // Commit through the mapping, so that the huge-page hint and first-touch NUMA placement apply.
  // madvise reports EFAULT or ENOMEM if a later store would raise SIGBUS.
  int error = 0;
  if (commit_by_fd_) {
    error = posix_fallocate(fd_, static_cast<off_t>(begin), static_cast<off_t>(end - begin));
  } else if (madvise(base_ + begin, end - begin, MADV_POPULATE_WRITE) != 0) {
    error = errno;
  }
  if (error == 0) return;
  fail("cannot commit " + mebibytes(bytes) + " of shared memory for rank " + std::to_string(rank),
       error == EFAULT ? ENOMEM : error);
}

void Arena::decommit(int rank, std::size_t offset, std::size_t bytes) {
  const auto first = static_cast<std::size_t>(address(rank, offset, bytes) - base_);
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t begin = (first + page - 1) / page * page;
  const std::size_t end = (first + bytes) / page * page;
  // On failure the pages stay committed.
  if (begin < end) madvise(base_ + begin, end - begin, MADV_REMOVE);
}

void advise_huge_pages(void* data, std::size_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace tpkernels::host
