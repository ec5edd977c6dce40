#include "host/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#ifndef MADV_POPULATE_WRITE  // Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace tpkernels::host {
namespace {

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

int Arena::create(std::size_t region_bytes, int world) {
  const int fd = memfd_create("tpkernels", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create", errno);
  const auto total = static_cast<off_t>(region_bytes * static_cast<unsigned>(world));
  const bool ok = total > 0 && fchmod(fd, 0600) == 0 && ftruncate(fd, total) == 0 &&
                  fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
  if (!ok) {
    const int error = total > 0 ? errno : EOVERFLOW;
    close(fd);
    fail("cannot size shared memory to " + mebibytes(region_bytes) + " on each of " +
             std::to_string(world) + " ranks",
         error);
  }
  return fd;
}

Arena::Arena(int fd, std::size_t region_bytes, int world)
    : region_bytes_(region_bytes), world_(world) {
  const std::size_t total = region_bytes * static_cast<unsigned>(world);
  struct stat info{};
  if (fstat(fd, &info) != 0) fail("fstat of shared memory", errno);
  if (static_cast<std::size_t>(info.st_size) != total) {
    throw std::runtime_error("shared memory holds " + std::to_string(info.st_size) +
                             " bytes, expected " + std::to_string(total));
  }
  void* base = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("cannot map " + mebibytes(total) + " of shared memory", errno);
  base_ = static_cast<std::byte*>(base);
  madvise(base, total, MADV_HUGEPAGE);  // a hint: fewer TLB misses where the kernel grants it
}

Arena::~Arena() { munmap(base_, region_bytes_ * static_cast<unsigned>(world_)); }

void Arena::reserve(int fd, int rank) {
  // Through the mapping, so that the huge-page hint and first-touch NUMA placement apply. Where a
  // later store would raise SIGBUS, this reports EFAULT or ENOMEM instead.
  if (madvise(region(rank), region_bytes_, MADV_POPULATE_WRITE) == 0) return;
  int error = errno;
  if (error == EINVAL) {  // a kernel before 5.14
    const auto offset = static_cast<off_t>(region_bytes_ * static_cast<unsigned>(rank));
    error = posix_fallocate(fd, offset, static_cast<off_t>(region_bytes_));
    if (error == 0) return;
  }
  fail("cannot commit " + mebibytes(region_bytes_) + " of shared memory for rank " +
           std::to_string(rank),
       error == EFAULT ? ENOMEM : error);
}

void advise_huge_pages(void* data, std::size_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace tpkernels::host
